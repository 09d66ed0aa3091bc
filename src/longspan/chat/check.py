"""Fields of chat messages that would be ignored are refused by name.

`render` takes what it knows, as the vendor's renderer does, and judges its structure. But a field that is
mistyped or not supported would silently vanish from the prompt, so whoever serves requests asks here first.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any

from longspan.errors import RequestError

_PLAIN = {"role", "content", "name"}
_MESSAGE = {
    "system": _PLAIN | {"tools"},
    "developer": _PLAIN | {"tools"},
    "user": _PLAIN,
    "assistant": _PLAIN | {"reasoning_content", "reasoning", "tool_calls"},
    "tool": _PLAIN | {"tool", "tool_call_id", "id"},
}
# An SDK sends a reply back as it dumped it, with these fields empty.
_EMPTY_WHEN_DUMPED = {"refusal", "audio", "function_call", "annotations"}
_FUNCTION = {"name", "arguments"}
_CALL = {"id", "type", "index", "function"} | _FUNCTION
_PART = {"type", "text", "refusal", "image_url", "cache_control"}  # cache_control changes no answer


def check_messages(messages: Sequence[Any]) -> None:
    """Raises RequestError naming the field if one in `messages` would be ignored, or if there are none."""
    if not messages:
        raise RequestError("`messages` is empty.", param="messages", remedy="Send at least one message.")
    for i, message in enumerate(messages):
        role = message.get("role") if isinstance(message, dict) else None
        if isinstance(role, str) and role in _MESSAGE:
            _check_message(message, role, f"messages[{i}]")


def _check_message(message: dict[str, Any], role: str, where: str) -> None:
    _check_fields(message, _MESSAGE[role], where, f"A message of role {role}")
    content = message.get("content")
    if content is None and role != "assistant" and not message.get("tools"):
        what = f"`{where}.content` is missing."
        raise RequestError(what, param=f"{where}.content", remedy="Send a string or a list of text parts.")
    for i, part in _objects(content):
        _check_fields(part, _PART, f"{where}.content[{i}]", "A part of a message")
    for i, call in _objects(message.get("tool_calls")):
        _check_fields(call, _CALL, f"{where}.tool_calls[{i}]", "A tool call")
        if isinstance(call.get("function"), dict):
            _check_fields(call["function"], _FUNCTION, f"{where}.tool_calls[{i}].function", "A function")


def _objects(items: Any) -> list[tuple[int, dict[str, Any]]]:
    if not isinstance(items, list):
        return []
    return [(i, item) for i, item in enumerate(items) if isinstance(item, dict)]


def _check_fields(item: dict[str, Any], known: set[str], where: str, what: str) -> None:
    for name, value in item.items():
        if name in known or value is None or (name in _EMPTY_WHEN_DUMPED and not value):
            continue
        close = difflib.get_close_matches(str(name), known, n=1, cutoff=0.7)
        remedy = f"Did you mean `{close[0]}`?" if close else f"It has: {', '.join(sorted(known))}."
        raise RequestError(f"{what} has no field `{name}` here.", param=f"{where}.{name}", remedy=remedy)
