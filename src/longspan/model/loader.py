"""`load_model`: from a checkpoint directory in the published format to a `Decoder`."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from longspan.config import load_config
from longspan.errors import ConfigError
from longspan.formats.check import require_text_model
from longspan.formats.safetensors import open_checkpoint
from longspan.model.decoder import Decoder
from longspan.model.weights import RenamedCheckpoint, build_weights
from longspan.ops.backend import select_backend

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def load_model(
    path: str | os.PathLike[str], dtype: str | torch.dtype = "bfloat16", backend: str | None = None
) -> Decoder:
    """The text model in the directory `path`, computing in `dtype` with the operators of `backend`.

    Names, shapes and dtypes of all tensors are checked from the headers; the bytes of an expert are read when
    it is first hit. Raises ConfigError for config.json, dtype or backend, CheckpointError for the weights.
    """
    compute = _dtype(dtype)
    ops = select_backend(backend)
    config = load_config(Path(path))
    checkpoint = open_checkpoint(Path(path))
    source = RenamedCheckpoint(checkpoint, require_text_model(config, checkpoint))
    return Decoder(config, build_weights(source, config, compute), ops, compute)


def _dtype(dtype: str | torch.dtype) -> torch.dtype:
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise ConfigError(f"dtype is {name!r}.", remedy=f"Legal: {', '.join(map(repr, DTYPES))}.")
    return DTYPES[name]
