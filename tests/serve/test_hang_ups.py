"""Clients that leave: nothing of theirs stays behind, and nothing is left to fail unheard."""

from __future__ import annotations

import gc
import socket
from urllib.parse import urlsplit

import httpx
import pytest
from support.scripted import Running

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
