"""The bodies of /v1/messages and /v1/messages/count_tokens, and their blocks as the messages of a chat.

A user's message with results of tools makes one message for each result, and one for each run of text between
them. An assistant's message that stands last is gone on with. Thinking is off unless it is asked for.
"""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import Field

from longspan.chat import EFFORTS
from longspan.engine.request import MAX_STOPS
from longspan.errors import RequestError
from longspan.serve.body import CallBody, FastList, Refused, illegal, keep_supported, string
from longspan.serve.prompts import Chat
from longspan.serve.thinking import DEFAULT, OFF, ThinkingOptions

# `budget_tokens` below the number chooses the effort; no model can be held to a budget exactly.
_BUDGETS = ((4096, "low"), (16384, "high"))
_MARKS = {"type", "cache_control"}  # cache_control changes no answer
_BLOCKS: dict[str, dict[str, set[str]]] = {
    "system": {"text": _MARKS | {"text"}},
    "user": {
        "text": _MARKS | {"text"},
        "tool_result": _MARKS | {"tool_use_id", "content", "is_error"},
    },
    "assistant": {
        "text": _MARKS | {"text"},
        "thinking": {"type", "thinking", "signature"},
        "tool_use": _MARKS | {"id", "name", "input", "caller"},
    },
}
_TOOL = {"type", "name", "description", "input_schema", "cache_control", "strict"}
_CITATIONS = {"citations": Refused("There are no citations; leave it out.", ([],))}
_NAMES = {
    "stop": "stop_sequences",
    "response_format.json_schema": "output_config.format",
    "response_format": "output_config.format",
}


class CountTokensRequest(CallBody):
    """POST /v1/messages/count_tokens: what makes the prompt."""

    refused: ClassVar[dict[str, Refused]] = {
        "mcp_servers": Refused("There are no built-in tools; declare functions in `tools`.", ([],)),
        "container": Refused("There are no built-in tools; leave it out."),
        "context_management": Refused("The prompt is never cut; leave it out."),
        "service_tier": Refused('There is one tier: send "auto".', ("auto", "standard_only")),
        "stop": Refused("Here it is called `stop_sequences`."),
        "inference_geo": Refused("The answer is computed where the server is; leave it out."),
    }

    messages: list[Any]
    system: str | list[Any] = ""
    tools: FastList[dict[str, Any]] = Field(default_factory=list)
    tool_choice: dict[str, Any] = Field(default_factory=lambda: {"type": "auto"})
    thinking: dict[str, Any] = Field(default_factory=lambda: {"type": "disabled"})
    output_config: dict[str, Any] = Field(default_factory=dict)
    cache_control: dict[str, Any] | None = None  # changes no answer

    @property
    def shows_thinking(self) -> bool:
        return self.thinking.get("display") != "omitted"

    def chat(self) -> tuple[Chat, dict[str, str]]:
        """The chat, and the names that its fields have here. Raises RequestError naming what is wrong."""
        config = keep_supported(self.output_config, ("effort", "format"), {}, where="output_config.")
        messages, places = _messages(self.messages)
        last = messages[-1] if messages else {}
        if last.get("role") == "assistant" and last.get("tool_calls"):
            what = f"`{places[-1]}` ends with a call of a tool."
            raise RequestError(what, param=places[-1], remedy="Send its result in a message of the user.")
        if self.system:
            content = _texts(self.system, "system")
            messages.insert(0, {"role": "system", "content": content})
            places.insert(0, "system")
        choice, parallel = _tool_choice(self.tool_choice)
        chat = Chat(
            messages=messages,
            tools=[_tool(tool, f"tools[{i}]") for i, tool in enumerate(self.tools)] or None,
            tool_choice=choice,
            parallel_tool_calls=parallel,
            response_format=_response_format(config.get("format")),
            thinking=_thinking(self.thinking, config.get("effort")),
            continue_final_message=last.get("role") == "assistant",
        )
        return chat, _NAMES | {f"messages[{i}]": place for i, place in enumerate(places)}


class MessagesRequest(CountTokensRequest):
    """POST /v1/messages."""

    max_tokens: int
    stop_sequences: FastList[str] = Field(default_factory=list, max_length=MAX_STOPS)

    def sampling(self) -> dict[str, Any]:
        return super().sampling() | {"stop": self.stop_sequences}

    def chat(self) -> tuple[Chat, dict[str, str]]:
        budget = self.thinking.get("budget_tokens")
        if isinstance(budget, int) and budget >= self.max_tokens:
            where = "thinking.budget_tokens"
            raise illegal(where, budget, f"less than `max_tokens`, which is {self.max_tokens}")
        return super().chat()


def _thinking(thinking: dict[str, Any], effort: Any) -> ThinkingOptions:
    if effort is not None and effort not in EFFORTS:
        raise illegal("output_config.effort", effort, f"one of {', '.join(EFFORTS)}")
    known = {"enabled": ("type", "budget_tokens", "display"), "adaptive": ("type", "display")}
    kind = thinking.get("type")
    if not isinstance(kind, str) or kind not in (*known, "disabled"):
        raise illegal("thinking.type", kind, '"enabled", "adaptive" or "disabled"')
    keep_supported(thinking, known.get(kind, ("type",)), {}, where="thinking.")
    if thinking.get("display") not in (None, "summarized", "omitted"):
        raise illegal("thinking.display", thinking["display"], '"summarized" or "omitted"')
    if kind == "disabled":
        return OFF
    budget = thinking.get("budget_tokens")
    if budget is not None and (type(budget) is not int or budget < 1):
        raise illegal("thinking.budget_tokens", budget, "a number of tokens from 1")
    if effort is None and budget is not None:
        effort = next((name for below, name in _BUDGETS if budget < below), DEFAULT.effort)
    return ThinkingOptions(enabled=True, effort=effort or DEFAULT.effort)


def _response_format(wanted: Any) -> dict[str, Any] | None:
    """`output_config.format` as the `response_format` of a chat."""
    if wanted is None:
        return None
    if not isinstance(wanted, dict) or wanted.get("type") != "json_schema":
        raise illegal("output_config.format", wanted, '{"type": "json_schema", "schema": {...}}')
    fields = keep_supported(wanted, ("type", "schema"), {}, where="output_config.format.")
    del fields["type"]
    return {"type": "json_schema", "json_schema": {"name": "output"} | fields}


def _tool(tool: dict[str, Any], where: str) -> dict[str, Any]:
    """A declaration as a chat has it."""
    if tool.get("type", "custom") not in ("custom", None):
        raise illegal(f"{where}.type", tool["type"], '"custom"; there are no built-in tools')
    fields = keep_supported(tool, _TOOL, {}, where=f"{where}.")
    function = {"name": string(fields, "name", where)}
    for theirs, ours in (
        ("description", "description"),
        ("input_schema", "parameters"),
        ("strict", "strict"),
    ):
        if theirs in fields:
            function[ours] = fields[theirs]
    return {"type": "function", "function": function}


def _tool_choice(choice: dict[str, Any]) -> tuple[str | dict[str, Any], bool]:
    """The choice as a chat has it, and whether several tools may be called at once."""
    fields = keep_supported(choice, ("type", "name", "disable_parallel_tool_use"), {}, where="tool_choice.")
    parallel = not fields.pop("disable_parallel_tool_use", False)
    match fields:
        case {"type": "auto" | "none" as kind, **others} if not others:
            return kind, parallel
        case {"type": "any", **others} if not others:
            return "required", parallel
        case {"type": "tool", "name": str(name)}:
            return {"type": "function", "function": {"name": name}}, parallel
    legal = 'of the type auto, any, none, or tool with a "name"'
    raise illegal("tool_choice", choice.get("type"), legal)


def _messages(items: list[Any]) -> tuple[list[dict[str, Any]], list[str]]:
    """The messages, and where in the body each of them begins."""
    messages: list[dict[str, Any]] = []
    places: list[str] = []
    for i, item in enumerate(items):
        where = f"messages[{i}]"
        if not isinstance(item, dict):
            raise illegal(where, item, "an object with a role")
        keep_supported(item, ("role", "content"), {}, where=f"{where}.")
        role = item.get("role")
        if not isinstance(role, str) or role not in _BLOCKS:
            raise illegal(f"{where}.role", role, "user or assistant")
        blocks = _blocks(item.get("content"), role, f"{where}.content")
        if role == "assistant":
            messages.append(_turn(blocks, f"{where}.content"))
        else:
            messages += _said(blocks, role, f"{where}.content")
        places += [where] * (len(messages) - len(places))
    return messages, places


def _blocks(content: Any, role: str, where: str) -> list[dict[str, Any]]:
    """The blocks of a content that may also be a string; each has the fields of its type."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise illegal(where, content, "a string or a list of blocks")
    known = _BLOCKS[role]
    for i, block in enumerate(content):
        kind = block.get("type") if isinstance(block, dict) else None
        if not isinstance(kind, str) or kind not in known:
            raise illegal(f"{where}[{i}].type", kind, f"one of {', '.join(known)} in a message of {role}")
        keep_supported(block, known[kind], _CITATIONS, where=f"{where}[{i}].")
    return content


def _texts(content: Any, where: str) -> list[dict[str, Any]]:
    blocks = _blocks(content, "system", where)
    return [
        {"type": "text", "text": string(block, "text", f"{where}[{i}]")} for i, block in enumerate(blocks)
    ]


def _said(blocks: list[dict[str, Any]], role: str, where: str) -> list[dict[str, Any]]:
    """Text of the user or the system, and results of tools."""
    messages: list[dict[str, Any]] = []
    for i, block in enumerate(blocks):
        place = f"{where}[{i}]"
        if block["type"] == "tool_result":
            call_id = string(block, "tool_use_id", place)
            content = _texts(block.get("content") or "", f"{place}.content")
            messages.append({"role": "tool", "tool_call_id": call_id, "content": content})
            continue
        if not messages or messages[-1]["role"] != role:
            messages.append({"role": role, "content": []})
        messages[-1]["content"].append({"type": "text", "text": string(block, "text", place)})
    return messages


def _turn(blocks: list[dict[str, Any]], where: str) -> dict[str, Any]:
    """A message of the assistant: thinking, text and calls, each in its field."""
    thinking, text, calls = [], [], []
    for i, block in enumerate(blocks):
        place = f"{where}[{i}]"
        if block["type"] == "thinking":
            thinking.append(string(block, "thinking", place))
        elif block["type"] == "text":
            text.append(string(block, "text", place))
        else:
            if not isinstance(block.get("input"), dict):
                raise illegal(f"{place}.input", block.get("input"), "an object")
            function = {"name": string(block, "name", place), "arguments": block["input"]}
            calls.append({"id": string(block, "id", place), "type": "function", "function": function})
    turn: dict[str, Any] = {"role": "assistant", "content": "".join(text)}
    if thinking:
        turn["reasoning_content"] = "".join(thinking)
    return turn | ({"tool_calls": calls} if calls else {})
