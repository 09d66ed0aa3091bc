"""Reads a reply of Kimi K3 as it is generated: a state machine fed with token ids or with pieces of text.

What goes where, for any input, well-formed or not:

- Text in the think channel is reasoning, in the response channel content, in an argument or json block of a
  call arguments. Text between tags is content too, unless it is blank.
- Blank content beside tool calls is dropped; else every character outside of tags comes out exactly once.
- A tag that opens a channel or a call ends whatever was open. A tag that is unknown or out of place is
  ignored, and its body belongs to where it stands; so does the body of a call without a name.
- Text between the tags of a call comes after the call: no event stands between those of one call.
- A call that the reply's end cuts off stays, not `complete`, with the part of its arguments that came.
- A known tag without its sep counts if a control token follows. Text in a tag, beside name and attributes,
  belongs to the tag's body; a tag that is unknown or lacks its attributes is then text as a whole.
- A tag that the reply's end cuts off is dropped, if it holds nothing but the beginning of a known tag.
- The reply is over at end-of-message; what follows is not read.

By ids only control ids make a tag, and text that looks like a marker is text. By text that cannot be told.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Literal

from longspan.chat import xtml
from longspan.chat.arguments import ArgumentWriter
from longspan.chat.reply import (
    ContentDelta,
    Event,
    ReasoningDelta,
    Reply,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
    collect,
)
from longspan.chat.stop import held_suffix
from longspan.chat.tokenizer import Tokenizer

Channel = Literal["think", "response", "tools", "between", "end"]

_WITH_ATTRIBUTES = ("call", "argument", "json")
_TAGS = ("think", "response", "tools", "message", *_WITH_ATTRIBUTES)
_MARKER = re.compile("|".join(map(re.escape, xtml.CONTROL_TOKENS)))


def new_call_id() -> str:
    return f"call_{uuid.uuid4().hex}"


@dataclass(frozen=True)
class _OpenCall:
    index: int
    arguments: ArgumentWriter


class ReplyParser:
    """Feed it with `push` or `push_text`, then call `finish`. Events joined equal `reply`, for every split.

    `thinking`: the prompt opened the think channel, otherwise the response channel. Nothing that a model may
    write raises. Raises CheckpointError if the tokenizer has no chat tokens.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, thinking: bool, call_id: Callable[[], str] = new_call_id
    ) -> None:
        self._controls = {tokenizer.special_id(token): token for token in xtml.CONTROL_TOKENS}
        self._n_base = tokenizer.n_base
        self._decoder = tokenizer.incremental()
        self._call_id = call_id
        self._channel: Channel = "think" if thinking else "response"
        self._header: list[str] | None = None  # text since an open or close token
        self._closing = False
        self._call: _OpenCall | None = None
        self._num_calls = 0
        self._beside: list[str] = []  # content that came within a call
        self._blank: list[str] = []  # blank text between tags, dropped if nothing else comes
        self._in_gap_text = False
        self._lead: list[str] = []  # blanks at the start of the content
        self._content_started = False
        self._held = ""  # of `push_text`: maybe the start of a marker
        self._events: list[Event] = []
        self._all: list[Event] = []

    @property
    def channel(self) -> Channel:
        """Where the next token falls."""
        return self._channel

    @property
    def reply(self) -> Reply:
        """All events so far, added up."""
        return collect(self._all)

    def push(self, token_ids: Iterable[int]) -> list[Event]:
        for token_id in token_ids:
            if token_id < self._n_base:
                self._text(self._decoder.push(token_id))
                continue
            self._text(self._decoder.flush())
            if token_id in self._controls:
                self._control(self._controls[token_id])
        return self._take()

    def push_text(self, piece: str) -> list[Event]:
        text = self._held + piece
        end = 0
        for marker in _MARKER.finditer(text):
            self._text(text[end : marker.start()])
            self._control(marker[0])
            end = marker.end()
        keep = len(text) - held_suffix(text[end:], xtml.CONTROL_TOKENS)
        self._text(text[end:keep])
        self._held = text[keep:]
        return self._take()

    def finish(self) -> list[Event]:
        """The reply is over, cut off or not. Further input is ignored."""
        self._text(self._decoder.flush() + self._held)
        self._held = ""
        if self._header is not None:
            self._read_header(cut=True)
        self._end()
        return self._take()

    def _take(self) -> list[Event]:
        events, self._events = self._events, []
        self._all += events
        return events

    def _emit(self, event: Event) -> None:
        last = self._events[-1] if self._events else None
        match last, event:
            case (ReasoningDelta(), ReasoningDelta(text)) | (ContentDelta(), ContentDelta(text)):
                self._events[-1] = replace(last, text=last.text + text)
            case ToolCallArguments(), ToolCallArguments(index, text) if last.index == index:
                self._events[-1] = replace(last, text=last.text + text)
            case _:
                self._events.append(event)

    def _text(self, text: str) -> None:
        if self._header is not None:
            self._header.append(text)
        else:
            self._body(text)

    def _control(self, token: str) -> None:
        if self._header is not None:
            self._read_header(has_sep=token == xtml.SEP)
        self._blank, self._in_gap_text = [], False
        if token in (xtml.OPEN, xtml.CLOSE) and self._channel != "end":
            self._header, self._closing = [], token == xtml.CLOSE
        elif token == xtml.END_OF_MSG:
            self._end()

    def _read_header(self, *, has_sep: bool = False, cut: bool = False) -> None:
        """Nothing more comes between open (or close) and sep: acts on the tag and keeps what is no tag."""
        header, self._header = "".join(self._header or ()), None
        name, attributes, rest = xtml.parse_tag(header)
        rest = rest if rest.strip() else ""
        if name in _WITH_ATTRIBUTES:
            name, rest = ("", rest) if rest and not attributes else (name, "")
        if name in _TAGS:
            if rest or not cut:
                self._tag(name, attributes)
                self._body(rest)
        elif rest or not (has_sep or any(tag.startswith(header.strip()) for tag in _TAGS)):
            self._body(header)

    def _tag(self, name: str, attributes: dict[str, str]) -> None:
        if self._closing:
            self._close_tag(name)
        else:
            self._open_tag(name, attributes)

    def _open_tag(self, name: str, attributes: dict[str, str]) -> None:
        match name:
            case "think" | "response" | "tools":
                self._end_call()
                self._channel = name
            case "call":
                self._end_call()
                self._channel = "tools"
                if attributes.get("tool"):
                    self._start_call(attributes["tool"])
            case "argument" | "json" if self._call and self._call.arguments.can_open(name):
                self._close_value(self._call)
                if name == "json":
                    self._call.arguments.open_json()
                else:
                    key, kind = attributes.get("key", ""), attributes.get("type", "string")
                    self._emit_arguments(self._call, self._call.arguments.open_argument(key, kind))

    def _close_tag(self, name: str) -> None:
        match name:
            case "argument" | "json" if self._call:
                self._close_value(self._call)
            case "call":
                self._end_call()
            case "tools" | "message":
                self._end_call()
                self._channel = "between"
            case "think" | "response" if self._channel == name:
                self._channel = "between"

    def _body(self, text: str) -> None:
        if not text or self._channel == "end":
            return
        if self._call and self._call.arguments.in_value:
            self._emit_arguments(self._call, self._call.arguments.text(text))
        elif self._channel == "think":
            self._emit(ReasoningDelta(text))
        elif self._channel == "response":
            self._content(text)
        else:
            self._blank.append(text)
            if self._in_gap_text or text.strip():
                self._content("".join(self._blank))
                self._blank, self._in_gap_text = [], True

    def _content(self, text: str) -> None:
        if not self._content_started:
            self._lead.append(text)
            if not text.strip():
                return
            text, self._lead, self._content_started = "".join(self._lead), [], True
        if self._call:
            self._beside.append(text)
        else:
            self._emit(ContentDelta(text))

    def _start_call(self, name: str) -> None:
        self._call = _OpenCall(self._num_calls, ArgumentWriter())
        self._emit(ToolCallStart(self._num_calls, self._call_id(), name))
        self._num_calls += 1

    def _emit_arguments(self, call: _OpenCall, text: str) -> None:
        if text:
            self._emit(ToolCallArguments(call.index, text))

    def _close_value(self, call: _OpenCall) -> None:
        if call.arguments.in_value:
            self._emit_arguments(call, call.arguments.close_value())

    def _end_call(self) -> None:
        if self._call:
            self._close_value(self._call)
            self._emit_arguments(self._call, self._call.arguments.close())
            self._emit(ToolCallEnd(self._call.index))
            self._leave_call()

    def _leave_call(self) -> None:
        self._call = None
        if self._beside:
            self._emit(ContentDelta("".join(self._beside)))
            self._beside = []

    def _end(self) -> None:
        if self._call:
            self._emit_arguments(self._call, self._call.arguments.cut())
            self._leave_call()
        if self._lead and not self._num_calls:
            self._emit(ContentDelta("".join(self._lead)))
        self._lead = []
        self._channel = "end"
