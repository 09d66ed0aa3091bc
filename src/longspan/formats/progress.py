"""A progress bar for work that turns out to take longer than a second."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Sized
from typing import TypeVar

T = TypeVar("T")

_PATIENCE_SECONDS = 1.0


def track(items: Iterable[T], description: str, total: int | None = None) -> Iterator[T]:
    """Yield `items` unchanged; after one second draw a bar on stderr, unless stderr is not a terminal.

    `total` is the number of items, by default `len(items)` where there is one.
    """
    if not sys.stderr.isatty():
        yield from items
        return
    if total is None and isinstance(items, Sized):
        total = len(items)
    started = time.monotonic()
    bar = task = None
    try:
        for done, item in enumerate(items):
            if bar is None and time.monotonic() - started > _PATIENCE_SECONDS:
                from rich.console import Console
                from rich.progress import Progress

                bar = Progress(console=Console(file=sys.stderr), transient=True)
                task = bar.add_task(description, total=total)
                bar.start()
            if bar is not None and task is not None:
                bar.update(task, completed=done)
            yield item
    finally:
        if bar is not None:
            bar.stop()
