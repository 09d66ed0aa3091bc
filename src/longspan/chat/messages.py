"""OpenAI-style chat messages -> typed, validated messages, tool results matched to their calls.

Everything wrong with a conversation is found here, as a RequestError whose `param` names the field.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from longspan.errors import RequestError

ROLES = ("system", "developer", "user", "assistant", "tool")


@dataclass(frozen=True)
class Image:
    """The place of an image in a content; `where` is the field it came from."""

    where: str


Content = tuple[str | Image, ...]


@dataclass(frozen=True)
class Call:
    """One function call. `arguments`: an object in the caller's key order, or text that is not JSON."""

    id: str | None
    name: str
    arguments: dict[str, Any] | str


@dataclass(frozen=True)
class Plain:
    """A system or user message."""

    role: str
    name: str
    content: Content


@dataclass(frozen=True)
class ToolDeclaration:
    """A system message that adds tools in mid-conversation."""

    tools: list[Any]


@dataclass(frozen=True)
class Assistant:
    name: str
    reasoning: str
    content: Content
    calls: tuple[Call, ...]


@dataclass(frozen=True)
class ToolResult:
    """`index` counts from 1 since the last assistant message."""

    tool: str
    index: int
    content: Content
    call_id: str | None


Message = Plain | ToolDeclaration | Assistant | ToolResult


def parse_messages(messages: Sequence[Any]) -> list[Message]:
    """Validates a conversation and resolves its tool results. Raises RequestError."""
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        raise _error("messages", messages, "a list of messages")
    parsed: list[Message] = []
    calls: tuple[Call, ...] = ()
    results: list[tuple[str, ToolResult]] = []
    for i, message in enumerate(messages):
        where = f"messages[{i}]"
        item = _parse_message(message, where)
        if isinstance(item, ToolResult):
            results.append((where, item))
            continue
        offset = _results_since_assistant(parsed)
        parsed += _resolve(results, calls, offset)
        results = []
        if isinstance(item, Assistant):
            calls = item.calls
        parsed.append(item)
    return parsed + _resolve(results, calls, _results_since_assistant(parsed))


def _results_since_assistant(parsed: list[Message]) -> int:
    count = 0
    for message in reversed(parsed):
        if isinstance(message, Assistant):
            break
        count += isinstance(message, ToolResult)
    return count


def _resolve(run: list[tuple[str, ToolResult]], calls: tuple[Call, ...], offset: int) -> list[ToolResult]:
    """Numbers one run of consecutive tool messages, `offset` results after the assistant message.

    If every message names a call by id, the run is put in the order of the calls and takes the calls' names.
    Otherwise the order stays and a name comes from the message itself, else from the call at its position.
    """
    position: dict[str, int] = {}
    for i, call in enumerate(calls):
        if call.id is not None:
            position.setdefault(call.id, i)
    if all(result.call_id in position for _, result in run):
        run = [(where, replace(r, tool=calls[position[r.call_id or ""]].name)) for where, r in run]
        run.sort(key=lambda item: position[item[1].call_id or ""])
    resolved = []
    for index, (where, result) in enumerate(run, start=offset + 1):
        tool = result.tool or (calls[index - 1].name if index <= len(calls) else "")
        if not tool:
            raise RequestError(
                f"{where} is the result of an unknown tool: its tool_call_id {result.call_id!r} is no "
                f"call of the assistant message before it, and there is no call number {index}.",
                param=where,
                remedy="Give tool_call_id the id of the call, or name the tool.",
            )
        resolved.append(replace(result, tool=tool, index=index))
    return resolved


def _parse_message(message: Any, where: str) -> Message:
    if not isinstance(message, dict):
        raise _error(where, message, "an object with a role")
    role = message.get("role")
    if role not in ROLES:
        raise _error(f"{where}.role", role, f"one of {', '.join(ROLES)}")
    if role in ("system", "developer"):
        tools = message.get("tools")
        if tools:
            if message.get("content"):
                raise _error(f"{where}.content", "given beside tools", "a message of its own for each")
            return ToolDeclaration(check_tools(tools, f"{where}.tools"))
        role = "system"
    content = _content(message.get("content"), f"{where}.content")
    if role == "assistant":
        return Assistant(
            name=_text(message, "name", where),
            reasoning=_reasoning(message, where),
            content=content,
            calls=_calls(message.get("tool_calls"), f"{where}.tool_calls"),
        )
    if message.get("tool_calls"):
        raise _error(f"{where}.tool_calls", "tool calls", f"none in a message of role {role}")
    if role == "tool":
        tool = _text(message, "tool", where) or _text(message, "name", where)
        call_id = _text(message, "tool_call_id", where) or _text(message, "id", where)
        return ToolResult(tool=tool, index=0, content=content, call_id=call_id or None)
    return Plain(role=role, name=_text(message, "name", where), content=content)


def _content(content: Any, where: str) -> Content:
    if content is None:
        return ()
    if isinstance(content, str):
        return (content,)
    if not isinstance(content, list):
        raise _error(where, content, "a string, null or a list of parts")
    return tuple(_part(part, f"{where}[{i}]") for i, part in enumerate(content))


def _part(part: Any, where: str) -> str | Image:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        raise _error(where, part, "an object with a type")
    kind = part.get("type")
    if kind in ("image", "image_url"):
        return Image(where)
    if kind not in ("text", "input_text", "output_text", "refusal"):
        raise _error(f"{where}.type", kind, "text, image or image_url")
    field = "refusal" if kind == "refusal" else "text"
    if not isinstance(part.get(field), str):
        raise _error(f"{where}.{field}", part.get(field), "a string")
    return part[field]


def _reasoning(message: dict[str, Any], where: str) -> str:
    """Verbatim, whatever its blanks, unless it is nothing but blanks."""
    reasoning = _text(message, "reasoning_content", where) or _text(message, "reasoning", where)
    return reasoning if reasoning.strip() else ""


def _calls(calls: Any, where: str) -> tuple[Call, ...]:
    if calls is None:
        return ()
    if not isinstance(calls, list):
        raise _error(where, calls, "a list of tool calls")
    return tuple(_call(call, f"{where}[{i}]") for i, call in enumerate(calls))


def _call(call: Any, where: str) -> Call:
    """Takes {"id", "type", "function": {"name", "arguments"}} and the bare {"id", "name", "arguments"}."""
    if not isinstance(call, dict):
        raise _error(where, call, "an object with a function")
    call_id = _text(call, "id", where) or None
    if call.get("type", "function") != "function":
        raise _error(f"{where}.type", call["type"], '"function"')
    function = call
    if "function" in call:
        function, where = call["function"], f"{where}.function"
        if not isinstance(function, dict):
            raise _error(where, function, "an object with a name and arguments")
    name = _text(function, "name", where)
    if not name:
        raise _error(f"{where}.name", function.get("name"), "the name of the function")
    return Call(call_id, name, _arguments(function.get("arguments"), f"{where}.arguments"))


def _arguments(arguments: Any, where: str) -> dict[str, Any] | str:
    if arguments is None:
        return {}
    if isinstance(arguments, dict):
        return arguments
    if not isinstance(arguments, str):
        raise _error(where, arguments, "an object, or a string holding one as JSON")
    if not arguments.strip():
        return {}
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    if not isinstance(value, dict):
        raise _error(where, value, "JSON of an object")
    return value


def check_tools(tools: Any, where: str) -> list[Any]:
    """The list of tools as given, each an object. Raises RequestError."""
    if not isinstance(tools, list):
        raise _error(where, tools, "a list of tools")
    for i, tool in enumerate(tools):
        if not isinstance(tool, dict):
            raise _error(f"{where}[{i}]", tool, "an object")
    return tools


def _text(mapping: dict[str, Any], field: str, where: str) -> str:
    value = mapping.get(field)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise _error(f"{where}.{field}", value, "a string")
    return value


def _error(param: str, found: Any, expected: str) -> RequestError:
    shown = repr(found) if isinstance(found, str | int | float | None) else f"a {type(found).__name__}"
    return RequestError(f"{param} is {shown[:80]}.", param=param, remedy=f"Expected {expected}.")
