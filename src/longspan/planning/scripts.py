"""A launch script as data: what is exported and the commands with their flags, so that it can be checked."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Flag = tuple[str, str | tuple[str, ...] | None]
"""A flag and its value; a tuple is several words."""

HTTP_PORTS = {"server": 8000, "prefill": 8100, "decode": 8200}
ROUTER_PORT = 8080
_SUPERVISION = """\
# All servers end when this script is told to, or with the first that ends, whose exit code is the script's.
end_all() {
  code=$?
  trap - EXIT HUP INT TERM
  kill $(jobs -p) 2>/dev/null || true
  wait
  exit $code
}
trap end_all EXIT
trap 'exit 129' HUP
trap 'exit 130' INT
trap 'exit 143' TERM
"""
PLACEHOLDER_NETWORK = "192.0.2."  # set aside for documentation by RFC 5737: no such host answers


@dataclass(frozen=True)
class Command:
    """One process. Words that begin with $ are left for the shell to fill in."""

    head: tuple[str, ...]
    flags: tuple[Flag, ...]
    variables: Mapping[str, str] = field(default_factory=dict)  # of this process alone

    def text(self, prefix: str = "", suffix: str = "") -> str:
        own = "".join(f"{name}={_quoted(value)} " for name, value in self.variables.items())
        lines = [own + prefix + " ".join(_quoted(word) for word in self.head)]
        lines += ["    " + " ".join([flag, *map(_quoted, _words(value))]) for flag, value in self.flags]
        return " \\\n".join(lines) + suffix


@dataclass(frozen=True)
class Script:
    """One file: all processes of one node, or a router."""

    name: str
    role: str  # server, prefill, decode or router
    comment: str
    commands: tuple[Command, ...]
    variables: Mapping[str, str] = field(default_factory=dict)
    urls: tuple[str, ...] = ()  # where its processes answer over HTTP

    def text(self) -> str:
        lines = [
            "#!/usr/bin/env bash",
            *(f"# {line}" for line in self.comment.splitlines()),
            "set -euo pipefail",
        ]
        lines += [f"export {name}={_quoted(value)}" for name, value in self.variables.items()]
        lines.append("")
        if len(self.commands) == 1:
            lines.append(self.commands[0].text(prefix="exec "))
        else:
            lines.append(_SUPERVISION)
            lines += [command.text(suffix=" &") for command in self.commands]
            lines.append("wait -n")
        return "\n".join(lines) + "\n"

    @property
    def flags(self) -> list[Flag]:
        return [flag for command in self.commands for flag in command.flags]


class _Ready(str):
    """A word as the shell needs it."""


def or_default(name: str, value: str) -> str:
    """The variable as the user set it, or `value`, whatever that contains."""
    return _Ready(f"${{{name}:-{shlex.quote(value)}}}")


def packed(value: Any) -> str:
    """JSON for one argument of a command line."""
    return json.dumps(value, separators=(",", ":"))


def host_names(sides: Sequence[tuple[str, int]], hosts: Sequence[str]) -> dict[str, list[str]]:
    """{role: addresses}, in the order given; placeholders where none were."""
    total = sum(count for _, count in sides)
    given = list(hosts) or [f"{PLACEHOLDER_NETWORK}{n + 1}" for n in range(total)]
    named, start = {}, 0
    for role, count in sides:
        named[role] = given[start : start + count]
        start += count
    return named


def _words(value: str | tuple[str, ...] | None) -> tuple[str, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, str) else value


def _quoted(word: str) -> str:
    """As the shell needs it; variables stay variables."""
    if isinstance(word, _Ready):
        return word
    return f'"{word}"' if "$" in word else shlex.quote(word)
