"""Who goes first, who gives way, and how long anybody waits. Answers are looked at elsewhere."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from support.fake_model import FakeModel
from support.serving import Answers, assert_all_free, finish, gather, make_engine, make_request, run

from longspan.config import ModelConfig
from longspan.engine.engine import Engine
from longspan.engine.pace import Pace
from longspan.engine.request import Request
from longspan.errors import DeadlineError


def with_priority(request: Request, priority: int) -> Request:
    return replace(request, priority=priority)


def order_of_ends(engine: Engine) -> list[str]:
    ended = []
    while engine.has_work:
        ended += [output.request_id for output in engine.step() if output.finish]
    return ended


@pytest.mark.parametrize(("bound", "fitting"), [(1.0, 100), (0.5, 64), (0.01, 64), (3.0, 300), (0, 512)])
def test_a_pace_allows_what_fits_the_bound_and_at_least_one_cut(bound: float, fitting: int) -> None:
    pace = Pace(bound, 64)
    assert pace.limit(512) == 512  # nothing is known yet
    pace.observe(200, 2.0)
    assert pace.limit(512) == fitting
    assert pace.limit(10) == 10


def test_a_pace_follows_what_steps_cost_now_and_ignores_small_ones() -> None:
    pace = Pace(1.0, 64)
    pace.observe(100, 1.0)
    pace.observe(2, 100.0)
    assert pace.limit(512) == 100
    for _ in range(30):
        pace.observe(100, 0.5)
    assert 195 <= pace.limit(512) <= 200


def test_a_long_prompt_takes_small_steps_beside_others_and_large_ones_alone(config: ModelConfig) -> None:
    fake = FakeModel(config)
    engine = make_engine(fake, num_pages=600, chunk=512, max_itl_ms=100)
    engine.core._scheduler.pace.observe(100, 0.1)  # a millisecond a token
    engine.core._scheduler.pace.observe = lambda *_: None  # type: ignore[method-assign]
    engine.add(make_request("decoding", [1, 2], max_tokens=4))
    engine.step()
    engine.add(make_request("long", [3 + i % 40 for i in range(1000)]))
    sizes = []
    while len(sizes) < 5:
        engine.step()
        sizes.append(fake.batches[-1].num_tokens)
    assert sizes == [1 + 64, 1 + 64, 1 + 64, 512, 296]
    finish(engine)


@pytest.mark.parametrize("chunk", [64, 128, 256])
def test_short_prompts_do_not_wait_for_a_long_one_which_goes_on(config: ModelConfig, chunk: int) -> None:
    fake = FakeModel(config)
    engine = make_engine(fake, num_pages=800, num_slots=4, chunk=chunk)
    engine.add(make_request("long", [3 + i % 40 for i in range(2000)], max_tokens=1))
    engine.step()
    short = [make_request(f"short {i}", [5 + i] * 50, max_tokens=1) for i in range(8)]
    for request in short:
        engine.add(request)
    long_tokens, steps, ended = chunk, 0, set()
    while len(ended) < len(short):
        ended |= {output.request_id for output in engine.step() if output.finish}
        long_tokens += max(fake.batches[-1].lengths.tolist())
        steps += 1
    assert steps <= 2 * len(short) + 2
    assert long_tokens >= steps * chunk / 3
    assert order_of_ends(engine) == ["long"]


def test_higher_priority_goes_first_and_equals_in_order_of_arrival(config: ModelConfig) -> None:
    engine = make_engine(FakeModel(config), num_slots=1)
    for name, priority in (("a", 1), ("b", 0), ("c", 0), ("d", -5), ("e", 1)):
        engine.add(with_priority(make_request(name, [2, 3], max_tokens=2), priority))
    assert order_of_ends(engine) == ["d", "b", "c", "a", "e"]


@pytest.mark.parametrize("swap_bytes", [0, 1 << 30])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_higher_priority_takes_the_place_of_lower_which_loses_nothing(
    config: ModelConfig, swap_bytes: int, asynchronous: bool
) -> None:
    fake = FakeModel(config)
    engine = make_engine(fake, num_slots=1, swap_bytes=swap_bytes, async_scheduling=asynchronous)
    low = make_request("low", [2, 3, 4], max_tokens=12)
    alone = run(make_engine(FakeModel(config)), low)["low", 0].token_ids
    engine.add(with_priority(low, 1))
    answers: Answers = {}
    for _ in range(4):
        gather(engine.step(), answers)
    engine.add(with_priority(make_request("high", [7], max_tokens=3), 0))
    ended = []
    while engine.has_work:
        outputs = engine.step()
        gather(outputs, answers)
        ended += [output.request_id for output in outputs if output.finish]
    assert ended == ["high", "low"]
    assert answers["low", 0].token_ids == alone
    assert engine.stats.num_swaps + engine.stats.num_preemptions == 1
    assert (engine.stats.num_swaps == 1) == (swap_bytes > 0)
    engine.core.close()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_what_is_late_ends_with_an_error_wherever_it_is(config: ModelConfig, asynchronous: bool) -> None:
    engine = make_engine(FakeModel(config), num_slots=1, async_scheduling=asynchronous)
    running = replace(make_request("running", [2, 3], max_tokens=50), timeout=0.15)
    waiting = replace(make_request("waiting", [2, 3]), timeout=0.15)
    patient = replace(make_request("patient", [2, 3], max_tokens=2), timeout=1000)
    for request in (running, waiting, patient):
        engine.add(request)
    answers: Answers = {}
    for _ in range(3):
        gather(engine.step(), answers)
    time.sleep(0.2)
    while engine.has_work:
        gather(engine.step(), answers)
    for name in ("running", "waiting"):
        end = answers[name, 0].finish
        assert end and isinstance(end.error, DeadlineError) and "0.15 seconds" in str(end.error)
    assert 0 < len(answers["running", 0].token_ids) < 50
    assert answers["waiting", 0].token_ids == []
    assert answers["patient", 0].reason == "length"
    assert_all_free(engine)
    engine.core.close()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_an_abort_at_any_moment_returns_everything(config: ModelConfig, asynchronous: bool) -> None:
    for steps in range(9):
        engine = make_engine(
            FakeModel(config),
            chunk=5,
            async_scheduling=asynchronous,
            enable_prefix_caching=True,
            snapshot_interval=4,
        )
        engine.add(make_request("a", [3 + i for i in range(21)], n=2))
        engine.add(make_request("b", [3 + i for i in range(13)]))
        for _ in range(steps):
            engine.step()
        engine.abort("a")
        engine.memory.check()
        assert engine.memory.use().state_bytes_running <= engine.memory.slab_bytes
        engine.abort("b")
        assert_all_free(engine)
        engine.core.close()
