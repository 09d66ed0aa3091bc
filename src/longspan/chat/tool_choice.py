"""What `tool_choice` asks of a chat with these tools, those declared in mid-conversation included."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from longspan.errors import RequestError


def forced_functions(
    tool_choice: str | dict[str, Any] | None, tools: Sequence[Any] | None, messages: Sequence[Any]
) -> list[str]:
    """Names of the functions of which one must be called; [] if the model decides or may call none.

    Raises RequestError for a choice that is not legal or names no declared function, and for a tool that is
    no function with a name.
    """
    names = _function_names(tools or (), "tools")
    for i, message in enumerate(messages):
        if isinstance(message, dict) and isinstance(message.get("tools"), list):
            names += _function_names(message["tools"], f"messages[{i}].tools")
    match tool_choice:
        case None | "auto" | "none":
            return []
        case "required" if names:
            return names
        case "required":
            what = '`tool_choice` is "required", but no tools are declared.'
            raise RequestError(what, param="tool_choice", remedy="Declare them in `tools`.")
        case {"type": "function", "function": {"name": str(name), **more}, **others} if not (more or others):
            pass
        case other:
            legal = 'Legal: "auto", "none", "required", {"type": "function", "function": {"name": ...}}.'
            raise RequestError(f"`tool_choice` is {other!r}.", param="tool_choice", remedy=legal)
    if name not in names:
        known = ", ".join(names) or "none"
        what = f"`tool_choice` names the function {name!r}, which is not declared."
        raise RequestError(what, param="tool_choice", remedy=f"Declared: {known}.")
    return [name]


def _function_names(tools: Sequence[Any], where: str) -> list[str]:
    """The declarations themselves are rendered verbatim."""
    names = []
    for i, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(name, str) or not name or tool.get("type", "function") != "function":
            remedy = 'Send {"type": "function", "function": {"name": ..., "parameters": ...}}.'
            raise RequestError("Tools are functions with a name.", param=f"{where}[{i}]", remedy=remedy)
        names.append(name)
    return names
