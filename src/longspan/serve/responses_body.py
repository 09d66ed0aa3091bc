"""The body of /v1/responses, and its input items as the messages of a chat.

An assistant's turn comes as several items: its reasoning, its text, its calls. They make one message, in that
order; an item that can't follow in it begins the next.
"""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import Field

from longspan.engine.request import MAX_STOPS
from longspan.errors import RequestError
from longspan.serve.body import CallBody, FastList, Refused, illegal, keep_supported, string
from longspan.serve.failures import in_words_of
from longspan.serve.prompts import Chat
from longspan.serve.thinking import thinking_options

_STATELESS = Refused("Nothing is stored: send all items of the conversation in `input`.")
_HARMLESS_INCLUDES = {"reasoning.encrypted_content"}  # ours is not encrypted, and always included
_BY_TYPE: dict[str, set[str]] = {
    "message": {"type", "role", "content", "id", "status", "phase"},
    "reasoning": {"type", "id", "summary", "content", "encrypted_content", "status"},
    "function_call": {"type", "id", "call_id", "name", "arguments", "status"},
    "function_call_output": {"type", "id", "call_id", "output", "status"},
}
_PART = {"type", "text", "refusal", "annotations", "logprobs"}
_TOOL = {"type", "name", "description", "parameters", "strict"}
_NAMES = {
    "max_tokens": "max_output_tokens",
    "messages": "input",
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}
_FORMAT = {"json_schema": {"type", "name", "description", "schema", "strict"}, "json_object": {"type"}}


class ResponsesRequest(CallBody):
    """POST /v1/responses."""

    refused: ClassVar[dict[str, Refused]] = {
        "previous_response_id": _STATELESS,
        "conversation": _STATELESS,
        "prompt": _STATELESS,
        "store": Refused("Nothing is stored: leave it out or send false.", (False,)),
        "background": Refused("Responses are made while the client waits.", (False,)),
        "truncation": Refused("Input is never cut: shorten it before sending it.", ("disabled",)),
        "context_management": Refused("Input is never cut or summarised; leave it out.", ([],)),
        "service_tier": Refused('There is one tier: send "auto" or "default".', ("auto", "default")),
        "max_tool_calls": Refused("It limits built-in tools, and there are none; leave it out."),
        "top_logprobs": Refused("Log-probabilities are given by /v1/chat/completions.", (0,)),
        "max_tokens": Refused("Here it is called `max_output_tokens`."),
        "response_format": Refused("Here it is called `text.format`."),
        "reasoning_effort": Refused("Here it is called `reasoning.effort`."),
        "messages": Refused("Here it is called `input`."),
        "n": Refused("There is one answer to a request.", (1,)),
    }

    input: str | list[Any]
    instructions: str | None = None
    tools: FastList[dict[str, Any]] = Field(default_factory=list)
    tool_choice: str | dict[str, Any] = "auto"
    parallel_tool_calls: bool = True
    max_output_tokens: int | None = None
    text: dict[str, Any] = Field(default_factory=dict)
    reasoning: dict[str, Any] = Field(default_factory=dict)
    include: FastList[str] = Field(default_factory=list)
    stream_options: dict[str, Any] = Field(default_factory=dict)
    stop: FastList[str] = Field(default_factory=list, max_length=MAX_STOPS)

    def sampling(self) -> dict[str, Any]:
        given = super().sampling()
        return given if self.max_output_tokens is None else given | {"max_tokens": self.max_output_tokens}

    def chat(self) -> tuple[Chat, dict[str, str]]:
        """The chat, and the names that its fields have here. Raises RequestError naming what is wrong."""
        for i, name in enumerate(self.include):
            if name not in _HARMLESS_INCLUDES:
                remedy = f"It takes: {', '.join(_HARMLESS_INCLUDES)}."
                raise RequestError(f"`include[{i}]` is {name[:80]!r}.", param=f"include[{i}]", remedy=remedy)
        options = {"include_obfuscation": Refused("Leave it out or send false.", (False,))}
        keep_supported(self.stream_options, (), options, where="stream_options.")
        messages, places = _messages(self.input)
        if self.instructions:
            messages.insert(0, {"role": "system", "content": self.instructions})
            places.insert(0, "instructions")
        with in_words_of(_NAMES):
            thinking = thinking_options(_effort(self.reasoning), None, None)
        chat = Chat(
            messages=messages,
            tools=[_tool(tool, f"tools[{i}]") for i, tool in enumerate(self.tools)] or None,
            tool_choice=_tool_choice(self.tool_choice),
            parallel_tool_calls=self.parallel_tool_calls,
            response_format=_response_format(self.text),
            thinking=thinking,
        )
        return chat, _NAMES | {f"messages[{i}]": place for i, place in enumerate(places)}


def _effort(reasoning: dict[str, Any]) -> str | None:
    whole = Refused("Reasoning is given as it is, not summarised; leave it out.", ("auto",))
    refused = {"summary": whole, "generate_summary": whole}
    effort = keep_supported(reasoning, ("effort",), refused, where="reasoning.").get("effort")
    if not isinstance(effort, str | None):
        raise illegal("reasoning.effort", effort, "a string")
    return effort


def _response_format(text: dict[str, Any]) -> dict[str, Any] | None:
    """`text.format` as the `response_format` of a chat."""
    verbosity = {"verbosity": Refused('Only "medium", which changes nothing, is accepted.', ("medium",))}
    wanted = keep_supported(text, ("format",), verbosity, where="text.").get("format", {"type": "text"})
    kind = wanted.get("type") if isinstance(wanted, dict) else None
    if kind == "text":
        return None
    if not isinstance(kind, str) or kind not in _FORMAT:
        raise illegal("text.format", kind, "of the type text, json_object or json_schema")
    fields = keep_supported(wanted, _FORMAT[kind], {}, where="text.format.")
    del fields["type"]
    return {"type": kind} | ({"json_schema": fields} if kind == "json_schema" else {})


def _tool(tool: dict[str, Any], where: str) -> dict[str, Any]:
    """A declaration as a chat has it: name and parameters one level deeper."""
    if tool.get("type") != "function":
        raise illegal(f"{where}.type", tool.get("type"), '"function"; there are no built-in tools')
    fields = keep_supported(tool, _TOOL, {}, where=f"{where}.")
    del fields["type"]
    return {"type": "function", "function": fields}


def _tool_choice(choice: str | dict[str, Any]) -> str | dict[str, Any]:
    match choice:
        case {"type": "function", "name": str(name), **others} if not others:
            return {"type": "function", "function": {"name": name}}
        case "auto" | "none" | "required":
            return choice
    raise illegal("tool_choice", choice, '"auto", "none", "required" or {"type": "function", "name": ...}')


def _messages(items: str | list[Any]) -> tuple[list[dict[str, Any]], list[str]]:
    """The messages, and where in the body each of them begins."""
    if isinstance(items, str):
        return [{"role": "user", "content": items}], ["input"]
    messages: list[dict[str, Any]] = []
    places: list[str] = []
    for i, item in enumerate(items):
        where = f"input[{i}]"
        if not isinstance(item, dict):
            raise illegal(where, item, "an object")
        kind = item.get("type") or "message"
        if not isinstance(kind, str) or kind not in _BY_TYPE:
            raise illegal(f"{where}.type", kind, f"one of {', '.join(_BY_TYPE)}")
        item = keep_supported(item, _BY_TYPE[kind], {}, where=f"{where}.")
        if kind == "function_call_output":
            messages.append(_result(item, where))
        elif kind == "message" and item.get("role") != "assistant":
            messages.append(_plain(item, where))
        else:
            _add_to_turn(messages, kind, item, where)
        places += [where] * (len(messages) - len(places))
    return messages, places


def _plain(item: dict[str, Any], where: str) -> dict[str, Any]:
    if item.get("role") not in ("user", "system", "developer"):
        raise illegal(f"{where}.role", item.get("role"), "user, assistant, system or developer")
    return {"role": item["role"], "content": _content(item.get("content"), f"{where}.content")}


def _result(item: dict[str, Any], where: str) -> dict[str, Any]:
    call_id = string(item, "call_id", where)
    return {
        "role": "tool",
        "tool_call_id": call_id,
        "content": _content(item.get("output"), f"{where}.output"),
    }


def _add_to_turn(messages: list[dict[str, Any]], kind: str, item: dict[str, Any], where: str) -> None:
    """Adds an item of the assistant to the last message if it can follow in it, or begins one."""
    place = ("reasoning", "message", "function_call").index(kind)
    fields = ("reasoning_content", "content", "tool_calls")
    taken = fields[place:] if kind != "function_call" else ()
    if not messages or messages[-1]["role"] != "assistant" or any(name in messages[-1] for name in taken):
        messages.append({"role": "assistant"})
    turn = messages[-1]
    if kind == "reasoning":
        turn["reasoning_content"] = _reasoning(item, where)
    elif kind == "message":
        turn["content"] = _content(item.get("content"), f"{where}.content")
    else:
        function = {"name": string(item, "name", where), "arguments": string(item, "arguments", where)}
        call = {"id": string(item, "call_id", where), "type": "function", "function": function}
        turn.setdefault("tool_calls", []).append(call)


def _reasoning(item: dict[str, Any], where: str) -> str:
    """The reasoning itself, or else its summary."""
    parts = item.get("content") or item.get("summary") or []
    if not isinstance(parts, list) or not all(
        isinstance(part, dict) and isinstance(part.get("text"), str) for part in parts
    ):
        raise illegal(f"{where}.content", parts, "a list of parts with a text")
    if not parts and item.get("encrypted_content"):
        what = f"`{where}.encrypted_content` is reasoning that can't be read here."
        raise RequestError(what, param=f"{where}.encrypted_content", remedy="Leave the item out.")
    return "".join(part["text"] for part in parts)


def _content(content: Any, where: str) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise illegal(where, content, "a string or a list of parts")
    parts = []
    for i, part in enumerate(content):
        place = f"{where}[{i}]"
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in ("input_text", "output_text", "refusal"):
            raise illegal(f"{place}.type", kind, "input_text, output_text or refusal: input is text")
        keep_supported(part, _PART, {}, where=f"{place}.")
        name = "refusal" if kind == "refusal" else "text"
        parts.append({"type": "text", "text": string(part, name, place)})
    return parts
