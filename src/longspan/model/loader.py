"""`load_model`: from a checkpoint directory in the published format to a `Decoder`."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from longspan.config import ModelConfig, load_config
from longspan.errors import ConfigError
from longspan.formats.check import require_text_model
from longspan.formats.safetensors import open_checkpoint
from longspan.model.decoder import Decoder
from longspan.model.weights import RenamedCheckpoint, TensorSource, build_weights
from longspan.ops.backend import select_backend

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def load_model(
    path: str | os.PathLike[str], dtype: str | torch.dtype = "bfloat16", backend: str | None = None
) -> Decoder:
    """The text model in the directory `path`, computing in `dtype` with the operators of `backend`.

    Names, shapes and dtypes of all tensors are checked from the headers; the bytes of an expert are read when
    it is first hit. Raises ConfigError for config.json, dtype or backend, CheckpointError for the weights.
    """
    compute = compute_dtype(dtype)
    ops = select_backend(backend)
    config, source = open_model(path)
    return Decoder(config, build_weights(source, config, compute), ops, compute)


def open_model(path: str | os.PathLike[str]) -> tuple[ModelConfig, TensorSource]:
    """What the directory `path` holds, its tensors checked against config.json, none of them read yet."""
    config = load_config(Path(path))
    checkpoint = open_checkpoint(Path(path))
    return config, RenamedCheckpoint(checkpoint, require_text_model(config, checkpoint))


def compute_dtype(dtype: str | torch.dtype) -> torch.dtype:
    """A dtype that the operators compute in. ConfigError for others."""
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise ConfigError(f"dtype is {name!r}.", remedy=f"Legal: {', '.join(map(repr, DTYPES))}.")
    return DTYPES[name]
