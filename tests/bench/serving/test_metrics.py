"""The maths of every figure, from records made by hand."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from longspan.bench.serving.metrics import LATENCIES, distribution, peak_concurrency, summarise
from longspan.bench.serving.run import Record

FINITE = st.floats(0, 1e6)


def record(**fields: Any) -> Record:
    given: dict[str, Any] = {"conversation": 0, "turn": 0, "input_len": 8, "output_len": 4}
    given |= {"scheduled": 1.0, "sent": 1.5, "ended": 4.0, "chunks": [2.0, 2.5, 2.5, 4.0]}
    given |= {"prompt_tokens": 10, "cached_tokens": 4, "output_tokens": 5, "finish_reason": "length"}
    return Record(**(given | fields))


FAILED = record(error="HTTP 500", message="HTTP 500: no", ended=9.0, output_tokens=1, sent=8.0)


def test_each_latency_of_one_request_is_what_its_definition_says() -> None:
    found = summarise([record()], 1, [50]).latencies
    expected = {"ttft": 1.0, "ttft_sent": 0.5, "e2el": 3.0, "e2el_sent": 2.5, "wait": 0.5, "tpot": 0.5}
    assert {name: found[name].mean for name in expected} == expected
    assert found["itl"].count == 3 and math.isclose(found["itl"].mean, 2 / 3)
    assert (found["itl"].min, found["itl"].median, found["itl"].max) == (0.0, 0.5, 1.5)
    assert set(found) == set(LATENCIES)


def test_an_answer_of_one_token_has_no_time_between_tokens() -> None:
    found = summarise([record(chunks=[2.0], ended=2.0, output_tokens=1)], 1, [50]).latencies
    assert (found["ttft"].mean, found["tpot"].count, found["itl"].count) == (1.0, 0, 0)


def test_an_answer_without_text_has_its_first_token_at_its_end() -> None:
    found = summarise([record(chunks=[], output_tokens=2)], 1, [50]).latencies
    assert (found["ttft"].mean, found["e2el"].mean, found["itl"].count) == (3.0, 3.0, 0)


def test_throughput_counts_what_was_answered_over_the_time_to_the_last_end() -> None:
    summary = summarise([record(), record(ended=8.0), FAILED], 5, [99])
    assert (summary.planned, summary.completed, summary.errors) == (5, 2, {"HTTP 500": 1})
    assert (summary.duration, summary.prompt_tokens, summary.output_tokens) == (9.0, 20, 10)
    assert math.isclose(summary.request_rate, 2 / 9)
    assert math.isclose(summary.output_rate, 10 / 9)
    assert math.isclose(summary.total_rate, 30 / 9)
    assert summary.latencies["e2el"].count == 2
    assert summary.hit_rate == 0.4


def test_nothing_answered_is_all_zeros() -> None:
    for records in ([], [FAILED]):
        summary = summarise(records, 1, [99])
        assert (summary.completed, summary.output_rate, summary.hit_rate) == (0, 0.0, None)
        assert summary.latencies["ttft"].percentiles == {99: 0.0}


def test_a_hit_rate_is_of_requests_that_say_it() -> None:
    assert summarise([record(cached_tokens=None)], 1, []).hit_rate is None
    assert summarise([record(cached_tokens=None), record(cached_tokens=0)], 2, []).hit_rate == 0.0


@pytest.mark.parametrize(
    ("limits", "good"),
    [
        ({"ttft": 1.0}, 2),
        ({"ttft": 0.99}, 0),  # from the time scheduled
        ({"tpot": 0.5}, 1),
        ({"e2el": 3.0}, 1),
        ({"e2el": 7.0, "tpot": 0.5}, 1),
        ({"ttft": 1.0, "tpot": 1.5, "e2el": 7.0}, 2),
    ],
)
def test_goodput_counts_requests_within_all_limits(limits: dict[str, float], good: int) -> None:
    records = [record(), record(ended=8.0), FAILED]
    goodput = summarise(records, 3, [], limits).goodput
    assert goodput is not None and math.isclose(goodput, good / 9)
    assert summarise(records, 3, []).goodput is None


def test_a_token_alone_cannot_fail_the_time_per_token() -> None:
    assert summarise([record(output_tokens=1)], 1, [], {"tpot": 0.001}).goodput == 1 / 4


@given(st.lists(FINITE, min_size=1, max_size=20), st.floats(0, 100))
def test_percentiles_lie_between_the_values_next_to_them(values: list[float], p: float) -> None:
    found = distribution(values, [p, 50.0])
    ordered = sorted(values)
    place = p / 100 * (len(values) - 1)
    low, high = ordered[math.floor(place)], ordered[min(math.ceil(place), len(values) - 1)]
    assert low - 1e-6 <= found.percentiles[p] <= high + 1e-6
    assert math.isclose(found.median, found.percentiles[50.0], abs_tol=1e-9)
    assert math.isclose(found.std, float(np.std(values)), abs_tol=1e-9)


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 20)), max_size=12))
def test_peak_concurrency_is_the_most_at_any_moment(spans: list[tuple[int, int]]) -> None:
    records = [record(sent=float(sent), ended=float(sent + length)) for sent, length in spans]
    at_once = [sum(r.sent <= t + 0.5 < r.ended for r in records) for t in range(40)]
    assert peak_concurrency(records) == max(at_once)
