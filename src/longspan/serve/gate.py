"""What every request passes before it reaches a route: its id, API key, size of the body, shutting down.

The id is the client's `X-Request-Id`, or one is made. Every answer carries it, and answers of the routes that
generate contain it.
"""

from __future__ import annotations

import re
import secrets
import uuid
from collections.abc import Callable
from contextlib import suppress

from fastapi import Request
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from longspan.serve.failures import MESSAGES_PATH, REQUEST_ID, failure
from longspan.serve.json_text import JsonResponse
from longspan.serve.page import PAGE_PATHS

# No key needed: for probes and scrapers, and for the page, whose calls then need it.
OPEN_PATHS = frozenset({"/health", "/ping", "/metrics", "/version"}) | PAGE_PATHS

_MAX_ID = 128  # characters
_NOT_IN_ID = re.compile(r"[^A-Za-z0-9._:/@=+-]")  # it gets into logs and headers


class Gate:
    """ASGI middleware. `draining()` is true once the server has been told to stop."""

    def __init__(
        self, app: ASGIApp, *, api_key: str | None, max_body_bytes: int, draining: Callable[[], bool]
    ) -> None:
        self._app = app
        self._keys = _as_sent(api_key) if api_key else None
        self._max_body_bytes = max_body_bytes
        self._draining = draining

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        request_id = _NOT_IN_ID.sub("", headers.get(REQUEST_ID, ""))[:_MAX_ID] or uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id
        send = _with_id(send, request_id, scope["path"])
        refusal = self._refusal(Request(scope), headers)
        if refusal is not None:
            await refusal(scope, receive, send)
        else:
            await self._app(scope, self._counted(receive), send)

    def _refusal(self, request: Request, headers: Headers) -> JsonResponse | None:
        if request.url.path in OPEN_PATHS:
            return None
        if self._keys is not None and not _has_key(headers, self._keys):
            message = (
                "The API key is missing or wrong. Send it as `Authorization: Bearer KEY` or `x-api-key: KEY`."
            )
            return failure(request, 401, message, headers={"WWW-Authenticate": "Bearer"})
        if self._draining():
            message = "The server is shutting down. Try again later."
            return failure(request, 503, message, headers={"Retry-After": "5"})
        length = headers.get("content-length", "")
        if length.isdigit() and int(length) > self._max_body_bytes:
            # The connection stays open and the rest is read past: a close would take the answer with it.
            return failure(request, 413, self._too_large())
        return None

    def _counted(self, receive: Receive) -> Receive:
        # A chunked body has no declared length, so count what comes.
        received = 0

        async def counting() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self._max_body_bytes:
                raise HTTPException(413, self._too_large())
            return message

        return counting

    def _too_large(self) -> str:
        return f"The body is larger than {self._max_body_bytes} bytes. Send less, or raise --max-body-mib."


def _with_id(send: Send, request_id: str, path: str) -> Send:
    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            headers[REQUEST_ID] = request_id
            if path.startswith(MESSAGES_PATH):
                headers["request-id"] = request_id  # where Anthropic's clients look for it
        await send(message)

    return sending


def _as_sent(api_key: str) -> list[bytes]:
    """A key as clients may put it into a header: in UTF-8, and some in Latin-1."""
    keys = [api_key.encode(errors="surrogateescape")]  # what the environment has need not be UTF-8
    with suppress(UnicodeEncodeError):
        keys.append(api_key.encode("latin-1"))
    return keys


def _has_key(headers: Headers, keys: list[bytes]) -> bool:
    scheme, _, bearer = headers.get("authorization", "").partition(" ")
    sent = [headers.get("x-api-key", ""), bearer if scheme.lower() == "bearer" else ""]
    # The bytes that came: starlette reads headers as Latin-1.
    raw = [key.strip(" \t").encode("latin-1") for key in sent]
    return any([secrets.compare_digest(one, key) for one in raw for key in keys])  # noqa: C419 (in constant time)
