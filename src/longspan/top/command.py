"""`longspan top`: flags, the loop, keys."""

from __future__ import annotations

import argparse
import json
import os
import select
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console, RenderableType
from rich.live import Live

from longspan.errors import CapacityError, LongspanError
from longspan.top.figures import GENERATED, History
from longspan.top.scrape import Source
from longspan.top.view import frame

DEFAULT_URL = "http://127.0.0.1:8000"
_KEY_VARIABLE = "LONGSPAN_API_KEY"
_INTERVALS = (0.05, 3600.0)  # seconds
_QUIT = ("q", "Q", "\x03", "\x04")

Wait = Callable[[float], bool]
"""Waits so many seconds; true if the user wants to leave."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("url", nargs="?", default=DEFAULT_URL, help="of the server (default: %(default)s)")
    parser.add_argument(
        "--interval",
        type=float,
        metavar="S",
        default=1.0,
        help="seconds from frame to frame (default: %(default)s)",
    )
    parser.add_argument(
        "--window",
        type=float,
        metavar="S",
        default=10.0,
        help="seconds that rates and percentiles are taken over (default: %(default)s)",
    )
    parser.add_argument("--once", action="store_true", help="print one frame, of one interval, and leave")
    parser.add_argument("--json", action="store_true", help="print an object per frame, each on a line")
    parser.add_argument(
        "--api-key",
        metavar="KEY",
        default=os.environ.get(_KEY_VARIABLE) or None,
        help=f"for servers whose metrics need one (default: ${_KEY_VARIABLE})",
    )


def main(args: argparse.Namespace) -> int:
    """0 when the user leaves. Raises LongspanError if there is nothing to show at the start."""
    low, high = _INTERVALS
    for flag, value in (("--interval", args.interval), ("--window", args.window)):
        if not low <= value <= high:
            raise CapacityError(f"{flag} is {value}.", remedy=f"Give {low:g} to {high:g} seconds.")
    source = Source(args.url, args.api_key)
    view = View(source, History(args.window), args.json)
    view.read()
    if args.once:
        time.sleep(args.interval)
        view.read()
        view.print()
        return 0
    try:
        if args.json or not sys.stdout.isatty():
            _follow(view, args.interval)
        else:
            _show(view, args.interval)
    except KeyboardInterrupt:
        pass
    return 0


class View:
    """What has been read of a server, and how it is told."""

    def __init__(self, source: Source, history: History, as_json: bool) -> None:
        self._source = source
        self._history = history
        self._as_json = as_json
        self._console = Console()

    def read(self) -> None:
        """Raises LongspanError."""
        self._history.add(self._source.read())

    def frame(self, trouble: str = "") -> RenderableType:
        rates = self._history.rates(GENERATED)
        return frame(self._source.url, self._history.figures(), rates, trouble)

    def print(self) -> None:
        if self._as_json:
            print(json.dumps(self._history.figures().as_json(self._source.url)), flush=True)
        else:
            self._console.print(self.frame())


def _follow(view: View, interval: float) -> None:
    """Frame after frame, for a pipe or a file. Raises LongspanError when the server has gone."""
    while True:
        time.sleep(interval)
        view.read()
        view.print()


def _show(view: View, interval: float) -> None:
    """The live view, until the user leaves. A server that has gone may come back."""
    with _keys() as wait, Live(view.frame(), screen=True, auto_refresh=False) as live:
        while not wait(interval):
            try:
                view.read()
                trouble = ""
            except LongspanError as error:
                trouble = str(error)
            live.update(view.frame(trouble), refresh=True)


@contextmanager
def _keys() -> Iterator[Wait]:
    """Keys without Enter while the block lasts, if there is a keyboard."""
    if not sys.stdin.isatty():
        yield lambda seconds: bool(time.sleep(seconds))
        return
    keyboard = sys.stdin.fileno()
    before = termios.tcgetattr(keyboard)

    def wait(seconds: float) -> bool:
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            if select.select([keyboard], [], [], left)[0]:
                pressed = os.read(keyboard, 64).decode(errors="replace")
                if not pressed or any(key in pressed for key in _QUIT):
                    return True
        return False

    try:
        tty.setcbreak(keyboard)
        yield wait
    finally:
        termios.tcsetattr(keyboard, termios.TCSADRAIN, before)
