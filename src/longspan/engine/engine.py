"""An engine in one thread: the core and the front, one after the other. `AsyncEngine` sets them apart."""

from __future__ import annotations

from pathlib import Path

from longspan.chat import Tokenizer
from longspan.config import ModelConfig
from longspan.engine.core import EngineCore
from longspan.engine.front import Front
from longspan.engine.options import EngineOptions
from longspan.engine.output import StepOutput
from longspan.engine.request import Request
from longspan.engine.stats import EngineStats
from longspan.memory.memory import Memory
from longspan.memory.plan import MemoryPlan


class Engine:
    """Serves requests of one model with one memory. Not thread-safe."""

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self._front = Front()

    @classmethod
    def from_path(cls, path: str | Path, options: EngineOptions) -> Engine:
        """As `EngineCore.from_path`."""
        return cls(EngineCore.from_path(path, options))

    @property
    def config(self) -> ModelConfig:
        return self.core.config

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self.core.tokenizer

    @property
    def options(self) -> EngineOptions:
        return self.core.options

    @property
    def plan(self) -> MemoryPlan:
        return self.core.plan

    @property
    def max_model_len(self) -> int:
        return self.core.max_model_len

    @property
    def memory(self) -> Memory:
        return self.core.memory

    @property
    def has_work(self) -> bool:
        return self.core.has_work

    @property
    def stats(self) -> EngineStats:
        return self.core.stats

    def validate(self, request: Request) -> None:
        """Raises RequestError if the request can't be served. Any thread may call: it reads no state."""
        self.core.validate(request)

    def add(self, request: Request) -> None:
        """Queues a request. Raises RequestError if it can't be served as asked."""
        self.core.add(request)
        self._front.add(request)

    def abort(self, request_id: str) -> list[StepOutput]:
        """Ends a request and frees its memory now. Does nothing, and returns [], if it has ended before."""
        self.core.abort(request_id)
        return self._front.abort(request_id)

    def step(self) -> list[StepOutput]:
        """One step of the model for whatever is there; outputs of the choices that got a token or ended."""
        steps, to_end = self._front.read(self.core.step())
        for request_id, index in to_end:
            self.core.abort(request_id, index)
        return steps
