"""Who does what: `plain` (every node both), or `4p4d` (so many nodes prefill, so many decode)."""

from __future__ import annotations

import re
from dataclasses import dataclass

from longspan.errors import CapacityError


@dataclass(frozen=True)
class Side:
    """Nodes of one role, which are one instance of the model."""

    role: str  # server, prefill or decode
    nodes: int


def parse_topology(text: str, nodes: int) -> tuple[Side, ...]:
    """Raises CapacityError if it is none, or needs another number of nodes."""
    if text == "plain":
        return (Side("server", nodes),)
    match = re.fullmatch(r"([1-9]\d*)p([1-9]\d*)d", text.lower())
    if not match:
        raise CapacityError(
            f"{text!r} is no topology.", remedy="Give plain, or prefill and decode nodes as in 4p4d."
        )
    prefill, decode = int(match[1]), int(match[2])
    if prefill + decode != nodes:
        raise CapacityError(
            f"{text} is {prefill + decode} nodes, but --nodes is {nodes}.",
            remedy=f"Give --nodes {prefill + decode}, or another topology.",
        )
    return Side("prefill", prefill), Side("decode", decode)
