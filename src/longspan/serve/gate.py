"""What every request passes before it reaches a route: API key, size of the body, shutting down."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from contextlib import suppress

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from longspan.serve.failures import error_object
from longspan.serve.json_text import JsonResponse

OPEN_PATHS = frozenset({"/health", "/metrics", "/version"})  # for probes and scrapers; no key needed


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
        refusal = self._refusal(scope["path"], headers)
        if refusal is not None:
            await refusal(scope, receive, send)
        else:
            await self._app(scope, self._counted(receive), send)

    def _refusal(self, path: str, headers: Headers) -> JsonResponse | None:
        if path in OPEN_PATHS:
            return None
        if self._keys is not None and not _has_key(headers, self._keys):
            message = "The API key is missing or wrong. Send it as `Authorization: Bearer KEY`."
            return JsonResponse(error_object(401, message), 401, {"WWW-Authenticate": "Bearer"})
        if self._draining():
            message = "The server is shutting down. Try again later."
            return JsonResponse(error_object(503, message), 503, {"Retry-After": "5"})
        length = headers.get("content-length", "")
        if length.isdigit() and int(length) > self._max_body_bytes:
            return JsonResponse(error_object(413, self._too_large()), 413, {"Connection": "close"})
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


def _as_sent(api_key: str) -> list[bytes]:
    """A key as clients may put it into a header: in UTF-8, and some in Latin-1."""
    keys = [api_key.encode(errors="surrogateescape")]  # what the environment has need not be UTF-8
    with suppress(UnicodeEncodeError):
        keys.append(api_key.encode("latin-1"))
    return keys


def _has_key(headers: Headers, keys: list[bytes]) -> bool:
    scheme, _, key = headers.get("authorization", "").partition(" ")
    sent = key.strip(" \t").encode("latin-1")  # the bytes that came: starlette reads headers as Latin-1
    matches = [secrets.compare_digest(sent, key) for key in keys]
    return scheme.lower() == "bearer" and any(matches)
