"""A core without a model, to be made in a child process: it counts, or fails as it is told to.

Nothing here imports torch, so that a child is there in a moment.
"""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path

from longspan.config import load_config
from longspan.engine.output import End, Started, TokenOutput
from longspan.engine.request import Request
from longspan.engine.stats import EngineStats
from longspan.errors import CapacityError, RequestError
from longspan.memory.plan import MemoryPlan

CONFIG = Path(__file__).parents[1] / "data/k31-text"

# What a prompt that begins with one of these does to its step.
RAISE, LEAVE, CRASH, HANG, REFUSE = range(100, 105)


@dataclass
class CountingCore:
    """Answers each choice with 0, 1, 2 ... up to `max_tokens`, one in a step."""

    step_seconds: float = 0.001
    _running: dict[tuple[str, int], tuple[Request, int]] = field(default_factory=dict)
    _num_steps: int = 0

    def __post_init__(self) -> None:
        self.config = load_config(CONFIG)
        self.plan = MemoryPlan(16, pages_per_slab=4, num_slabs=20, max_num_seqs=4, max_model_len=1024)

    @property
    def has_work(self) -> bool:
        return bool(self._running)

    @property
    def stats(self) -> EngineStats:
        return EngineStats(num_running=len(self._running), num_steps=self._num_steps)

    def flush_cache(self) -> int:
        return self._num_steps

    def add(self, request: Request) -> None:
        if request.prompt_token_ids[0] == REFUSE:
            raise RequestError("Not this one.", param="prompt", remedy="Send another.")
        for index in range(request.params.n):
            self._running[request.id, index] = (request, 0)

    def abort(self, request_id: str, index: int | None = None) -> None:
        for key in [key for key in self._running if key[0] == request_id and index in (None, key[1])]:
            del self._running[key]

    def step(self) -> list[TokenOutput]:
        time.sleep(self.step_seconds)
        self._num_steps += 1
        outputs = []
        for (request_id, index), (request, count) in list(self._running.items()):
            _misbehave(request.prompt_token_ids[0], count)
            end = End("length") if count + 1 == request.params.max_tokens else None
            now = time.monotonic()
            started = Started(now) if count == 0 else None
            outputs.append(TokenOutput(request_id, index, [count], now, started=started, end=end))
            self._running[request_id, index] = (request, count + 1)
            if end:
                del self._running[request_id, index]
        return outputs


def _misbehave(told: int, count: int) -> None:
    """In the second step, so that there is an output before it."""
    if count == 0:
        return
    if told == RAISE:
        raise SystemError("a fault of the engine itself")
    if told == LEAVE:
        os._exit(7)
    if told == CRASH:
        os.kill(os.getpid(), signal.SIGSEGV)
    if told == HANG:
        time.sleep(3600)


def refused_core() -> CountingCore:
    raise CapacityError("The cache of 1 GiB doesn't fit.", remedy="Give --cache-gib 0.5.")


def core_that_dies_at_once() -> CountingCore:
    os._exit(9)
