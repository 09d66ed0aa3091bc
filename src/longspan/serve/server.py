"""Running the app: take the port, serve, and on SIGTERM or SIGINT finish what is running, then leave."""

from __future__ import annotations

import asyncio
import math
import signal
import socket
from collections.abc import Callable

import uvicorn
from starlette.types import ASGIApp

from longspan.errors import CapacityError
from longspan.serve.connection import Connection

_GRACE_AFTER_ABORT = 5  # seconds that aborted requests have to tell their clients
_KEEP_ALIVE = 75  # seconds; longer than clients keep one, or a request may meet a connection being closed
_DRAIN_POLL = 0.05  # seconds


def bind(host: str, port: int) -> socket.socket:
    """Takes the port, 0 = any free one. Raises CapacityError if it can't be had."""
    if not 0 <= port <= 65535:
        raise CapacityError(f"Cannot listen on port {port}.", remedy="Choose a --port from 0 to 65535.")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.set_inheritable(True)
    except OSError as error:
        raise CapacityError(
            f"Cannot listen on {host} port {port}: {error}.",
            remedy="Choose another --port, or stop what uses this one.",
        ) from error
    return listener


class Server(uvicorn.Server):
    """uvicorn's server. Told to stop, it lets requests run for `drain_seconds`, then calls `abort_all`.

    While `busy()` it goes on listening, so that who asks is told (by the app: 503) and not just refused.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        drain_seconds: float,
        busy: Callable[[], bool],
        abort_all: Callable[[], None],
        on_start: Callable[[], None],
        access_log: bool,
    ) -> None:
        config = uvicorn.Config(
            app,
            log_config=None,  # longspan.logs has set it up
            access_log=access_log,
            lifespan="on",
            http=Connection,
            timeout_keep_alive=_KEEP_ALIVE,
        )
        super().__init__(config)
        self._drain_seconds = drain_seconds
        self._busy = busy
        self._abort_all = abort_all
        self._on_start = on_start

    def serve_on(self, listener: socket.socket) -> None:
        """Serves until a signal asks it to stop; returns when all requests have ended."""
        # uvicorn raises the signal again when it is done; with these handlers that is no death by signal.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: None)
        self.run(sockets=[listener])

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_start()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        loop = asyncio.get_running_loop()
        end = loop.time() + self._drain_seconds
        timer = loop.call_at(end, self._abort_all)
        try:
            while self._busy() and not self.force_exit and loop.time() < end:
                await asyncio.sleep(_DRAIN_POLL)
            self.config.timeout_graceful_shutdown = math.ceil(end - loop.time()) + _GRACE_AFTER_ABORT
            await super().shutdown(sockets)
        finally:
            timer.cancel()
