"""What a model answered: the events of a reply, and the reply they add up to."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    text: str


@dataclass(frozen=True, slots=True)
class ContentDelta:
    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """`index` counts the calls of this reply from 0."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """A piece of the arguments. All pieces of a call joined are its arguments as JSON text."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class ToolCallEnd:
    index: int


Event = ReasoningDelta | ContentDelta | ToolCallStart | ToolCallArguments | ToolCallEnd


@dataclass(frozen=True, slots=True)
class ToolCall:
    """`complete` False: the reply ended inside the call; `arguments` is the part of the JSON that came."""

    id: str
    name: str
    arguments: str
    complete: bool

    def to_message(self) -> dict:
        """The OpenAI object that a client sends back in its next request."""
        return {
            "id": self.id,
            "type": "function",
            "function": {"name": self.name, "arguments": self.arguments},
        }


@dataclass(frozen=True, slots=True)
class Reply:
    """All events added up; None where nothing came."""

    reasoning: str | None
    content: str | None
    tool_calls: tuple[ToolCall, ...]

    def to_message(self) -> dict:
        """The assistant message of this reply. Rendered, it gives the tokens of a well-formed reply again."""
        message: dict = {"role": "assistant", "content": self.content}
        if self.reasoning is not None:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [call.to_message() for call in self.tool_calls]
        return message


def collect(events: Iterable[Event]) -> Reply:
    """Adds up events, so that a streamed reply and a whole one cannot differ."""
    reasoning: list[str] = []
    content: list[str] = []
    starts: dict[int, ToolCallStart] = {}
    arguments: dict[int, list[str]] = {}
    ended: set[int] = set()
    for event in events:
        match event:
            case ReasoningDelta(text):
                reasoning.append(text)
            case ContentDelta(text):
                content.append(text)
            case ToolCallStart(index):
                starts[index], arguments[index] = event, []
            case ToolCallArguments(index, text):
                arguments[index].append(text)
            case ToolCallEnd(index):
                ended.add(index)
    return Reply(
        reasoning="".join(reasoning) or None,
        content="".join(content) or None,
        tool_calls=tuple(
            ToolCall(start.id, start.name, "".join(arguments[i]), complete=i in ended)
            for i, start in starts.items()
        ),
    )
