"""One connection of a client, which is closed when the client no longer takes what it asked for."""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar

from uvicorn.protocols.http.h11_impl import H11Protocol


class Connection(H11Protocol):
    """uvicorn's, but it does not wait for ever.

    A client that is there but does not read blocks its stream, which would keep its share of the server: when
    nothing of a full buffer could be sent for `stall_seconds`, that counts as hanging up.
    """

    stall_seconds: ClassVar[float] = 60

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._stall_timer: asyncio.TimerHandle | None = None

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_watching()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_watching()
        super().connection_lost(exc)

    def _watch(self) -> None:
        unsent = self.transport.get_write_buffer_size()
        loop = asyncio.get_running_loop()
        self._stall_timer = loop.call_later(self.stall_seconds, self._abort_if_stalled, unsent)

    def _stop_watching(self) -> None:
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None

    def _abort_if_stalled(self, unsent: int) -> None:
        if self.transport.get_write_buffer_size() < unsent:
            self._watch()
        else:
            self.transport.abort()
