"""The server that is measured, over HTTP: what it says of itself, and streamed requests.

aiohttp, not httpx: its parser is compiled. A client that shares the machine with its server must be cheap.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp

from longspan.bench.serving.dialogue import CHAT, Dialect
from longspan.bench.serving.prompts import WORDS, PromptSource, TokenIds, Words, words_from
from longspan.bench.serving.reply import ExchangeError, Reply, error_message
from longspan.errors import BenchError

_KEEP_ALIVE_SECONDS = 3  # below uvicorn's 5: a connection that the server is about to close is not used again
_PROBE_SECONDS = 60
_CALIBRATION_WORDS = (8, 208)


class Server:
    """`url`: without /v1. Build it with `connect`."""

    def __init__(self, url: str, session: aiohttp.ClientSession, timeout: float) -> None:
        self.url = url
        self._session = session
        self._timeout = aiohttp.ClientTimeout(total=timeout)

    @classmethod
    @asynccontextmanager
    async def connect(cls, url: str, api_key: str | None, timeout: float) -> AsyncIterator[Server]:
        """`timeout`: seconds for a request."""
        headers = {"Content-Type": "application/json"}
        if api_key:
            headers["Authorization"] = f"Bearer {api_key}"
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_SECONDS)
        async with aiohttp.ClientSession(connector=connector, headers=headers) as session:
            yield cls(url.rstrip("/").removesuffix("/v1"), session, timeout)

    async def stream(self, path: str, body: bytes) -> AsyncGenerator[bytes, None]:
        """The bytes of one answer as they are read. Raises ExchangeError."""
        try:
            async with self._session.post(self.url + path, data=body, timeout=self._timeout) as response:
                if response.status != 200:
                    message = _message(await response.read())
                    raise ExchangeError(f"HTTP {response.status}", message)
                async for data in response.content.iter_any():
                    yield data
        except TimeoutError:
            raise ExchangeError("timeout", f"no end after {self._timeout.total:g} s") from None
        except aiohttp.ClientConnectorError as error:
            raise ExchangeError("no connection", str(error)) from error
        except (aiohttp.ClientError, ConnectionError) as error:
            raise ExchangeError("connection lost", f"{type(error).__name__} {error}") from error

    async def card(self, name: str | None) -> dict[str, Any]:
        """The entry of /v1/models with this name; None: the first. Raises BenchError."""
        status, content = await self._probe("GET", "/v1/models")
        cards = content.get("data") if isinstance(content, dict) else None
        if status in (401, 403):
            raise BenchError(f"{self.url} asks for a key (HTTP {status}).", remedy="Give it with --api-key.")
        if status != 200 or not cards:
            if name:  # a server that lists no models can still be measured
                return {"id": name}
            raise BenchError(
                f"{self.url}/v1/models names no model (HTTP {status}).", remedy="Give --model NAME."
            )
        names = [card["id"] for card in cards]
        if name is None:
            return cards[0]
        if name not in names:
            raise BenchError(f"{self.url} has no model {name!r}.", remedy=f"It has {', '.join(names)}.")
        return cards[names.index(name)]

    async def token_pool(self, model: str) -> list[int]:
        """Ids of common words, from /tokenize as vLLM or as llama.cpp has it; empty: there is none."""
        text = " ".join(WORDS)
        for body in ({"model": model, "prompt": text}, {"content": text}):
            status, content = await self._probe("POST", "/tokenize", body)
            tokens = content.get("tokens") if status == 200 and isinstance(content, dict) else None
            if tokens and all(type(token) is int for token in tokens):
                return sorted(set(tokens))
        return []

    async def metrics(self) -> str | None:
        """The text of /metrics."""
        status, content = await self._probe("GET", "/metrics")
        return content if status == 200 and isinstance(content, str) else None

    async def _probe(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        """(status, JSON or text)."""
        timeout = aiohttp.ClientTimeout(total=_PROBE_SECONDS)
        try:
            async with self._session.request(method, self.url + path, json=body, timeout=timeout) as response:
                text = await response.text()
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise BenchError(
                f"{self.url} can't be reached: {str(error) or type(error).__name__}.",
                remedy="See that the server runs and that --base-url is right.",
            ) from error
        try:
            return response.status, json.loads(text)
        except ValueError:
            return response.status, text


async def prompt_source(server: Server, dialect: Dialect, turns: int) -> PromptSource:
    """Token ids where they can be sent: in completions of one turn. Answers are text, and so are chats."""
    if dialect.endpoint != CHAT and turns == 1 and (pool := await server.token_pool(dialect.model)):
        return TokenIds(pool)
    counted = []
    for count in _CALIBRATION_WORDS:
        text = " ".join((WORDS * (count // len(WORDS) + 1))[:count])
        said = (
            {"messages": [{"role": "user", "content": text}]}
            if dialect.endpoint == CHAT
            else {"prompt": text}
        )
        reply = Reply()
        try:
            async for data in server.stream(dialect.endpoint, dialect.body(said, 1)):
                reply.feed(data, 0.0)
        except ExchangeError as error:
            raise BenchError(f"{server.url}{dialect.endpoint} answered with {error}.") from error
        if reply.prompt_tokens is None:
            return Words()
        counted.append((count, reply.prompt_tokens))
    return words_from(*counted)


def _message(raw: bytes) -> str:
    try:
        return error_message(json.loads(raw))
    except ValueError:
        return raw.decode(errors="replace")
