"""What a server asks of chat messages and template options beyond what `longspan.chat` needs to render them.

The structure of messages is checked by `longspan.chat`. Here fields are looked at by name, because one that
is mistyped or not supported would silently vanish from the prompt.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Any

from longspan.chat.render import DEFAULT_EFFORT, EFFORTS
from longspan.errors import RequestError

_PLAIN = {"role", "content", "name"}
_FIELDS = {
    "system": _PLAIN | {"tools"},
    "developer": _PLAIN | {"tools"},
    "user": _PLAIN,
    "assistant": _PLAIN | {"reasoning_content", "reasoning", "tool_calls"},
    "tool": _PLAIN | {"tool", "tool_call_id", "id"},
}
# An SDK sends a reply back as it dumped it, with these fields empty.
_EMPTY_WHEN_DUMPED = {"refusal", "audio", "function_call", "annotations"}


def check_messages(messages: list[Any]) -> list[Any]:
    """The messages, if no field in them would be ignored. Raises RequestError naming the field."""
    if not messages:
        raise RequestError("`messages` is empty.", param="messages", remedy="Send at least one message.")
    for i, message in enumerate(messages):
        role = message.get("role") if isinstance(message, dict) else None
        if isinstance(role, str) and role in _FIELDS:
            _check_fields(message, f"messages[{i}]")
    return messages


def _check_fields(message: dict[str, Any], where: str) -> None:
    role = message["role"]
    known = _FIELDS[role]
    for name, value in message.items():
        if name in known or value is None or (name in _EMPTY_WHEN_DUMPED and not value):
            continue
        close = difflib.get_close_matches(name, known, n=1, cutoff=0.7)
        remedy = f"Did you mean `{close[0]}`?" if close else f"It has: {', '.join(sorted(known))}."
        what = f"A message of role {role} has no field `{name}` here."
        raise RequestError(what, param=f"{where}.{name}", remedy=remedy)
    if message.get("content") is None and role != "assistant" and not message.get("tools"):
        what = f"`{where}.content` is missing."
        raise RequestError(what, param=f"{where}.content", remedy="Send a string or a list of text parts.")


@dataclass(frozen=True)
class ThinkingOptions:
    """What the request says about thinking; effort None when thinking is off."""

    enabled: bool
    effort: str | None


def thinking_options(
    reasoning_effort: str | None, thinking: dict[str, Any] | bool | None, template: dict[str, Any] | None
) -> ThinkingOptions:
    """One answer from where clients ask: OpenAI's field, Moonshot's and those of the chat template.

    Thinking is on with the vendor's default effort when nothing is said. Contradictions are errors.
    """
    said: dict[str, bool] = {}
    efforts: dict[str, str] = {}
    if reasoning_effort == "none":
        said["reasoning_effort"] = False
    elif reasoning_effort is not None:
        efforts["reasoning_effort"] = reasoning_effort
    if thinking is not None:
        said["thinking"] = _moonshot_switch(thinking)
    for name, value in (template or {}).items():
        where = f"chat_template_kwargs.{name}"
        if name in ("thinking", "enable_thinking"):
            if not isinstance(value, bool):
                raise RequestError(f"`{where}` is {value!r}.", param=where, remedy="Send true or false.")
            said[where] = value
        elif name == "thinking_effort":
            efforts[where] = value
        else:
            remedy = "It takes: thinking, enable_thinking, thinking_effort."
            raise RequestError(f"Unknown field `{where}`.", param=where, remedy=remedy)

    for where, effort in efforts.items():
        if effort not in EFFORTS:
            legal = ", ".join(EFFORTS) + (" or none" if where == "reasoning_effort" else "")
            raise RequestError(f"`{where}` is {effort!r}.", param=where, remedy=f"Legal values: {legal}.")
    if len(set(said.values())) > 1 or len(set(efforts.values())) > 1 or (efforts and False in said.values()):
        fields = [*said, *efforts]
        what = f"{' and '.join(f'`{field}`' for field in fields)} contradict each other."
        raise RequestError(what, param=fields[0], remedy="Send one of them.")
    if False in said.values():
        return ThinkingOptions(enabled=False, effort=None)
    return ThinkingOptions(enabled=True, effort=next(iter(efforts.values()), DEFAULT_EFFORT))


def _moonshot_switch(thinking: dict[str, Any] | bool) -> bool:
    if isinstance(thinking, bool):
        return thinking
    switch = {"enabled": True, "disabled": False}.get(str(thinking.get("type")))
    if switch is None or set(thinking) != {"type"}:
        remedy = 'Send {"type": "enabled"} or {"type": "disabled"}.'
        raise RequestError(f"`thinking` is {thinking!r}.", param="thinking", remedy=remedy)
    return switch
