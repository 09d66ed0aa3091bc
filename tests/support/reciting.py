"""Fixtures: one server for all tests of a folder. Its model recites what a test gives it to say."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.scripted import ROOT, Reciter, Running, ScriptedModel, running_server

from longspan.chat import Tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_dir(ROOT / "models/k31-tiny")


@pytest.fixture(scope="session")
def shared_server(tokenizer: Tokenizer) -> Iterator[Running]:
    with running_server(ScriptedModel(tokenizer, Reciter(tokenizer)), tokenizer) as server:
        yield server


@pytest.fixture
def server(shared_server: Running) -> Iterator[Running]:
    """The shared server, quiet and as new; everything must be free again after the test."""
    yield shared_server
    shared_server.model.before_step = lambda: None
    shared_server.wait_until_idle()
