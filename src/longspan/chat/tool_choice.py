"""The functions that a chat may call, those declared in mid-conversation included, and those it must."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from longspan.errors import RequestError


@dataclass(frozen=True)
class Function:
    """A declared function. `parameters` is its JSON schema, None if it takes no arguments."""

    name: str
    parameters: Any
    strict: bool  # calls must satisfy the schema even where the model decides whether to call
    where: str  # in the request


def declared_functions(tools: Sequence[Any] | None, messages: Sequence[Any]) -> list[Function]:
    """One for each name: a later declaration replaces an earlier one.

    Raises RequestError for a tool that is no function with a name. The declarations themselves are rendered
    verbatim.
    """
    functions = _functions(tools or (), "tools")
    for i, message in enumerate(messages):
        if isinstance(message, dict) and isinstance(message.get("tools"), list):
            functions += _functions(message["tools"], f"messages[{i}].tools")
    return list({function.name: function for function in functions}.values())


def forced_functions(
    tool_choice: str | dict[str, Any] | None, functions: Sequence[Function]
) -> list[Function]:
    """Those of which one must be called; [] if the model decides or may call none.

    Raises RequestError for a choice that is not legal or names no declared function.
    """
    match tool_choice:
        case None | "auto" | "none":
            return []
        case "required" if functions:
            return list(functions)
        case "required":
            what = '`tool_choice` is "required", but no tools are declared.'
            raise RequestError(what, param="tool_choice", remedy="Declare them in `tools`.")
        case {"type": "function", "function": {"name": str(name), **more}, **others} if not (more or others):
            pass
        case other:
            legal = 'Legal: "auto", "none", "required", {"type": "function", "function": {"name": ...}}.'
            raise RequestError(f"`tool_choice` is {other!r}.", param="tool_choice", remedy=legal)
    named = [function for function in functions if function.name == name]
    if not named:
        known = ", ".join(function.name for function in functions) or "none"
        what = f"`tool_choice` names the function {name!r}, which is not declared."
        raise RequestError(what, param="tool_choice", remedy=f"Declared: {known}.")
    return named


def _functions(tools: Sequence[Any], where: str) -> list[Function]:
    functions = []
    for i, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) else None
        function = function if isinstance(function, dict) else {}
        name = function.get("name")
        if not isinstance(name, str) or not name or tool.get("type", "function") != "function":
            remedy = 'Send {"type": "function", "function": {"name": ..., "parameters": ...}}.'
            raise RequestError("Tools are functions with a name.", param=f"{where}[{i}]", remedy=remedy)
        strict, parameters = function.get("strict") is True, function.get("parameters")
        functions.append(Function(name, parameters, strict, f"{where}[{i}].function"))
    return functions
