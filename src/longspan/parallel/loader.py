"""`load_share`: this rank's share of a checkpoint, as a `Decoder` that computes with the other ranks."""

from __future__ import annotations

import os

import torch

from longspan.model.decoder import Decoder
from longspan.model.loader import compute_dtype, open_model
from longspan.ops.backend import select_backend
from longspan.parallel.layout import Layout
from longspan.parallel.operators import parallel_operators
from longspan.parallel.sharding import local_weights


def load_share(
    path: str | os.PathLike[str], layout: Layout, dtype: str | torch.dtype, backend: str | None = None
) -> Decoder:
    """As `load_model`, of the slices that `layout` gives to this rank; `layout.config` is of the same model.

    Raises ConfigError for config.json, dtype or backend, CheckpointError for the weights.
    """
    compute = compute_dtype(dtype)
    ops = parallel_operators(select_backend(backend), layout)
    _, source = open_model(path)
    return Decoder(layout.local_config, local_weights(source, layout, compute), ops, compute)
