"""Open and closed loops at virtual time: who is sent when, and what is counted from where."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Sequence
from itertools import pairwise

import pytest
from support.virtual_time import run_at_virtual_time

from longspan.bench.serving.datasets import Conversation, Turn
from longspan.bench.serving.dialogue import COMPLETIONS, Dialect, Dialogue
from longspan.bench.serving.metrics import summarise
from longspan.bench.serving.reply import ExchangeError
from longspan.bench.serving.run import ClientHealth, Record, Watch, hold_all

Clock = Callable[[], float]
FIRST, GAP, TOKENS = 1.0, 0.25, 5  # seconds to the first token, between tokens; of every answer


async def steady(body: bytes) -> AsyncGenerator[bytes, None]:
    """Answers like a server that is never busy."""
    for i in range(TOKENS):
        await asyncio.sleep(GAP if i else FIRST)
        finish = '"length"' if i == TOKENS - 1 else "null"
        yield b'data: {"choices": [{"text": "x", "finish_reason": %b}]}\n\n' % finish.encode()
    await asyncio.sleep(0.5)
    yield b'data: {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": %d}}\n\n' % TOKENS


def dialogues(count: int, turns: int = 1) -> list[Dialogue]:
    turn = Turn("x", 1, TOKENS)
    return [Dialogue(Conversation([turn] * turns), Dialect(COMPLETIONS, "m")) for _ in range(count)]


def hold(
    held: Sequence[Dialogue],
    arrivals: Sequence[float] | None,
    limit: int | None,
    ask: Callable[[bytes], AsyncGenerator[bytes, None]] = steady,
) -> list[Record]:
    records = run_at_virtual_time(lambda clock: hold_all(held, arrivals, limit, ask, clock=clock))
    return sorted(records, key=lambda record: (record.conversation, record.turn))


def test_an_open_loop_sends_on_time_whatever_the_server_does() -> None:
    records = hold(dialogues(4), [0.0, 0.5, 0.75, 3.0], None)
    assert [r.scheduled for r in records] == [r.sent for r in records] == [0.0, 0.5, 0.75, 3.0]
    found = summarise(records, 4, [50]).latencies
    assert found["ttft"].min == found["ttft"].max == FIRST
    assert found["tpot"].mean == found["itl"].mean == GAP
    assert found["e2el"].max == FIRST + (TOKENS - 1) * GAP  # usage came later and does not count
    assert all((r.output_tokens, r.prompt_tokens, r.counted_chunks) == (TOKENS, 3, False) for r in records)


def test_who_waits_in_the_client_is_late_by_the_time_scheduled() -> None:
    records = hold(dialogues(3), [0.0, 0.5, 0.75], 1)
    whole = FIRST + (TOKENS - 1) * GAP + 0.5
    assert [r.scheduled for r in records] == [0.0, 0.5, 0.75]
    assert [r.sent for r in records] == [0.0, whole, 2 * whole]
    found = summarise(records, 3, []).latencies
    assert found["ttft"].max == 2 * whole - 0.75 + FIRST
    assert found["ttft_sent"].max == FIRST
    assert found["wait"].max == 2 * whole - 0.75


@pytest.mark.parametrize("limit", [1, 2, 3, 9])
def test_a_closed_loop_has_so_many_users(limit: int) -> None:
    records = hold(dialogues(5), None, limit)
    assert len(records) == 5
    assert all(r.sent == r.scheduled for r in records)
    assert summarise(records, 5, []).peak_concurrency == min(limit, 5)


def test_no_rate_and_no_limit_is_all_at_once() -> None:
    assert [r.sent for r in hold(dialogues(6), None, None)] == [0.0] * 6


def test_turns_follow_each_other_and_the_next_is_scheduled_for_the_end_of_the_last() -> None:
    records = hold(dialogues(2, turns=3), None, 1)
    assert [(r.conversation, r.turn) for r in records] == [(c, t) for c in range(2) for t in range(3)]
    for earlier, later in pairwise(records[:3]):
        assert later.scheduled == earlier.ended
        assert later.sent == earlier.ended + 0.5  # the stream had not ended yet


def test_a_failure_ends_its_conversation_and_no_other() -> None:
    async def second_turns_fail(body: bytes) -> AsyncGenerator[bytes, None]:
        if "\n" in json.loads(body)["prompt"]:
            await asyncio.sleep(2)
            raise ExchangeError("HTTP 503", "full")
        async for data in steady(body):
            yield data

    records = hold([*dialogues(1, turns=3), *dialogues(1)], None, None, second_turns_fail)
    assert [(r.conversation, r.turn, r.error) for r in records] == [
        (0, 0, None), (0, 1, "HTTP 503"), (1, 0, None)]  # fmt: skip
    failed = records[1]
    assert failed.message == "HTTP 503: full" and failed.ended == failed.sent + 2
    summary = summarise(records, 4, [])
    assert (summary.planned, summary.completed, summary.errors) == (4, 2, {"HTTP 503": 1})


def test_nothing_to_hold_is_nothing_held() -> None:
    assert hold([], None, 3) == hold([], [], None) == []


def test_each_record_is_told_when_it_ends() -> None:
    told: list[Record] = []
    records = run_at_virtual_time(
        lambda clock: hold_all(dialogues(3), None, 2, steady, told.append, clock=clock)
    )
    assert told == records and len(told) == 3


def test_a_loop_that_wakes_late_is_a_bottleneck_and_one_on_time_is_none() -> None:
    async def lag(clock: Clock, held_up: float) -> float:
        late = 0.0
        async with Watch(lambda: clock() + late) as watch:
            for _ in range(100):
                late += held_up  # as if something else had run meanwhile
                await asyncio.sleep(0.01)
        return watch.health().lag_p99

    held_up = run_at_virtual_time(lambda clock: lag(clock, 0.05))
    on_time = run_at_virtual_time(lambda clock: lag(clock, 0.0))
    assert on_time < 1e-6 and 0.03 < held_up < 0.2
    assert ClientHealth(held_up, held_up, cpu=0.1).bottleneck
    assert not ClientHealth(on_time, on_time, cpu=0.1).bottleneck
    assert ClientHealth(on_time, on_time, cpu=0.95).bottleneck, "it had no time to spare"
