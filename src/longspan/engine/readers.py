"""Token ids of one choice -> deltas for the caller, one token at a time.

A reader also knows when a stop string has matched. Stop strings are looked for in the text of a completion
and in the answer of a chat, never in its reasoning or its tool calls. Joined deltas are the whole text: there
is no second way to it.
"""

from __future__ import annotations

from typing import Any, Protocol

from longspan.chat import (
    ContentDelta,
    ReplyParser,
    StopMatcher,
    Tokenizer,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
)
from longspan.chat.reply import Event
from longspan.engine.output import FinishReason, TextDelta
from longspan.engine.request import SamplingParams


class Reader(Protocol):
    """One per choice. After `done` or `finish` no more tokens are pushed."""

    @property
    def done(self) -> bool:
        """The reply is complete, whatever the model would say next."""
        ...

    @property
    def stop_string(self) -> str | None:
        """The stop string that matched."""
        ...

    def push(self, token_id: int) -> list[Any]: ...

    def finish(self, reason: FinishReason) -> tuple[list[Any], FinishReason]:
        """The rest of the deltas, and the reason as the caller shall see it."""
        ...


class TokenReader:
    """For a model without a tokenizer: nobody can tell what the tokens say."""

    done = False
    stop_string = None

    def push(self, token_id: int) -> list[Any]:
        return []

    def finish(self, reason: FinishReason) -> tuple[list[Any], FinishReason]:
        return [], reason


class TextReader:
    """Reads a completion as plain text, into `TextDelta`s."""

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams) -> None:
        self._decoder = tokenizer.incremental(skip_special=params.skip_special_tokens)
        self._stops = _Stops(params)

    @property
    def done(self) -> bool:
        return self._stops.matched is not None

    @property
    def stop_string(self) -> str | None:
        return self._stops.matched

    def push(self, token_id: int) -> list[TextDelta]:
        self._stops.count_token()
        return _text(self._stops.filter(self._decoder.push(token_id)))

    def finish(self, reason: FinishReason) -> tuple[list[TextDelta], FinishReason]:
        return _text(self._stops.filter(self._decoder.flush()) + self._stops.flush()), reason


class ChatReader:
    """Reads a chat reply into the events of `longspan.chat`.

    The reply is over after `max_calls` complete tool calls. With 0 those that come are left out.
    """

    def __init__(self, parser: ReplyParser, params: SamplingParams, *, max_calls: int | None = None) -> None:
        self._parser = parser
        self._stops = _Stops(params)
        self._max_calls = max_calls
        self._complete_calls = 0

    @property
    def done(self) -> bool:
        enough_calls = bool(self._max_calls) and self._complete_calls == self._max_calls
        return enough_calls or self._stops.matched is not None

    @property
    def stop_string(self) -> str | None:
        return self._stops.matched

    def push(self, token_id: int) -> list[Event]:
        self._stops.count_token()
        return self._filter(self._parser.push([token_id]))

    def finish(self, reason: FinishReason) -> tuple[list[Event], FinishReason]:
        events = self._filter(self._parser.finish()) + _content(self._stops.flush())
        if reason == "stop" and self._complete_calls:
            reason = "tool_calls"
        return events, reason

    def _filter(self, events: list[Event]) -> list[Event]:
        kept: list[Event] = []
        for event in events:
            if self.done:
                break
            if isinstance(event, ContentDelta):
                kept += _content(self._stops.filter(event.text))
                continue
            # The answer is over, so what is held back can't become a stop string any more.
            kept += _content(self._stops.flush())
            if self._max_calls == 0 and isinstance(event, ToolCallStart | ToolCallArguments | ToolCallEnd):
                continue
            kept.append(event)
            self._complete_calls += isinstance(event, ToolCallEnd)
        return kept


class _Stops:
    """Stop strings, which count only in what comes after the first `min_tokens` tokens."""

    def __init__(self, params: SamplingParams) -> None:
        self._matcher = StopMatcher(params.stop or (), include=params.include_stop_str_in_output)
        self._tokens_to_ignore = params.min_tokens

    @property
    def matched(self) -> str | None:
        return self._matcher.matched

    def count_token(self) -> None:
        self._tokens_to_ignore -= 1

    def filter(self, text: str) -> str:
        return text if self._tokens_to_ignore >= 0 else self._matcher.push(text)[0]

    def flush(self) -> str:
        return self._matcher.flush()


def _text(text: str) -> list[TextDelta]:
    return [TextDelta(text)] if text else []


def _content(text: str) -> list[Event]:
    return [ContentDelta(text)] if text else []
