"""Limits of the machine are measured by the native operators, or by torch where there are none."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from longspan.ops import limits
from longspan.ops.native.extension import Choice


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "_READ_BYTES", 2**16)
    monkeypatch.setattr(limits, "_SIDE", 32)


def test_torch_measures_where_nothing_native_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "choose", lambda: Choice(None, None, "not built"))
    found = limits.machine_limits()
    assert found.threads >= 1
    assert found.read_bytes > 0 and found.bf16_operations > 0 and found.int8_operations == 0


def test_the_best_try_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    tries = iter([3.0, 9.0, 7.0, 8.0, 1.0])
    module = SimpleNamespace(
        num_threads=lambda: 6,
        read_bandwidth=lambda address, nbytes: next(tries) if address and nbytes == 2**16 else 0,
        bf16_peak=lambda: 0.0,
        int8_peak=lambda: 20.0,
    )
    monkeypatch.setattr(limits, "choose", lambda: SimpleNamespace(module=module))
    assert limits.machine_limits() == limits.MachineLimits(6, 9e9, 0.0, 20e9)
