"""Ways to ask a server: whole, streamed, read slowly, or left in the middle."""

from __future__ import annotations

import asyncio
import json
import random
import socket
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

import httpx

from soak.answers import Answer, Failure
from soak.protocols import PROTOCOLS, failure

_PATIENCE = 300.0  # seconds without a byte, after which a server counts as hung
_SMALL_BUFFER = 4096  # bytes that a slow reader's kernel takes in advance


class Client:
    """Many connections to one server."""

    def __init__(self, url: str) -> None:
        address = urlsplit(url)
        self._address = address.hostname or "", address.port or 80
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=16)
        self._http = httpx.AsyncClient(base_url=url, timeout=httpx.Timeout(_PATIENCE), limits=limits)

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def request(self, method: str, path: str, content: bytes = b"") -> httpx.Response:
        return await self._http.request(method, path, content=content)

    async def ask(self, path: str, body: dict[str, Any]) -> Answer | Failure:
        """The whole answer."""
        response = await self._http.post(path, json=body)
        if response.status_code != 200:
            return failure(response.text, response.status_code)
        return PROTOCOLS[path].whole(response.json())

    async def ask_streaming(self, path: str, body: dict[str, Any]) -> Answer | Failure:
        """The answer that a stream adds up to."""
        response = await self._http.post(path, json=body | PROTOCOLS[path].stream)
        if response.status_code != 200:
            return failure(response.text, response.status_code)
        return PROTOCOLS[path].read_stream(response.text)

    async def ask_slowly(self, path: str, body: dict[str, Any], pause: float) -> Answer | Failure:
        """As `ask_streaming`, but takes a little at a time, with pauses."""
        reader, writer = await self._connect(_SMALL_BUFFER)
        writer.write(_post(path, body | PROTOCOLS[path].stream))
        parts = []
        with suppress(ConnectionError):
            while part := await asyncio.wait_for(reader.read(1500), _PATIENCE):
                parts.append(part)
                await asyncio.sleep(pause)
        await _close(writer)
        head, _, rest = b"".join(parts).partition(b"\r\n\r\n")
        chunked = b"transfer-encoding: chunked" in head.lower()
        text = (_dechunked(rest) if chunked else rest).decode()
        status = int((head.split() or [b"", b"0"])[1])
        return PROTOCOLS[path].read_stream(text) if status == 200 else failure(text, status)

    async def leave(self, path: str, body: dict[str, Any], chance: random.Random) -> None:
        """Asks and hangs up: in the middle of asking, of waiting, or of being answered."""
        reader, writer = await self._connect()
        data = _post(path, body)
        with suppress(ConnectionError):
            match chance.choice(["asking", "waiting", "answered", "started"]):
                case "asking":
                    writer.write(data[: chance.randrange(len(data))])
                    await asyncio.sleep(chance.random() * 0.05)
                case "waiting":
                    writer.write(data)
                    await asyncio.sleep(chance.random() ** 2)
                case "answered":
                    writer.write(data)
                    await asyncio.wait_for(reader.read(1), _PATIENCE)
                case "started":
                    writer.write(data)
                    for _ in range(chance.randint(1, 20)):
                        await asyncio.wait_for(reader.read(300), _PATIENCE)
        if chance.random() < 0.5:  # a reset instead of a polite end
            writer.transport.abort()
        await _close(writer)

    async def _connect(
        self, receive_buffer: int | None = None
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        connection = socket.socket()
        if receive_buffer:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        connection.setblocking(False)
        await asyncio.get_running_loop().sock_connect(connection, self._address)
        return await asyncio.open_connection(sock=connection, limit=receive_buffer or 2**16)


async def _close(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with suppress(ConnectionError):
        await writer.wait_closed()


def _post(path: str, body: dict[str, Any]) -> bytes:
    content = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: soak\r\nConnection: close\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    return head.encode() + content


def _dechunked(data: bytes) -> bytes:
    parts = []
    while data:
        size, _, data = data.partition(b"\r\n")
        length = int(size or b"0", 16)
        parts.append(data[:length])
        data = data[length + 2 :]
    return b"".join(parts)
