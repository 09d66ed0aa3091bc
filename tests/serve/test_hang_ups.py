"""Clients that leave: nothing of theirs stays behind, and nothing is left to fail unheard."""

from __future__ import annotations

import asyncio
import gc
import socket
import struct
from collections.abc import AsyncGenerator
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
import uvicorn
from starlette.types import Receive, Scope, Send
from support.scripted import Running

from longspan.serve.connection import Connection
from longspan.serve.delivery import EventStream
from longspan.serve.server import bind

TEXT = "/v1/completions"


def test_leaving_several_prompts_leaves_no_failure_unheard(
    server: Running, caplog: pytest.LogCaptureFixture
) -> None:
    server.say("word ", repeat=3000)
    body = {"prompt": ["a", "b"], "max_tokens": 3000, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", server.url + TEXT, json=body, timeout=60) as response:
        next(response.iter_lines())
    server.wait_until_idle()
    gc.collect()
    assert "never retrieved" not in caplog.text


def test_an_idle_connection_is_kept_longer_than_clients_keep_it(server: Running) -> None:
    """Those of httpx, aiohttp and nginx live 5, 15 and 60 seconds: the one to close must be the client."""
    assert server.server.config.timeout_keep_alive > 60


def test_a_client_in_the_middle_of_a_body_that_is_too_large_reads_why(server: Running) -> None:
    """Closing at once would reset the connection, and the answer would be lost with it."""
    address = urlsplit(server.url)
    size = 3 * server.service.options.max_body_bytes
    with socket.create_connection((address.hostname, address.port), timeout=60) as connection:
        connection.sendall(f"POST {TEXT} HTTP/1.1\r\nHost: x\r\nContent-Length: {size}\r\n\r\n".encode())
        for _ in range(3):
            connection.sendall(b" " * (size // 3))
        with connection.makefile("rb") as answers:
            assert answers.readline().startswith(b"HTTP/1.1 413")
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            assert b"HTTP/1.1 200" in answers.read()


def test_events_that_wait_for_a_client_who_has_left_are_not_written(caplog: pytest.LogCaptureFixture) -> None:
    """asyncio warns of every write after the fifth to a connection that is lost."""
    written = []

    async def main() -> None:
        listener = bind("127.0.0.1", 0)
        listener.listen()
        client = socket.create_connection(listener.getsockname())
        client.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        left = asyncio.Event()

        async def events() -> AsyncGenerator[dict[str, Any], None]:
            yield {}
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # close() resets
            client.close()
            for number in range(100):
                written.append(number)
                yield {}

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            await (await EventStream.open(events()))(scope, receive, send)
            left.set()

        config = uvicorn.Config(app, http=Connection, log_config=None, lifespan="off")
        server = uvicorn.Server(config)
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        await asyncio.wait_for(left.wait(), 60)
        server.should_exit = True
        await serving

    asyncio.run(main())
    assert 1 <= len(written) <= 4
    assert "socket.send()" not in caplog.text
