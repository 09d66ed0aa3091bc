"""Workers that are real processes, with a core that counts, or fails as it is told to."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
from support.counting_core import (
    CRASH,
    HANG,
    LEAVE,
    RAISE,
    REFUSE,
    CountingCore,
    core_that_dies_at_once,
    refused_core,
)
from support.serving import Answers, gather, make_request

from longspan.engine import supervisor
from longspan.engine.async_engine import AsyncEngine
from longspan.engine.request import Request
from longspan.engine.worker import ProcessWorker, ThreadWorker, wait_ready
from longspan.errors import CapacityError, EngineDeadError, OverloadedError, RequestError


def quiet() -> None:
    logging.disable()


def start(make_core: Callable[[], Any] = CountingCore) -> ProcessWorker:
    return ProcessWorker(make_core, quiet)


class Started:
    """An engine and the loop it runs in, which goes on while a test uses it."""

    def __init__(self, engine: AsyncEngine) -> None:
        self.engine = engine
        self.runner = asyncio.Runner()
        self.runner.run(engine.start())

    @property
    def worker(self) -> ProcessWorker:
        worker = self.engine._supervisor._worker
        assert isinstance(worker, ProcessWorker)
        return worker

    def serve(self, *requests: Request) -> list[Answers | BaseException]:
        """All together; each ends with its answers or its error."""

        async def main() -> list[Answers | BaseException]:
            asked = [collect(self.engine, request) for request in requests]
            return await asyncio.gather(*asked, return_exceptions=True)

        return self.runner.run(main())

    def tokens(self, request: Request) -> list[int]:
        (answers,) = self.serve(request)
        assert isinstance(answers, dict), answers
        return answers[request.id, 0].token_ids

    def until(self, true: Callable[[], bool]) -> None:
        async def main() -> None:
            while not true():
                await asyncio.sleep(0.005)

        self.runner.run(main())

    def close(self) -> None:
        self.runner.run(self.engine.shutdown())
        self.runner.close()


async def collect(engine: AsyncEngine, request: Request) -> Answers:
    answers: Answers = {}
    async with aclosing(engine.generate(request)) as outputs:
        async for output in outputs:
            gather([output], answers)
    return answers


@pytest.fixture(scope="module")
def shared() -> Iterator[Started]:
    """One for many tests, which may die in each."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(supervisor, "RESTART_PERIOD", 0.0)
        started = Started(AsyncEngine(start(), None, restart=start, step_timeout=0))
        yield started
        started.close()


@pytest.fixture
def make(request: pytest.FixtureRequest) -> Callable[..., Started]:
    """An engine of the test's own, which is closed after it."""

    def make(worker: ProcessWorker | ThreadWorker, **options: Any) -> Started:
        started = Started(AsyncEngine(worker, None, **options))
        request.addfinalizer(started.close)
        return started

    return make


def test_many_requests_get_all_their_outputs_in_order(shared: Started) -> None:
    requests = [make_request(f"r{i}", [1], n=1 + i % 3, max_tokens=1 + i) for i in range(40)]
    for request, answers in zip(requests, shared.serve(*requests), strict=True):
        assert isinstance(answers, dict) and len(answers) == request.params.n
        assert all(a.token_ids == list(range(request.params.max_tokens or 0)) for a in answers.values())
    assert not shared.engine.busy and shared.engine.stats.num_running == 0


def test_requests_of_one_turn_of_the_loop_meet_in_one_step(shared: Started) -> None:
    before = shared.engine.stats.num_steps
    shared.serve(*(make_request(f"r{i}", [1], max_tokens=1) for i in range(20)))
    assert shared.engine.stats.num_steps == before + 1


def test_who_leaves_is_forgotten_and_the_id_can_be_used_at_once(shared: Started) -> None:
    async def visit() -> None:
        async with aclosing(shared.engine.generate(make_request("a", [1], max_tokens=None))) as outputs:
            assert (await anext(outputs)).token_ids == [0]

    for _ in range(20):
        shared.runner.run(visit())
    assert shared.tokens(make_request("a", [1])) == list(range(8))
    assert not shared.engine.busy and shared.engine.stats.num_running == 0


def test_a_request_that_the_core_refuses_fails_alone(shared: Started) -> None:
    bad, good = shared.serve(make_request("bad", [REFUSE], n=2), make_request("good", [1]))
    assert isinstance(bad, RequestError) and isinstance(good, dict)
    assert (bad.message, bad.param, bad.remedy) == ("Not this one.", "prompt", "Send another.")


def test_the_cache_is_flushed_in_the_worker(shared: Started) -> None:
    async def flush() -> list[int]:
        return await asyncio.gather(*(shared.engine.flush_cache() for _ in range(3)))

    assert shared.runner.run(flush()) == [shared.engine.stats.num_steps] * 3


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_that_come_to_both_are_for_the_front(shared: Started, number: int) -> None:
    before = shared.engine.num_restarts
    shared.worker.process.send_signal(number)
    assert shared.tokens(make_request("a", [1])) == list(range(8))
    assert shared.engine.num_restarts == before


@pytest.mark.parametrize(
    ("told", "how"),
    [
        (RAISE, "process ended with exit code 1 while"),
        (LEAVE, "process ended with exit code 7 while"),
        (CRASH, "process was killed by SIGSEGV while"),
    ],
)
def test_a_worker_that_dies_fails_its_requests_and_another_serves(
    shared: Started, told: int, how: str
) -> None:
    before, files = shared.engine.num_restarts, len(os.listdir("/proc/self/fd"))
    mates = [make_request(f"m{i}", [1], max_tokens=None) for i in range(3)]
    for error in shared.serve(*mates, make_request("bad", [told])):
        assert isinstance(error, EngineDeadError) and how in str(error)
    assert not shared.engine.healthy and not shared.engine.dead
    (early,) = shared.serve(make_request("early", [1]))
    assert isinstance(early, OverloadedError) and "being restarted" in str(early)
    shared.until(lambda: shared.engine.healthy)
    assert not shared.engine.busy
    assert shared.tokens(make_request("m1", [1])) == list(range(8))
    assert shared.engine.num_restarts == before + 1
    assert len(os.listdir("/proc/self/fd")) == files


def test_one_that_is_killed_while_idle_is_replaced_as_well(shared: Started) -> None:
    before = shared.engine.num_restarts
    shared.worker.process.kill()
    shared.until(lambda: shared.engine.healthy and shared.engine.num_restarts == before + 1)
    assert shared.tokens(make_request("a", [1])) == list(range(8))


def test_one_that_hangs_is_killed_but_not_one_that_has_nothing_to_do(make: Callable[..., Started]) -> None:
    started = make(start(), restart=start, step_timeout=0.5)
    started.runner.run(asyncio.sleep(0.7))
    assert started.engine.healthy
    (error,) = started.serve(make_request("bad", [HANG]))
    assert "process was killed, since no step of it ended for 0.5 seconds, while" in str(error)
    started.until(lambda: started.engine.healthy)
    assert started.engine.num_restarts == 1


def thread() -> ThreadWorker:
    return ThreadWorker(CountingCore())  # type: ignore[arg-type]


def test_without_restarts_a_death_is_final(make: Callable[..., Started]) -> None:
    told: list[str] = []
    started = make(thread(), on_death=lambda: told.append("dead"))
    (error,) = started.serve(make_request("bad", [RAISE]))
    assert isinstance(error, EngineDeadError) and "thread died" in str(error)
    started.until(lambda: started.engine.dead)
    (late,) = started.serve(make_request("a", [1]))
    assert isinstance(late, OverloadedError) and "serves nothing" in str(late)
    with pytest.raises(OverloadedError):
        started.runner.run(started.engine.flush_cache())
    assert told == ["dead"]


def test_a_flush_that_the_worker_dies_of_fails(make: Callable[..., Started]) -> None:
    worker = thread()
    started = make(worker)

    async def flush() -> None:
        answer = asyncio.ensure_future(started.engine.flush_cache())
        await asyncio.sleep(0)
        worker.kill()
        await answer

    started.serve(make_request("a", [1]))
    with pytest.raises(EngineDeadError):
        started.runner.run(flush())


@pytest.mark.parametrize("period", [300.0, 0.0])
def test_it_is_restarted_so_often_in_a_period_and_no_more(
    make: Callable[..., Started], monkeypatch: pytest.MonkeyPatch, period: float
) -> None:
    monkeypatch.setattr(supervisor, "RESTART_PERIOD", period)
    started = make(thread(), restart=thread)
    for number in range(5):
        started.serve(make_request(f"bad{number}", [RAISE]))
        started.until(lambda: started.engine.healthy or started.engine.dead)
    assert (started.engine.dead, started.engine.num_restarts) == ((True, 3) if period else (False, 5))


def test_one_that_cannot_be_made_again_counts_as_a_death(make: Callable[..., Started]) -> None:
    asked: list[str] = []

    def restart() -> ThreadWorker:
        asked.append("")
        if len(asked) == 1:
            raise CapacityError("No room.")
        if len(asked) == 2:
            raise OSError("no more processes")
        return thread()

    started = make(thread(), restart=restart)
    started.serve(make_request("bad", [RAISE]))
    started.until(lambda: started.engine.healthy)
    assert started.engine.num_restarts == len(asked) == 3


def test_why_a_core_could_not_be_made_is_raised() -> None:
    with pytest.raises(CapacityError, match="doesn't fit") as caught:
        wait_ready(start(refused_core))
    assert caught.value.remedy == "Give --cache-gib 0.5."
    with pytest.raises(EngineDeadError, match="exit code 9 while it started"):
        AsyncEngine(start(core_that_dies_at_once), None)


def test_shutting_down_does_not_wait_for_a_step_that_takes_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(supervisor, "LEAVE_SECONDS", 0.05)
    started = Started(AsyncEngine(start(), None))

    async def leave() -> Answers:
        task = asyncio.ensure_future(collect(started.engine, make_request("a", [HANG])))
        while not started.engine.stats.num_steps:
            await asyncio.sleep(0.005)
        await started.engine.shutdown()
        return await task

    with started.runner:
        assert started.runner.run(leave())["a", 0].reason == "abort"
    assert started.worker.process.returncode == -signal.SIGKILL


def test_the_server_needs_no_torch() -> None:
    program = (
        "import sys, longspan.serve.command, longspan.serve.app, longspan.engine.async_engine\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_worker_leaves_with_its_front_even_in_the_middle_of_a_step() -> None:
    program = f"""
from support.counting_core import CountingCore
from longspan.engine.request import Request, SamplingParams
from longspan.engine.worker import Channel, ProcessWorker, wait_ready
from longspan.engine.wire import Add
worker = ProcessWorker(CountingCore, print)
wait_ready(worker)
channel = Channel(worker.link)
channel.send(Add(Request("a", [{HANG}], SamplingParams(), list)))
channel.take(wait=True)
print(worker.process.pid, flush=True)
channel.take(wait=True)
"""
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as front:
        assert front.stdout
        assert front.stdout.readline() == "\n"  # of the worker, whose `print` goes where the front's goes
        pid = int(front.stdout.readline())
        assert Path(f"/proc/{pid}").exists()
        front.kill()
        # The worker holds the same stdout, which ends when both are gone.
        assert front.stdout.read() == ""
