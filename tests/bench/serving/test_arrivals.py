"""Arrivals: the rate that was asked for, the burstiness that was asked for, the same for the same seed."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from longspan.bench.serving.arrivals import arrival_times


@given(st.integers(0, 60), st.floats(0.01, 1000), st.floats(0.05, 50), st.integers(0, 9))
def test_arrivals_begin_at_zero_ascend_and_end_within_their_time(
    count: int, rate: float, burstiness: float, seed: int
) -> None:
    times = arrival_times(count, rate, burstiness, seed)
    assert len(times) == count and times == sorted(times)
    assert times[:1] == [0.0][:count]
    assert all(0 <= at <= count / rate * (1 + 1e-9) for at in times)
    assert times == arrival_times(count, rate, burstiness, seed)


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gaps_have_the_mean_and_the_variance_of_a_gamma_process(burstiness: float) -> None:
    gaps = np.diff(arrival_times(40_000, 8.0, burstiness, seed=1))
    assert math.isclose(gaps.mean(), 1 / 8, rel_tol=0.001)
    assert math.isclose((gaps.std() / gaps.mean()) ** 2, 1 / burstiness, rel_tol=0.05)


def test_a_poisson_process_has_no_memory() -> None:
    gaps = np.diff(arrival_times(40_000, 1.0, 1.0, seed=2))
    for wait in (0.5, 1.0, 2.0):
        assert math.isclose((gaps > wait).mean(), math.exp(-wait), abs_tol=0.01)
    assert abs(np.corrcoef(gaps[:-1], gaps[1:])[0, 1]) < 0.02


def test_infinite_burstiness_is_a_metronome_and_an_infinite_rate_a_start() -> None:
    assert np.allclose(arrival_times(5, 4.0, math.inf, 0), [0, 0.25, 0.5, 0.75, 1.0])
    assert arrival_times(3, math.inf, 1.0, 0) == [0, 0, 0]


def test_another_seed_gives_other_arrivals() -> None:
    assert arrival_times(9, 1.0, 1.0, 0) != arrival_times(9, 1.0, 1.0, 1)
