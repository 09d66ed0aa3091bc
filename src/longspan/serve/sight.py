"""What stands before everything else and only looks: counts requests, logs them, traces them.

One line per request for work, when it is over; never a word of its text. A client that hung up is worth one
at debug only: a storm of them must not fill a disk.
"""

from __future__ import annotations

import logging
import time

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from longspan.serve.metrics import Metrics
from longspan.serve.record import Record, begin
from longspan.serve.tracing import Tracing

logger = logging.getLogger("longspan.requests")

OTHER_ROUTE = "other"


class Sight:
    """ASGI middleware, to be the outermost."""

    def __init__(self, app: ASGIApp, *, metrics: Metrics, tracing: Tracing | None) -> None:
        self._app = app
        self._metrics = metrics
        self._tracing = tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        record = begin(scope["method"])

        async def watched(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except Exception:
            record.status = record.status or 500  # what the server answers for us
            raise
        finally:
            self._end(record, scope)

    def _end(self, record: Record, scope: Scope) -> None:
        record.ended = time.monotonic()
        record.status = record.status or 499  # cancelled before there was an answer
        record.route = _route(scope)
        record.request_id = scope["state"]["request_id"]  # the gate has given it one
        self._metrics.observe_http(record.route, record.status)
        if not record.asks_for_work:
            return
        self._metrics.observe_rejection(record.status)
        trace_id = self._tracing.trace(record, Headers(scope=scope)) if self._tracing else None
        level = logging.DEBUG if record.abandoned else logging.INFO
        if logger.isEnabledFor(level):
            logger.log(level, "request", extra={"fields": _fields(record, trace_id)})


def _route(scope: Scope) -> str:
    """The path of the route that answered, or would have: who is refused before never reaches it."""
    if (route := scope.get("route")) is not None:
        return route.path
    path, app = scope["path"], scope.get("app")
    known = {getattr(route, "path", None) for route in app.routes} if app else set()
    return path if path in known else OTHER_ROUTE


def _fields(record: Record, trace_id: str | None) -> dict[str, object]:
    error = record.error
    fields: dict[str, object] = {
        "id": record.request_id,
        "trace_id": trace_id,
        "route": record.route,
        "status": record.status,
    }
    if record.meters:
        fields |= {
            "prompt_tokens": record.prompt_tokens,
            "cached_tokens": record.cached_tokens,
            "output_tokens": record.output_tokens,
            "ttft": record.seconds_to_first_token,
        }
    return fields | {
        "seconds": round(record.seconds, 6),
        "finish": record.finish_reasons or None,
        "error": type(error).__name__ if error else None,
        "abandoned": True if record.abandoned else None,
    }
