"""Getting an answer to a client that may hang up at any moment.

Both kinds of answer run under `unless_disconnected`: when the socket closes, the work is cancelled at once,
and the `finally` blocks inside it give the engine its memory back.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, TypeVar

from fastapi import Response
from starlette.types import Receive, Scope, Send

from longspan.errors import LongspanError
from longspan.serve.failures import ClientGoneError, error_body
from longspan.serve.json_text import json_bytes

logger = logging.getLogger("longspan.serve")
T = TypeVar("T")


async def unless_disconnected(receive: Receive, work: Awaitable[T]) -> T:
    """Result of `work`. When the client hangs up first, cancels it and raises ClientGoneError."""
    task = asyncio.ensure_future(work)
    watcher = asyncio.create_task(_wait_for_disconnect(receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGoneError
        return task.result()
    finally:
        watcher.cancel()
        task.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Server-sent events: one JSON object each, then `done`. Nothing follows the event of a failure.

    Takes a generator that has already given its `first` event: whatever can be refused has been by then, with
    a status of its own, and closing the generator is sure to run its clean-up.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        first: dict[str, Any],
        rest: AsyncGenerator[dict[str, Any], None],
        *,
        failed: Callable[[Exception], dict[str, Any]],
        named: bool,
        done: bytes | None,
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._first = first
        self._rest = rest
        self._failed = failed
        self._named = named
        self._done = done

    @classmethod
    async def open(
        cls,
        events: AsyncGenerator[dict[str, Any], None],
        *,
        failed: Callable[[Exception], dict[str, Any]] = error_body,
        named: bool = False,
        done: bytes | None = b"[DONE]",
    ) -> EventStream:
        """`failed(error)`: the event that tells of it. `named`: each event is also called by its `type`."""
        return cls(await anext(events), events, failed=failed, named=named, done=done)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._rest):
            try:
                await unless_disconnected(receive, self._send_all(send))
            except (ClientGoneError, OSError):
                logger.debug("a client left its stream")

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        await send(self._event(self._first))
        try:
            async for event in self._rest:
                await send(self._event(event))
                # A transport tells of a hang-up between two turns of the loop; till then each write is lost.
                await asyncio.sleep(0)
        except Exception as error:
            if not isinstance(error, LongspanError):
                logger.exception("a stream failed")
            await send(self._event(self._failed(error)))
        else:
            if self._done is not None:
                await send(_body(b"data: " + self._done))
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _event(self, event: dict[str, Any]) -> dict[str, Any]:
        name = b"event: " + event["type"].encode() + b"\n" if self._named else b""
        return _body(name + b"data: " + json_bytes(event))


def _body(data: bytes) -> dict[str, Any]:
    return {"type": "http.response.body", "body": data + b"\n\n", "more_body": True}
