"""The bar appears late, on terminals only, and never changes what is iterated."""

from __future__ import annotations

import io
from types import SimpleNamespace

import pytest

from longspan.formats import progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch) -> Terminal:
    stream = Terminal()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(progress, "sys", SimpleNamespace(stderr=stream))
    return stream


@pytest.fixture
def clock(monkeypatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


def advance(clock, seconds, items):
    for item in items:
        clock[0] += seconds
        yield item


def test_items_pass_unchanged_and_nothing_is_drawn_off_a_terminal(capsys):
    assert list(progress.track(range(5), "Work")) == [0, 1, 2, 3, 4]
    assert capsys.readouterr().err == ""


def test_quick_work_draws_nothing(terminal, clock):
    assert list(progress.track(advance(clock, 0.1, range(5)), "Work", total=5)) == [0, 1, 2, 3, 4]
    assert terminal.getvalue() == ""


def test_slow_work_draws_a_bar_and_clears_it(terminal, clock):
    assert list(progress.track(advance(clock, 0.6, range(5)), "Loading weights", total=5)) == [0, 1, 2, 3, 4]
    assert "Loading weights" in terminal.getvalue()


def test_stopping_early_leaves_no_bar_running(terminal, clock):
    for item in progress.track(advance(clock, 0.6, range(50)), "Work", total=50):
        if item == 10:
            break
    assert "Work" in terminal.getvalue()
