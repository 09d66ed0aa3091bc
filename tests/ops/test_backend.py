"""Which table of operators is chosen."""

from __future__ import annotations

from functools import cache

import pytest

from longspan.errors import ConfigError
from longspan.ops import backend
from longspan.ops.backend import BACKEND_VARIABLE, select_backend
from longspan.ops.native.extension import Choice


def test_the_argument_wins_over_the_environment(monkeypatch) -> None:
    monkeypatch.setenv(BACKEND_VARIABLE, "nonsense")
    assert select_backend("torch").name == "torch"


def test_the_environment_pins_a_backend(monkeypatch) -> None:
    monkeypatch.setenv(BACKEND_VARIABLE, "torch")
    assert select_backend().name == "torch"


@pytest.mark.parametrize("empty", [None, ""])
def test_without_a_wish_some_backend_is_chosen(empty: str | None, monkeypatch) -> None:
    monkeypatch.delenv(BACKEND_VARIABLE, raising=False)
    if empty is not None:
        monkeypatch.setenv(BACKEND_VARIABLE, empty)
    assert select_backend().name


def test_an_unknown_backend_is_refused_with_the_legal_names(monkeypatch) -> None:
    with pytest.raises(ConfigError, match=r"cuda.*'torch'"):
        select_backend("cuda")
    monkeypatch.setenv(BACKEND_VARIABLE, "tpu")
    with pytest.raises(ConfigError, match=rf"{BACKEND_VARIABLE}.*tpu.*'torch'"):
        select_backend()


def test_where_nothing_native_is_built_torch_computes_and_says_so(monkeypatch, caplog) -> None:
    monkeypatch.delenv(BACKEND_VARIABLE, raising=False)
    monkeypatch.setattr(backend, "choose", lambda: Choice(None, None, "no compiler"))
    monkeypatch.setattr(backend, "backends", cache(backend.backends.__wrapped__))
    assert select_backend().name == select_backend().name == "torch"
    assert [record.message for record in caplog.records] == [
        "No native operators (no compiler): computing with torch, which is slow."
    ]
