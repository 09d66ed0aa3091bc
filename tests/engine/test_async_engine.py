from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import Any

import pytest
from support.fake_model import FakeModel
from support.serving import Answers, assert_all_free, gather, make_engine, make_request, run

from longspan.config import ModelConfig
from longspan.engine.async_engine import AsyncEngine
from longspan.engine.engine import Engine
from longspan.engine.request import Request
from longspan.engine.worker import ThreadWorker
from longspan.errors import LongspanError, NonFiniteError, OverloadedError, RequestError

PROMPTS = {"a": [5, 6, 7], "b": [8] * 9, "c": list(range(20, 37))}


class Slow:
    """A hook that makes steps take a moment, or wait for ever."""

    def __init__(self, seconds: float = 0.002) -> None:
        self.seconds = seconds
        self.gate = threading.Event()
        self.gate.set()
        self.steps = 0

    def __call__(self, *_: object) -> None:
        self.steps += 1
        assert self.gate.wait(30)
        time.sleep(self.seconds)


def serve(engine: Engine, use: Callable[[AsyncEngine], Awaitable[None]], drain: float = 0.0) -> None:
    """Runs `use` against an AsyncEngine, shuts it down, and sees that all memory came back."""

    async def main() -> None:
        server = AsyncEngine(ThreadWorker(engine.core), None)
        await server.start()
        try:
            await use(server)
        finally:
            await server.shutdown(drain)

    asyncio.run(main())
    assert not engine.has_work
    assert_all_free(engine)


async def collect(server: AsyncEngine, request: Request, answers: Answers | None = None) -> Answers:
    answers = {} if answers is None else answers
    async with aclosing(server.generate(request)) as outputs:
        async for output in outputs:
            gather([output], answers)
    return answers


async def idle(server: AsyncEngine) -> None:
    """Returns when the engine has nothing left to do."""
    for _ in range(2000):
        if not server.busy:
            assert (server.stats.num_running, server.stats.num_waiting) == (0, 0)
            return
        await asyncio.sleep(0.002)
    raise AssertionError(f"still busy: {server.stats}")


def test_tasks_get_the_answers_of_the_synchronous_engine(config: ModelConfig) -> None:
    requests = [make_request(name, prompt, n=2, temperature=1.0, seed=4) for name, prompt in PROMPTS.items()]
    expected = run(make_engine(FakeModel(config)), *requests)

    async def use(server: AsyncEngine) -> None:
        answers: Answers = {}
        await asyncio.gather(*(collect(server, request, answers) for request in requests))
        assert {key: answer.token_ids for key, answer in answers.items()} == {
            key: answer.token_ids for key, answer in expected.items()
        }

    serve(make_engine(FakeModel(config), chunk=5), use)


def test_outputs_arrive_while_others_are_made(config: ModelConfig) -> None:
    slow = Slow()

    async def use(server: AsyncEngine) -> None:
        async with aclosing(server.generate(make_request("a", [1, 2], max_tokens=100))) as outputs:
            await anext(outputs)
            assert server.stats.num_running == 1

    serve(make_engine(FakeModel(config, slow)), use)
    assert slow.steps < 90


def test_a_bad_request_is_refused_before_anything_is_awaited(config: ModelConfig) -> None:
    async def use(server: AsyncEngine) -> None:
        with pytest.raises(RequestError, match="The prompt is empty"):
            server.generate(make_request("a", []))
        assert (await collect(server, make_request("b", [1])))["b", 0].reason == "length"

    serve(make_engine(FakeModel(config)), use)


def test_two_requests_of_one_id_are_refused_and_the_first_goes_on(config: ModelConfig) -> None:
    async def use(server: AsyncEngine) -> None:
        first = asyncio.create_task(collect(server, make_request("a", [1, 2], max_tokens=30)))
        await asyncio.sleep(0.01)
        with pytest.raises(RequestError, match="'a' is being served"):
            await collect(server, make_request("a", [1, 2]))
        assert len((await first)["a", 0].token_ids) == 30

    serve(make_engine(FakeModel(config, Slow())), use)


def test_closing_the_generator_frees_the_memory(config: ModelConfig) -> None:
    slow = Slow()

    async def use(server: AsyncEngine) -> None:
        async with aclosing(server.generate(make_request("a", [1], max_tokens=None))) as outputs:
            await anext(outputs)
        await idle(server)
        steps = slow.steps
        await asyncio.sleep(0.03)
        assert slow.steps == steps

    serve(make_engine(FakeModel(config, slow)), use)


def test_cancelling_the_task_frees_the_memory_even_before_the_first_token(config: ModelConfig) -> None:
    slow = Slow()

    async def use(server: AsyncEngine) -> None:
        slow.gate.clear()
        task = asyncio.create_task(collect(server, make_request("a", [1], max_tokens=None)))
        await asyncio.sleep(0.02)
        task.cancel()
        slow.gate.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        await idle(server)

    serve(make_engine(FakeModel(config, slow)), use)


def test_an_id_can_be_used_again_at_once_after_leaving(config: ModelConfig) -> None:
    expected = run(make_engine(FakeModel(config)), make_request("a", PROMPTS["b"]))["a", 0].token_ids

    async def use(server: AsyncEngine) -> None:
        for _ in range(20):
            async with aclosing(server.generate(make_request("a", [1], max_tokens=None))) as outputs:
                await anext(outputs)
            assert (await collect(server, make_request("a", PROMPTS["b"])))["a", 0].token_ids == expected

    serve(make_engine(FakeModel(config)), use)


def test_a_storm_of_hang_ups_leaks_nothing_and_disturbs_nobody(config: ModelConfig) -> None:
    stayer = make_request("stayer", PROMPTS["c"], max_tokens=120)
    expected = run(make_engine(FakeModel(config)), stayer)["stayer", 0].token_ids
    choose = random.Random(3)

    async def visit(server: AsyncEngine, number: int) -> None:
        limit = choose.choice([0, 1, 2, 5, 6, 7, None])
        request = make_request(f"v{number}", [number % 50, 3, 4], max_tokens=6, n=choose.choice([1, 2]))
        async with aclosing(server.generate(request)) as outputs:
            seen = 0
            async for _ in outputs:
                seen += 1
                if seen == limit:
                    break

    async def use(server: AsyncEngine) -> None:
        staying = asyncio.create_task(collect(server, stayer))
        for start in range(0, 100, 10):
            tasks = [asyncio.create_task(visit(server, start + i)) for i in range(10)]
            await asyncio.sleep(choose.random() * 0.01)
            for task in tasks[::3]:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        assert (await staying)["stayer", 0].token_ids == expected
        await idle(server)
        assert server.healthy

    serve(make_engine(FakeModel(config), num_slots=4), use)


def test_an_error_of_one_request_is_raised_to_its_task_alone(config: ModelConfig) -> None:
    def spoil(batch: Any, logits: Any) -> None:
        for i, row in enumerate(batch.logit_rows.tolist()):
            if int(batch.row_positions[row]) == 30:
                logits[i] = float("nan")

    async def use(server: AsyncEngine) -> None:
        bad = asyncio.create_task(collect(server, make_request("bad", [1] * 28, n=2)))
        good = await collect(server, make_request("good", [1, 2, 3]))
        assert good["good", 0].reason == "length"
        with pytest.raises(NonFiniteError):
            await bad
        await idle(server)

    serve(make_engine(FakeModel(config, spoil)), use)


def test_aborting_from_outside_ends_the_stream_with_its_reason(config: ModelConfig) -> None:
    async def use(server: AsyncEngine) -> None:
        task = asyncio.create_task(collect(server, make_request("a", [1], max_tokens=None, n=2)))
        await asyncio.sleep(0.02)
        server.abort("a")
        server.abort("unknown")
        answers = await task
        assert [answers["a", index].reason for index in (0, 1)] == ["abort", "abort"]

    serve(make_engine(FakeModel(config, Slow())), use)


def test_shutting_down_lets_requests_finish_and_takes_no_more(config: ModelConfig) -> None:
    async def use(server: AsyncEngine) -> None:
        task = asyncio.create_task(collect(server, make_request("a", [1], max_tokens=20)))
        await asyncio.sleep(0.01)
        closing = asyncio.create_task(server.shutdown(drain_seconds=30))
        await asyncio.sleep(0)
        with pytest.raises(OverloadedError, match="shutting down"):
            await collect(server, make_request("b", [1]))
        assert not server.healthy
        assert len((await task)["a", 0].token_ids) == 20
        await closing

    serve(make_engine(FakeModel(config, Slow())), use)


def test_shutting_down_ends_what_takes_too_long(config: ModelConfig) -> None:
    async def use(server: AsyncEngine) -> None:
        task = asyncio.create_task(collect(server, make_request("a", [1], max_tokens=None)))
        await asyncio.sleep(0.02)
        await server.shutdown(drain_seconds=0.02)
        assert (await task)["a", 0].reason == "abort"

    serve(make_engine(FakeModel(config, Slow(0.01))), use)


def test_a_dead_thread_tells_everybody_and_is_not_healthy(
    config: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(FakeModel(config, Slow()))

    def die() -> None:
        raise SystemError("a fault of the engine itself")

    async def main() -> None:
        server = AsyncEngine(ThreadWorker(engine.core), None)
        await server.start()
        tasks = [asyncio.create_task(collect(server, make_request(name, [1, 2]))) for name in "ab"]
        await asyncio.sleep(0.005)
        monkeypatch.setattr(engine.core, "step", die)
        for task in tasks:
            with pytest.raises(LongspanError, match="died"):
                await task
        assert not server.healthy
        with pytest.raises(LongspanError, match="died"):
            await collect(server, make_request("c", [1]))
        await server.shutdown()

    asyncio.run(main())


def test_an_idle_engine_sleeps(config: ModelConfig) -> None:
    engine = make_engine(FakeModel(config))
    calls = 0
    step = engine.core.step

    def counting() -> list:
        nonlocal calls
        calls += 1
        return step()

    engine.core.step = counting  # type: ignore[method-assign]

    async def use(server: AsyncEngine) -> None:
        await collect(server, make_request("a", [1], max_tokens=3))
        await asyncio.sleep(0.05)
        assert calls <= 5

    serve(engine, use)
