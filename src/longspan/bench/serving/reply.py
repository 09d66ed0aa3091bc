"""One streamed answer: what it says, how many tokens it has, and when each part arrived.

A chunk is an event with text for the reader: content, reasoning, or a piece of a tool call. The first event
that OpenAI's API sends for a chat holds a role only: it is no token, and does not count. Events that arrive
in one read share its time. The answer ends with the last event that has a choice; usage and [DONE] follow.

Tokens are those of `usage`. A server that sends none is believed to send one token a chunk.
"""

from __future__ import annotations

import json
from typing import Any

from longspan.bench.serving.events import EventReader

DONE = b"[DONE]"
REASONING_FIELDS = ("reasoning_content", "reasoning")
_SHOWN = 300  # characters of a message


class ExchangeError(Exception):
    """A request that failed. `kind` is what such failures are counted under."""

    def __init__(self, kind: str, message: str) -> None:
        self.kind = kind
        super().__init__(f"{kind}: {message}"[:_SHOWN])


class Reply:
    """Feed it what is read, with the time of the read; close it at the end of the stream."""

    def __init__(self) -> None:
        self.chunks: list[float] = []  # arrival of each chunk
        self.ended: float | None = None  # arrival of the last event with a choice
        self.finish_reason: str | None = None
        self.prompt_tokens: int | None = None
        self.cached_tokens: int | None = None
        self.usage_tokens: int | None = None
        self._events = EventReader()
        self._texts: dict[str, list[str]] = {}  # by field

    @property
    def output_tokens(self) -> int:
        return len(self.chunks) if self.usage_tokens is None else self.usage_tokens

    @property
    def text(self) -> str:
        """The answer itself, without reasoning and calls."""
        return "".join(self._texts.get("text", ()))

    @property
    def reasoning(self) -> dict[str, str]:
        """Under the name that the server gave it, the first if it gave two; empty if there was none."""
        name = next((name for name in REASONING_FIELDS if name in self._texts), None)
        return {name: "".join(self._texts[name])} if name else {}

    def feed(self, data: bytes, at: float) -> None:
        """Raises ExchangeError for an error event, and for what is no answer."""
        for event in self._events.feed(data):
            if event != DONE:
                self._read(event, at)

    def close(self) -> None:
        """Raises ExchangeError unless the answer came to its end."""
        if self.finish_reason is None:
            what = f"the stream ended after {len(self.chunks)} chunks without a finish_reason"
            raise ExchangeError("cut off", what)

    def _read(self, event: bytes, at: float) -> None:
        try:
            content = json.loads(event)
        except ValueError:
            raise ExchangeError("not JSON", repr(event)) from None
        if not isinstance(content, dict):
            raise ExchangeError("no answer", repr(event))
        if content.get("error"):
            raise ExchangeError("error in the stream", error_message(content))
        try:
            if content.get("choices"):
                self._read_choice(content["choices"][0], at)
            if content.get("usage"):
                self._read_usage(content["usage"])
        except (AttributeError, KeyError, TypeError) as error:
            raise ExchangeError("no answer", repr(event)) from error

    def _read_choice(self, choice: dict[str, Any], at: float) -> None:
        self.ended = at
        self.finish_reason = choice.get("finish_reason") or self.finish_reason
        delta = choice.get("delta") or {}
        parts = {name: delta.get(name) for name in REASONING_FIELDS}
        parts["text"] = choice.get("text") or delta.get("content")
        said = {name: part for name, part in parts.items() if part}
        for name, part in said.items():
            self._texts.setdefault(name, []).append(part)
        if said or delta.get("tool_calls"):
            self.chunks.append(at)

    def _read_usage(self, usage: dict[str, Any]) -> None:
        self.usage_tokens = usage.get("completion_tokens")
        self.prompt_tokens = usage.get("prompt_tokens")
        self.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")


def error_message(content: Any) -> str:
    """Of an error object: OpenAI's, or one with a message of its own."""
    error = content.get("error", content) if isinstance(content, dict) else content
    return str(error.get("message", error)) if isinstance(error, dict) else str(error)
