"""Ranks and a checkpoint for all tests of parallel/."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.random_checkpoint import write_checkpoint
from support.ranks import Ranks


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    started = Ranks(tmp_path_factory.mktemp("ranks"))
    yield started
    started.close()


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """K3.1 with heads for four ranks; they can share neither widths, vocabulary nor experts evenly."""
    return write_checkpoint(
        tmp_path_factory.mktemp("parallel") / "k31",
        "k3.1",
        packed=True,
        num_attention_heads=8,
        num_key_value_heads=8,
        linear_attn_config={
            "head_dim": 6,
            "num_heads": 4,
            "short_conv_kernel_size": 4,
            "full_attn_layers": [3, 5],
            "kda_layers": [1, 2, 4],
            "use_full_rank_gate": True,
            "gate_lower_bound": -5.0,
        },
    )
