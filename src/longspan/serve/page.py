"""The page at `/`: a chat and a live view of the engine, in plain files of this package.

They are read once and need no API key (what the page then asks of the API does). They load nothing from
elsewhere: the Content-Security-Policy forbids it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable
from pathlib import Path

from fastapi import FastAPI, Request, Response

_DIRECTORY = Path(__file__).parent / "page"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_FILES = {f"/page/{path.name}": path for path in sorted(_DIRECTORY.iterdir()) if path.suffix in _TYPES} | {
    "/": _DIRECTORY / "index.html",
    "/favicon.ico": _DIRECTORY / "icon.svg",
}
PAGE_PATHS = frozenset(_FILES)


def add_page_routes(app: FastAPI) -> None:
    for path, file in _FILES.items():
        app.add_api_route(path, _sender(file), methods=["GET", "HEAD"], include_in_schema=False)


def _sender(file: Path) -> Callable[[Request], Awaitable[Response]]:
    content = file.read_bytes()
    headers = {
        "Content-Security-Policy": _POLICY,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        # A browser asks each time, so its files are never of two versions.
        "Cache-Control": "no-cache",
        "ETag": f'"{hashlib.sha256(content).hexdigest()[:16]}"',
    }

    async def send(request: Request) -> Response:
        if request.headers.get("if-none-match") == headers["ETag"]:
            return Response(status_code=304, headers=headers)
        return Response(content, media_type=_TYPES[file.suffix], headers=headers)

    return send
