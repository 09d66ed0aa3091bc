"""Chat messages -> the segments of a Kimi K3 prompt.

Rendering grows at its end only: what the model answered to n messages, appended to their rendering, is the
rendering of those messages and the answer. So prefixes are reusable, if the caller sends reasoning back.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from longspan.chat import xtml
from longspan.chat.messages import (
    Assistant,
    Call,
    Content,
    Image,
    Message,
    Plain,
    ToolDeclaration,
    ToolResult,
    check_tools,
    parse_messages,
)
from longspan.chat.xtml import Segment
from longspan.errors import RequestError

EFFORTS = ("low", "high", "max")
DEFAULT_EFFORT = "max"  # the vendor's choice for a caller who gives none; `render` itself adds nothing

_STATIC_TOOLS = "# Tools\nHere are the available tools, described in JSONSchema.\n"
_DYNAMIC_TOOLS = (
    "## New Tools Available\n"
    "The system dynamically extends the toolset via lazy-loading.\n"
    "You have access to all existing and extended tools.\n"
    "Here are the specs for the extended tools.\n"
)
_EFFORT = (
    "`thinking_effort` guides on how much to think in your thinking channel "
    "(not including the response channel), supported values include `low`, `medium`, `high`, and `max`.\n"
    "Now the system is invoked with `thinking_effort={}`."
)
_TOOL_CHOICE = {
    "required": "The system is invoked with `tool_choice=required`.\n"
    "You MUST call tools in the next message.",
    "none": "The system is invoked with `tool_choice=none`.\n"
    "You MUST NOT call any tools in the next message.",
}
_RESPONSE_FORMAT = (
    "The system is invoked with `response_format={}`.\n"
    "Your response must be raw JSON data without markdown code blocks (```json) or any additional formatting."
)
_SCHEMA = "\nThe JSON data must match the following schema:\n```json\n{}\n```"


@dataclass(frozen=True)
class ImageSlot:
    """An image as the prompt sees it: original size in pixels, and how many rows of features it takes."""

    width: int
    height: int
    num_tokens: int


def render(
    messages: Sequence[Any],
    tools: list[Any] | None = None,
    *,
    thinking: bool = True,
    thinking_effort: str | None = None,
    tool_choice: str | dict[str, Any] | None = None,
    response_format: dict[str, Any] | None = None,
    add_generation_prompt: bool = True,
    images: Sequence[ImageSlot] | None = None,
) -> list[Segment]:
    """Renders a conversation of OpenAI-style messages.

    `thinking` opens the think channel and keeps earlier reasoning; `thinking_effort` None tells the model
    nothing. `images` are the slots of the image parts in order of appearance; `()` refuses image parts, and
    None writes a placeholder text for each, as the vendor's text-only rendering does. Raises RequestError
    naming the field.
    """
    if thinking_effort is not None and thinking_effort not in EFFORTS:
        raise RequestError(
            f"thinking_effort is {thinking_effort!r}.",
            param="thinking_effort",
            remedy=f"Expected one of {', '.join(EFFORTS)}.",
        )
    fill = _ImageFiller(images)
    segments: list[Segment] = []
    if tools:
        segments += _system("tool-declare", _tools_body(_STATIC_TOOLS, check_tools(tools, "tools")))
    if thinking and thinking_effort is not None:
        segments += _system("thinking-effort", _EFFORT.format(thinking_effort))
    for message in parse_messages(messages):
        segments += _render_message(message, thinking, fill)
    if isinstance(tool_choice, str) and tool_choice in _TOOL_CHOICE:
        segments += _system("tool-choice", _TOOL_CHOICE[tool_choice])
    elif not (tool_choice in (None, "auto") or isinstance(tool_choice, dict)):
        raise RequestError(
            f"tool_choice is {tool_choice!r}.",
            param="tool_choice",
            remedy="Expected auto, none, required or an object that names a function.",
        )
    if response_format is not None:
        segments += _render_response_format(response_format)
    if add_generation_prompt:
        segments += xtml.open_tag("message", [("role", "assistant")])
        segments += xtml.open_tag("think" if thinking else "response")
    fill.check_all_used()
    return segments


class _ImageFiller:
    """Hands out the image slots in order of appearance."""

    def __init__(self, images: Sequence[ImageSlot] | None) -> None:
        self._images = images
        self._used = 0

    def __call__(self, image: Image) -> Segment:
        if self._images is None:
            return Segment(xtml.IMAGE_PLACEHOLDER, special=True)
        if self._used == len(self._images):
            found = f"number {self._used + 1}, and {self._used} can be taken" if self._images else "an image"
            raise RequestError(
                f"{image.where} is {found}.",
                param=image.where,
                remedy="Send text only, or a request whose images this model can take.",
            )
        slot = self._images[self._used]
        self._used += 1
        return xtml.image(slot.width, slot.height, slot.num_tokens)

    def check_all_used(self) -> None:
        if self._images is not None and self._used != len(self._images):
            raise RequestError(f"{len(self._images)} images were given, but the messages have {self._used}.")


def _system(kind: str, body: str) -> list[Segment]:
    return xtml.message([("role", "system"), ("type", kind)], xtml.text(body))


def _tools_body(intro: str, tools: list[Any]) -> str:
    return f"{intro}\n```json\n{_compact(tools)}\n```"


def _render_message(message: Message, thinking: bool, fill: Callable[[Image], Segment]) -> list[Segment]:
    match message:
        case Plain(role, name, content):
            return xtml.message(_role(role, name), _render_content(content, fill))
        case ToolDeclaration(tools):
            return _system("tool-declare", _tools_body(_DYNAMIC_TOOLS, tools))
        case ToolResult(tool, index, content):
            attributes = [("role", "tool"), ("tool", tool), ("index", str(index))]
            return xtml.message(attributes, _render_content(content, fill))
        case Assistant(name, reasoning, content, calls):
            body = xtml.element("think", [], xtml.text(reasoning)) if thinking else []
            body += xtml.element("response", [], _render_content(content, fill))
            if calls:
                rendered = [segment for i, call in enumerate(calls, 1) for segment in _render_call(call, i)]
                body += xtml.element("tools", [], rendered)
            return xtml.message(_role("assistant", name), body)


def _role(role: str, name: str) -> list[tuple[str, str]]:
    return [("role", role), ("name", name)] if name else [("role", role)]


def _render_content(content: Content, fill: Callable[[Image], Segment]) -> list[Segment]:
    return [s for part in content for s in ([fill(part)] if isinstance(part, Image) else xtml.text(part))]


def _render_call(call: Call, index: int) -> list[Segment]:
    if isinstance(call.arguments, str):
        body = xtml.element("json", [("type", "object")], xtml.text(call.arguments))
    else:
        body = []
        for key, value in call.arguments.items():
            raw = value if isinstance(value, str) else _json(value)
            body += xtml.element("argument", [("key", str(key)), ("type", _json_type(value))], xtml.text(raw))
    return xtml.element("call", [("tool", call.name), ("index", str(index))], body)


def _json_type(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int() | float():
            return "number"
        case str():
            return "string"
        case dict():
            return "object"
        case _:
            return "array"


def _render_response_format(response_format: dict[str, Any]) -> list[Segment]:
    kind = response_format.get("type") if isinstance(response_format, dict) else None
    match kind:
        case "text":
            return []
        case "json_object":
            return _system("response-format", _RESPONSE_FORMAT.format(kind))
        case "json_schema":
            body = _RESPONSE_FORMAT.format(kind) + _SCHEMA.format(_compact(_schema(response_format)))
            return _system("response-format", body)
    raise RequestError(
        f"response_format.type is {kind!r}.",
        param="response_format",
        remedy="Expected text, json_object or json_schema.",
    )


def _schema(response_format: dict[str, Any]) -> Any:
    wrapper = response_format.get("json_schema")
    if not isinstance(wrapper, dict):
        raise RequestError(
            "response_format has no json_schema object.",
            param="response_format.json_schema",
            remedy='Expected {"type": "json_schema", "json_schema": {"name": ..., "schema": {...}}}.',
        )
    for member in ("schema", "json_schema"):
        if member in wrapper:
            return wrapper[member]
    return wrapper


def _compact(value: Any) -> str:
    """JSON as it stands in declarations: no blanks, keys sorted at every depth, non-ASCII kept."""
    return _json(value, sort_keys=True, separators=(",", ":"))


def _json(value: Any, **options: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, **options)
    except RecursionError:
        raise RequestError("A tool, schema or argument is nested too deeply.", remedy="Flatten it.") from None
