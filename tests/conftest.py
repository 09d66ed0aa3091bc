"""Shared by all tests: one torch thread, golden data, the bundled checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

torch.set_num_threads(1)

DATA = Path(__file__).parent / "data"


@pytest.fixture(scope="session")
def data_dir() -> Path:
    return DATA


@pytest.fixture(scope="session")
def tiny_dir() -> Path:
    """The bundled trained checkpoint."""
    return Path(__file__).parent.parent / "models" / "k31-tiny"
