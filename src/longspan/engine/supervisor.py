"""Keeps a worker serving: carries orders to it and reports from it, and starts another one where it dies.

Orders go together, once in each turn of the event loop. A worker is dead when its end of the socket pair is
closed. One that has work and has reported nothing for `step_timeout` seconds is killed, and so dead as well.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from enum import Enum, auto
from typing import Any

from longspan.engine.wire import Order, Ready, Report, Shutdown, Unpacker, pack
from longspan.engine.worker import Worker, wait_ready
from longspan.errors import LongspanError

logger = logging.getLogger(__name__)

MAX_RESTARTS, RESTART_PERIOD = 3, 300.0
"""A dead worker is replaced at most so often in so many seconds; after that there is none."""

STEP_TIMEOUT = 600.0

LEAVE_SECONDS = 5.0
"""What a worker that was told to leave has for its present step."""

_LOOKS = 8  # at a silent worker before it is killed, so that a front that was stopped itself kills nobody


class State(Enum):
    SERVING = auto()
    RESTARTING = auto()
    DRAINING = auto()
    DEAD = auto()


class _Link(asyncio.Protocol):
    """One end of the socket pair in the loop. `lost` is set when the other end is closed."""

    transport: asyncio.Transport

    def __init__(self, on_message: Callable[[Any], None]) -> None:
        self.lost = asyncio.Event()
        self._on_message = on_message
        self._unpacker = Unpacker()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        for message in self._unpacker.feed(data):
            self._on_message(message)

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost.set()


class Supervisor:
    """Owns the worker. After `start`, its methods belong to the loop that called it."""

    _link: _Link

    def __init__(
        self,
        worker: Worker,
        restart: Callable[[], Worker] | None,
        step_timeout: float,
        on_report: Callable[[Report], None],
        on_loss: Callable[[str], None],
        on_death: Callable[[], None],
    ) -> None:
        """Waits until the worker is ready; raises the error that keeps it from that.

        `on_loss` is told how a worker ended, with all that it was doing. `on_death`: no other will follow,
        since `restart` is None or has been called too often.
        """
        self.num_restarts = 0
        self.state = State.SERVING
        self._worker = worker
        self._restart = restart
        self._restarts: deque[float] = deque(maxlen=MAX_RESTARTS)  # when
        self._step_timeout = step_timeout
        self._on_report = on_report
        self._on_loss = on_loss
        self._on_death = on_death
        self._tasks: list[asyncio.Task[None]] = []
        self._know(wait_ready(worker))

    def _know(self, ready: Ready) -> None:
        """Begins with a new worker."""
        self.ready = ready
        self.stats = ready.stats
        self._unsent = bytearray()
        self._num_ordered = 0
        self._last = Report(0, [], None)
        self._has_reported = False  # since the last look

    @property
    def busy(self) -> bool:
        """The worker has work, or an order that it has yet to take."""
        return self._last.has_work or self._last.num_orders < self._num_ordered

    async def start(self) -> None:
        """Joins the running loop."""
        await self._connect()
        self._tasks = [asyncio.create_task(self._follow())]
        if self._step_timeout:
            self._tasks.append(asyncio.create_task(self._watch()))

    async def close(self) -> None:
        """Ends the worker, whatever it is doing."""
        for task in self._tasks:
            task.cancel()
        if not self._link.lost.is_set():
            self.order(Shutdown())
            with suppress(TimeoutError):
                await asyncio.wait_for(self._link.lost.wait(), LEAVE_SECONDS)
        self._worker.kill()
        await asyncio.to_thread(self._worker.end)
        self._link.transport.close()

    def order(self, order: Order) -> int:
        """Sends an order in this turn of the loop. Its number, by which `Report.num_orders` counts.

        Raises what `pickle` raises for an order that can't be sent.
        """
        frame = pack(order)
        if not self._unsent:
            asyncio.get_running_loop().call_soon(self._send)
        self._unsent += frame
        self._num_ordered += 1
        return self._num_ordered

    def _send(self) -> None:
        if not self._link.transport.is_closing():  # else it is lost, which `_follow` sees to
            self._link.transport.write(bytes(self._unsent))
        self._unsent.clear()

    def _take(self, report: Report) -> None:
        self._last = report
        self._has_reported = True
        self.stats = report.stats or self.stats
        self._on_report(report)

    async def _connect(self) -> None:
        self._link = _Link(self._take)
        loop = asyncio.get_running_loop()
        await loop.create_unix_connection(lambda: self._link, sock=self._worker.link)

    async def _follow(self) -> None:
        """From worker to worker."""
        while True:
            await self._link.lost.wait()
            drains = self.state is State.DRAINING
            self.state = State.DRAINING if drains else State.RESTARTING
            how = await asyncio.to_thread(self._worker.end)
            logger.critical("the engine's %s", how)
            self._on_loss(how)
            if drains:
                return
            if not await self._replace():
                self.state = State.DEAD
                self._on_death()
                return
            if self.state is State.RESTARTING:  # and not told to stop meanwhile
                self.state = State.SERVING
            logger.warning("the engine was restarted and serves again")

    async def _replace(self) -> bool:
        """Puts a new worker in the place of the dead one. False: there will be none."""
        while self._restart and self._may_restart():
            self.num_restarts += 1
            self._restarts.append(time.monotonic())
            try:
                self._worker = await asyncio.to_thread(self._restart)
                self._know(await asyncio.to_thread(wait_ready, self._worker))
            except (LongspanError, OSError) as error:
                logger.critical("the engine could not be restarted: %s", error)
                continue
            await self._connect()
            return True
        return False

    def _may_restart(self) -> bool:
        if len(self._restarts) < MAX_RESTARTS or time.monotonic() - self._restarts[0] > RESTART_PERIOD:
            return True
        logger.critical("the engine was restarted %d times and died again: no more", MAX_RESTARTS)
        return False

    async def _watch(self) -> None:
        """Kills a worker that hangs."""
        silent = 0
        while True:
            await asyncio.sleep(self._step_timeout / _LOOKS)
            silent = silent + 1 if self.busy and not self._has_reported else 0
            self._has_reported = False
            if silent > _LOOKS and not self._link.lost.is_set():
                silent = 0
                self._worker.kill(f"no step of it ended for {self._step_timeout:g} seconds")
