"""Holds all conversations on time.

    open loop     arrivals are fixed beforehand. A request may be sent late, because too many are under way or
                  because the client is slow; its latencies count from the time scheduled, so no slow answer
                  hides the ones it delays (no coordinated omission)
    closed loop   an infinite rate with a limit: so many users, each of whom begins a conversation when the
                  last one ended. Nothing is scheduled ahead

Times are seconds from the start of the point. The next turn of a conversation is scheduled for the end of the
answer before. A conversation ends with its first failure.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing, nullcontext
from dataclasses import dataclass, field

from longspan.bench.serving.dialogue import Dialogue
from longspan.bench.serving.reply import ExchangeError, Reply

Ask = Callable[[bytes], AsyncGenerator[bytes, None]]  # one request -> its answer as it is read
_TICK = 0.01


@dataclass
class Record:
    """One request. `error` is its kind; the times of a failed one are those until it failed."""

    conversation: int
    turn: int
    input_len: int | None  # tokens asked for
    output_len: int
    scheduled: float
    sent: float
    ended: float = 0.0
    chunks: list[float] = field(default_factory=list)
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int = 0
    counted_chunks: bool = False  # no usage was sent
    finish_reason: str | None = None
    error: str | None = None
    message: str | None = None


@dataclass(frozen=True)
class ClientHealth:
    """Did the client keep up? `lag`: how late its event loop woke, in seconds; `cpu`: of one core."""

    lag_p99: float
    lag_max: float
    cpu: float

    @property
    def bottleneck(self) -> bool:
        return self.lag_p99 > _TICK or self.cpu > 0.9


class Watch:
    """Wakes every 10 ms and notes how late. A late loop reads late, and what it reads looks slow."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lags = [0.0]

    async def __aenter__(self) -> Watch:
        self._began, self._cpu = self._clock(), time.process_time()
        self._task = asyncio.create_task(self._watch())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        self._seconds, self._cpu = self._clock() - self._began, time.process_time() - self._cpu

    async def _watch(self) -> None:
        while True:
            due = self._clock() + _TICK
            await asyncio.sleep(_TICK)
            self._lags.append(max(0.0, self._clock() - due))

    def health(self) -> ClientHealth:
        lags = sorted(self._lags)
        return ClientHealth(
            lags[int(0.99 * (len(lags) - 1))], lags[-1], self._cpu / max(self._seconds, _TICK)
        )


async def hold_all(
    dialogues: Sequence[Dialogue],
    arrivals: Sequence[float] | None,
    max_concurrency: int | None,
    ask: Ask,
    on_record: Callable[[Record], None] = lambda _: None,
    clock: Callable[[], float] = time.perf_counter,
) -> list[Record]:
    """All records, as they ended. `arrivals` None: a closed loop, which without a limit is all at once."""
    start = clock()
    records: list[Record] = []

    def now() -> float:
        return clock() - start

    async def hold(number: int, scheduled: float) -> None:
        dialogue = dialogues[number]
        for turn in range(len(dialogue.turns)):
            record = await _exchange(dialogue, number, turn, scheduled, ask, now)
            records.append(record)
            on_record(record)
            if record.error:
                return
            scheduled = record.ended

    async def user() -> None:
        for number in waiting:
            await hold(number, now())

    async def arrive(number: int, scheduled: float) -> None:
        async with gate:
            await hold(number, scheduled)

    waiting = iter(range(len(dialogues)))  # shared: each conversation has one user
    gate = asyncio.Semaphore(max_concurrency) if max_concurrency else nullcontext()
    async with asyncio.TaskGroup() as group:
        if arrivals is None:
            for _ in range(min(max_concurrency or len(dialogues), len(dialogues))):
                group.create_task(user())
        else:
            for number, at in enumerate(arrivals):
                await asyncio.sleep(max(0.0, at - now()))
                group.create_task(arrive(number, at))
    return records


async def _exchange(
    dialogue: Dialogue, number: int, turn: int, scheduled: float, ask: Ask, now: Callable[[], float]
) -> Record:
    asked, body = dialogue.turns[turn], dialogue.body(turn)
    record = Record(number, turn, asked.input_len, asked.output_len, scheduled, sent=now())
    reply = Reply()
    try:
        async with aclosing(ask(body)) as reads:
            async for data in reads:
                reply.feed(data, now())
        reply.close()
        dialogue.answered(reply)
    except ExchangeError as error:
        record.error, record.message = error.kind, str(error)
    record.ended = now() if record.error or reply.ended is None else reply.ended
    record.chunks, record.finish_reason = reply.chunks, reply.finish_reason
    record.prompt_tokens, record.cached_tokens = reply.prompt_tokens, reply.cached_tokens
    record.output_tokens, record.counted_chunks = reply.output_tokens, reply.usage_tokens is None
    return record
