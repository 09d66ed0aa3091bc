"""Small random models of every family."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from support.random_checkpoint import write_checkpoint

import longspan
from longspan.model.decoder import Decoder

# name -> family, packed experts
KINDS = {
    "kimi-linear": ("kimi-linear", False),
    "k3": ("k3", True),
    "k3-plain-experts": ("k3", False),
    "k3.1": ("k3.1", True),
}


@pytest.fixture(scope="session")
def checkpoint_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A kind's checkpoint directory, written once."""
    root = tmp_path_factory.mktemp("checkpoints")

    def get(kind: str) -> Path:
        if not (root / kind).exists():
            write_checkpoint(root / kind, *KINDS[kind])
        return root / kind

    return get


@pytest.fixture(scope="session")
def model_of(checkpoint_of: Callable[[str], Path]) -> Callable[[str], Decoder]:
    """A kind's model in float32. Not to be changed by a test."""
    models: dict[str, Decoder] = {}

    def get(kind: str) -> Decoder:
        if kind not in models:
            models[kind] = longspan.load_model(checkpoint_of(kind), dtype="float32")
        return models[kind]

    return get
