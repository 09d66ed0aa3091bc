"""Who asks what when, and what each answer must be."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from soak.answers import Answer, Failure
from soak.client import Client
from soak.misuse import Misuse
from soak.protocols import CHAT, GENERATE, RESPONSES, TEXT, failure
from soak.workload import Case

_SHOWN = 5  # violations of each kind
_BURST_SECONDS = 15.0
_PATIENCE_SECONDS = 0.3  # before a client asks again that was told of an outage
_DEADLINES = (0.002, 0.02, 0.1, 0.5)
_SALTS = ("", "red", "blue")
_ABORTABLE = {CHAT: "request_id", TEXT: "request_id", GENERATE: "rid"}  # route -> field for a name


@dataclass
class Ledger:
    """What happened, counted by kind and outcome, and all that was wrong."""

    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)
    num_violations: int = 0
    num_cached_tokens: int = 0

    def count(self, kind: str, outcome: str) -> None:
        self.counts[kind, outcome] += 1

    def violate(self, kind: str, what: str) -> None:
        self.count(kind, "WRONG")
        self.num_violations += 1
        if self.counts[kind, "WRONG"] <= _SHOWN:
            self.violations.append(f"{kind}: {what}")

    def total(self, outcome: str) -> int:
        return sum(count for (_, found), count in self.counts.items() if found == outcome)


@dataclass
class Outage:
    """A stretch of time in which requests may fail, because the soak itself broke something."""

    start: float
    end: float | None = None

    def touches(self, start: float, end: float) -> bool:
        return start <= (self.end or end) and end >= self.start


class Load:
    """`num_clients` clients at work on one server until `run` is over."""

    def __init__(
        self,
        url: str,
        pool: Sequence[tuple[Case, Answer]],
        misuses: Sequence[Misuse],
        ledger: Ledger,
        *,
        seed: int,
        num_clients: int,
        burst: int,
    ) -> None:
        """`burst`: requests at once that are more than the server takes."""
        self._url = url
        self._pool = pool
        self._misuses = misuses
        self._ledger = ledger
        self._random = random.Random(seed)
        self._num_clients = num_clients
        self._burst_size = burst
        self.outages: list[Outage] = []
        self._actions: list[tuple[int, Callable[[], Any]]] = [
            (55, self._answered),
            (5, self._slowly),
            (14, self._left),
            (8, self._misused),
            (4, self._tokens),
            (3, self._unseeded),
            (3, self._aborted),
            (5, self._deadline),
        ]

    async def run(self, seconds: float) -> None:
        """Works for so long, then waits for the answers that are under way."""
        end = time.monotonic() + seconds
        async with Client(self._url) as self._client:
            await asyncio.gather(*(self._work(end) for _ in range(self._num_clients)), self._bursts(end))

    async def check_all(self) -> None:
        """Every case of the pool once more, alone on a server that has been through all this."""
        async with Client(self._url) as self._client:
            for case, expected in self._pool:
                await self._expect(f"afterwards, {case.kind}", case, expected, self._client.ask, case.body)

    async def _work(self, end: float) -> None:
        weights, actions = zip(*self._actions, strict=True)
        while time.monotonic() < end:
            action, start = self._random.choices(actions, weights)[0], time.monotonic()
            try:
                await action()
            except (httpx.HTTPError, OSError, TimeoutError) as error:
                if not self._excused(start):
                    self._ledger.violate("connection", f"{action.__name__}: {error!r}")
            except (ValueError, KeyError, IndexError, TypeError) as error:
                self._ledger.violate("protocol", f"{action.__name__}: {error!r}")

    async def _bursts(self, end: float) -> None:
        """Now and then more requests at once than the server takes: some are answered, some get 429."""
        pause = min(_BURST_SECONDS, (end - time.monotonic()) / 3)
        short = [item for item in self._pool if item[0].kind == "short"]
        while time.monotonic() + pause < end:
            await asyncio.sleep(pause)
            before, start = self._ledger.counts["burst", "429"], time.monotonic()
            asked = [self._random.choice(short) for _ in range(self._burst_size)]
            await asyncio.gather(
                *(self._expect("burst", case, answer, self._client.ask, case.body) for case, answer in asked)
            )
            if self._ledger.counts["burst", "429"] == before and not self._excused(start):
                self._ledger.violate("burst", f"none of {self._burst_size} requests at once got 429")

    async def _answered(self) -> None:
        case, expected = self._random.choice(self._pool)
        ask = self._random.choice([self._client.ask, self._client.ask_streaming])
        kind = f"{case.kind}, {'whole' if ask == self._client.ask else 'stream'}"
        await self._expect(kind, case, expected, ask, case.body | self._dressing(case.path))

    async def _slowly(self) -> None:
        case, expected = self._random.choice(self._pool)
        pause = self._random.choice([0.01, 0.05, 0.2])

        async def ask(path: str, body: dict[str, Any]) -> Answer | Failure:
            return await self._client.ask_slowly(path, body, pause)

        await self._expect("slow reader", case, expected, ask, case.body | self._dressing(case.path))

    async def _left(self) -> None:
        case, _ = self._random.choice(self._pool)
        stream = {"stream": True} if self._random.random() < 0.6 else {}
        more = {"max_tokens": 400, "ignore_eos": True} if "max_tokens" in case.body else {}
        body = case.body | more | stream | self._dressing(case.path)
        await self._client.leave(case.path, body, self._random)
        self._ledger.count("left in the middle", "left")

    async def _misused(self) -> None:
        wrong = self._random.choice(self._misuses)
        start = time.monotonic()
        response = await self._client.request(wrong.method, wrong.path, wrong.content)
        allowed = *wrong.statuses, *((503,) if self._excused(start) else ())
        shown = f"{wrong.method} {wrong.path} {wrong.content[:80]!r}: {response.status_code}"
        if response.status_code not in allowed:
            self._ledger.violate("bad request", f"{shown}, expected {wrong.statuses}: {response.text[:300]}")
        elif failure(response.text, response.status_code).status != response.status_code:
            self._ledger.violate("bad request", f"{shown} in {response.text[:300]}")
        else:
            self._ledger.count("bad request", "refused")

    async def _tokens(self) -> None:
        """There and back through the tokenizer."""
        text = self._random.choice([str(case.body["prompt"]) for case, _ in self._pool if case.path == TEXT])
        start = time.monotonic()
        given: dict[str, Any] = {"prompt": text}
        for path, answer in (("/tokenize", "tokens"), ("/detokenize", "prompt")):
            response = await self._client.request("POST", path, json.dumps(given).encode())
            if response.status_code != 200:
                await self._fail("tokenize", Failure(response.status_code, response.text[:200]), start)
                return
            given = {answer: response.json()[answer]}
        if given["prompt"] != text:
            self._ledger.violate("tokenize", f"{text[:80]!r} came back as {given['prompt'][:80]!r}")
        else:
            self._ledger.count("tokenize", "right")

    async def _unseeded(self) -> None:
        """Nobody knows the answer, but it must be whole."""
        body = {"prompt": "In the", "max_tokens": self._random.randint(1, 100), "n": 2, "temperature": 1}
        start = time.monotonic()
        answer = await self._client.ask_streaming(TEXT, body)
        if isinstance(answer, Failure):
            await self._fail("unseeded", answer, start)
        elif problem := answer.problem():
            self._ledger.violate("unseeded", problem)
        else:
            self._ledger.count("unseeded", "whole")

    async def _deadline(self) -> None:
        """Either in time, and then right, or 504."""
        case, expected = self._random.choice(self._pool)
        # A stream of Responses does not say which status its failure would have.
        may_stream = case.path != RESPONSES and self._random.random() < 0.5
        ask = self._client.ask_streaming if may_stream else self._client.ask
        body = case.body | {"timeout": self._random.choice(_DEADLINES)}
        await self._expect("deadline", case, expected, ask, body, allowed=(504,))

    async def _aborted(self) -> None:
        """Ended by name: right if it was faster; else 499 or, from SGLang's route, an answer that says so."""
        case, expected = self._random.choice([item for item in self._pool if item[0].path in _ABORTABLE])
        name = f"soak-{self._random.getrandbits(64):x}"
        body = case.body | {_ABORTABLE[case.path]: name}
        start = time.monotonic()
        asking = asyncio.create_task(self._client.ask(case.path, body))
        await asyncio.sleep(self._random.random() ** 2)
        await self._client.request("POST", "/abort_request", json.dumps({"rid": name}).encode())
        answer = await asking
        if isinstance(answer, Answer) and "abort" in (it.finish_reason for it in answer.choices.values()):
            self._ledger.count("abort", "told")
        else:
            await self._judge("abort", answer, expected, body, start, allowed=(499,))

    def _dressing(self, path: str) -> dict[str, Any]:
        """What must not change an answer."""
        dressing: dict[str, Any] = {"priority": self._random.randint(-2, 2)}
        if self._random.random() < 0.2:
            dressing["extra_key" if path == GENERATE else "cache_salt"] = self._random.choice(_SALTS)
        return dressing

    async def _expect(
        self,
        kind: str,
        case: Case,
        expected: Answer,
        ask: Callable[[str, dict[str, Any]], Any],
        body: dict[str, Any],
        allowed: tuple[int, ...] = (),
    ) -> None:
        start = time.monotonic()
        answer = await ask(case.path, body)
        await self._judge(kind, answer, expected, body, start, allowed)

    async def _judge(
        self,
        kind: str,
        answer: Answer | Failure,
        expected: Answer,
        body: dict[str, Any],
        start: float,
        allowed: tuple[int, ...] = (),
    ) -> None:
        """Counts an answer as right, wrong or excused."""
        if isinstance(answer, Failure):
            await self._fail(kind, answer, start, allowed)
        elif problem := answer.problem():
            self._ledger.violate(kind, f"{problem}: {body}"[:1500])
        elif answer != expected:
            self._ledger.violate(kind, f"{answer} is not the lone run's {expected}: {body}"[:3000])
        else:
            self._ledger.count(kind, "right")
            self._ledger.num_cached_tokens += answer.cached

    async def _fail(self, kind: str, failure: Failure, start: float, allowed: tuple[int, ...] = ()) -> None:
        """429 and `allowed` may be; other failures only for what was under way in an outage."""
        if failure.status == 429 or failure.status in allowed:
            self._ledger.count(kind, str(failure.status))
        elif self._excused(start):
            self._ledger.count(kind, f"{failure.status} in the outage")
            await asyncio.sleep(_PATIENCE_SECONDS)
        else:
            self._ledger.violate(kind, f"{failure.status}: {failure.message}")

    def _excused(self, start: float) -> bool:
        now = time.monotonic()
        return any(outage.touches(start, now) for outage in self.outages)
