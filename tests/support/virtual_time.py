"""An event loop whose clock jumps: a sleep takes no time, and everything happens at exact moments."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _Selector(selectors.DefaultSelector):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        ready = super().select(0)
        if not ready and timeout:
            self.now += timeout
        return ready


class _Loop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._virtual = _Selector()
        super().__init__(self._virtual)

    def time(self) -> float:
        return self._virtual.now


def run_at_virtual_time(work: Callable[[Callable[[], float]], Coroutine[Any, Any, T]]) -> T:
    """Runs `work(clock)`. It may sleep and wait, but for nothing outside of its loop."""
    loop = _Loop()
    try:
        return loop.run_until_complete(work(loop.time))
    finally:
        loop.close()
