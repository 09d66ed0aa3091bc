"""Which table of operators is chosen."""

from __future__ import annotations

import pytest

from longspan.errors import ConfigError
from longspan.ops.backend import BACKEND_VARIABLE, select_backend


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
