"""Chromium before a server whose model recites what a test gives it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from support.browser import Visit, running_chromium, visited
from support.reciting import server, shared_server, tokenizer
from support.scripted import Running

__all__ = ["server", "shared_server", "tokenizer"]


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
