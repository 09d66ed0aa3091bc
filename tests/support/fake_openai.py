"""A tiny OpenAI server that does as a test says: answers, refuses, cuts off. It keeps what it was asked."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

Headers = dict[str, str]
ID_BASE = 1000  # /tokenize gives each word an id from here on


@dataclass
class FakeServer:
    """`stream(body)`: the writes of an answer. `refusal(body)`: (status, JSON) in its place, or None."""

    url: str = ""
    stream: Callable[[dict[str, Any]], list[bytes]] = lambda body: said(
        ["x"] * body["max_tokens"], prompt_tokens(body)
    )
    refusal: Callable[[dict[str, Any]], tuple[int, Any] | None] = lambda body: None
    models: Any = field(
        default_factory=lambda: {"data": [{"id": "fake", "max_model_len": 4096}, {"id": "other"}]}
    )
    metrics: Callable[[], str] | None = None
    tokenizes: bool = True
    hangs_up: bool = False
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[Headers] = field(default_factory=list)

    def answer(
        self, method: str, path: str, body: dict[str, Any], headers: Headers
    ) -> tuple[int, list[bytes]]:
        """(status, writes)"""
        if path == "/v1/models":
            return (200, [json.dumps(self.models).encode()]) if self.models else (404, [b"{}"])
        if path == "/metrics":
            return (200, [self.metrics().encode()]) if self.metrics else (404, [b"no metrics"])
        if path == "/tokenize":
            words = body.get("prompt", "").split()
            tokens = json.dumps({"tokens": [ID_BASE + i for i in range(len(words))]}).encode()
            return (200, [tokens]) if self.tokenizes else (404, [b'{"detail": "Not Found"}'])
        self.bodies.append(body)
        self.headers.append(headers)
        if refused := self.refusal(body):
            return refused[0], [json.dumps(refused[1]).encode()]
        return 200, self.stream(body)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            first, *lines = head.strip().split("\r\n")
            method, path, _ = first.split()
            headers = {k.lower(): v for k, v in (line.split(": ", 1) for line in lines)}
            raw = await reader.readexactly(int(headers.get("content-length", 0)))
            status, writes = self.answer(method, path, json.loads(raw or b"{}"), headers)
            writer.write(
                f"HTTP/1.1 {status} X\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
            )
            for data in writes:
                writer.write(b"%x\r\n%b\r\n" % (len(data), data))
                await writer.drain()
                await asyncio.sleep(0)
            if not (self.hangs_up and path.startswith("/v1/c")):
                writer.write(b"0\r\n\r\n")
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()


def event(content: Any) -> bytes:
    return b"data: " + (content if isinstance(content, bytes) else json.dumps(content).encode()) + b"\n\n"


def prompt_tokens(body: dict[str, Any]) -> int:
    """A token a word, 10 for the frame of a chat and each of its messages."""
    if "messages" in body:
        return 10 + sum(10 + len(message["content"].split()) for message in body["messages"])
    return len(body["prompt"].split() if isinstance(body["prompt"], str) else body["prompt"])


def said(words: list[str], prompt: int, cached: int | None = None) -> list[bytes]:
    """A completion and a chat in one: a chunk for each word, the end, the usage."""
    events = [{"choices": [{"text": w, "delta": {"content": w}, "finish_reason": None}]} for w in words]
    usage: dict[str, Any] = {"prompt_tokens": prompt, "completion_tokens": len(words)}
    if cached is not None:
        usage["prompt_tokens_details"] = {"cached_tokens": cached}
    ends = [
        {"choices": [{"text": "", "delta": {}, "finish_reason": "length"}]},
        {"choices": [], "usage": usage},
    ]
    return [event(content) for content in [*events, *ends, b"[DONE]"]]


@contextmanager
def fake_server() -> Iterator[FakeServer]:
    """Serves from a thread of this process."""
    fake, up, stops = FakeServer(), threading.Event(), []

    async def serve() -> None:
        stopped, loop = asyncio.Event(), asyncio.get_running_loop()
        stops.append(lambda: loop.call_soon_threadsafe(stopped.set))
        async with await asyncio.start_server(fake.serve, "127.0.0.1", 0) as server:
            fake.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            up.set()
            await stopped.wait()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    try:
        assert up.wait(30)
        yield fake
    finally:
        stops[0]()
        thread.join()
