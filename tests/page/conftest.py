"""Chromium before a server whose model recites what a test gives it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from support.browser import Visit, running_chromium, visited
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
    """The shared server; everything must be free again after the test."""
    yield shared_server
    shared_server.model.before_step = lambda: None
    shared_server.wait_until_idle()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Playwright keeps an event loop running in this thread, so it leaves with the tests that need it."""
    with running_chromium() as chromium:
        yield chromium


@pytest.fixture
def visit(server: Running, browser: Any) -> Iterator[Visit]:
    visit = visited(server, browser)
    yield visit
    visit.page.context.close()
    visit.check()


@pytest.fixture(scope="module")
def library(shared_server: Running, browser: Any) -> Iterator[Visit]:
    """A page for tests of its modules alone, which leave nothing behind."""
    visit = visited(shared_server, browser)
    yield visit
    visit.page.context.close()
    visit.check()
