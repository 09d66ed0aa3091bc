"""Whether and how much to think, from the several places where clients say so."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from longspan.chat import DEFAULT_EFFORT, EFFORTS
from longspan.errors import RequestError


@dataclass(frozen=True)
class ThinkingOptions:
    """What the request says about thinking; effort None when thinking is off."""

    enabled: bool
    effort: str | None


DEFAULT = ThinkingOptions(enabled=True, effort=DEFAULT_EFFORT)
OFF = ThinkingOptions(enabled=False, effort=None)


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
        return OFF
    return ThinkingOptions(enabled=True, effort=next(iter(efforts.values()), DEFAULT_EFFORT))


def _moonshot_switch(thinking: dict[str, Any] | bool) -> bool:
    if isinstance(thinking, bool):
        return thinking
    switch = {"enabled": True, "disabled": False}.get(str(thinking.get("type")))
    if switch is None or set(thinking) != {"type"}:
        remedy = 'Send {"type": "enabled"} or {"type": "disabled"}.'
        raise RequestError(f"`thinking` is {thinking!r}.", param="thinking", remedy=remedy)
    return switch
