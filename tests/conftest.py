"""Shared by all tests: one torch thread, golden data, the bundled checkpoint."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from hypothesis import settings

collect_ignore = [] if find_spec("vllm") else ["plugin_vllm"]  # `make test-vllm` has an environment for it

torch.set_num_threads(1)

# The machine may be busy: a slow example is not a failing one.
settings.register_profile("longspan", deadline=None)
settings.load_profile("longspan")

DATA = Path(__file__).parent / "data"


@pytest.fixture(scope="session")
def data_dir() -> Path:
    return DATA


@pytest.fixture(scope="session")
def tiny_dir() -> Path:
    """The bundled trained checkpoint."""
    return Path(__file__).parent.parent / "models" / "k31-tiny"
