"""Checkpoints and servers of the end-to-end tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.subprocess_server import ServerProcess, server_process
from support.tiny_chat import write_chat_checkpoint


@pytest.fixture(scope="session")
def random_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_checkpoint(tmp_path_factory.mktemp("checkpoints") / "random")


@pytest.fixture(scope="session")
def random_server(random_dir: Path) -> Iterator[ServerProcess]:
    with server_process(random_dir, "--max-num-seqs", "8") as server:
        yield server


@pytest.fixture(scope="session")
def tiny_server(tiny_dir: Path) -> Iterator[ServerProcess]:
    # In float32 an answer does not depend on what else is in the batch, so answers can be compared.
    with server_process(tiny_dir, "--dtype", "float32") as server:
        yield server
