"""A directory of launch scripts read back, as they are now: somebody may have edited them."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longspan.errors import ConfigError
from longspan.planning.plan_file import PLAN_FILE, WRITE_IT_AGAIN, PlanFile, read_plan, role_of

ROLES = ("server", "prefill", "decode")
_SHORT = {
    "-tp": "--tensor-parallel-size",
    "-dp": "--data-parallel-size",
    "-dpn": "--data-parallel-rank",
    "-dpl": "--data-parallel-size-local",
    "-dpa": "--data-parallel-address",
    "-dpp": "--data-parallel-rpc-port",
    "-dcp": "--decode-context-parallel-size",
    "-ep": "--enable-expert-parallel",
}
_SUFFIXES = {"": 1} | {
    letter: size
    for power, small in enumerate("kmgt", start=1)
    for letter, size in ((small, 1000**power), (small.upper(), 1024**power))
}


def whole_number(text: str) -> int | None:
    """As vLLM reads sizes: 64k is 64,000, 64K is 65,536, 25.6k is 25,600; None if it is none."""
    match = re.fullmatch(r"([0-9]{1,15})(\.[0-9]{1,15})?([kmgtKMGT]?)", text)
    if not match or (match[2] and not match[3].islower()):
        return None
    if match[2]:
        return int(float(match[1] + match[2]) * _SUFFIXES[match[3]])
    return int(match[1]) * _SUFFIXES[match[3]]


@dataclass(frozen=True)
class Process:
    """One command of a script."""

    script: str
    role: str
    flags: dict[str, list[str]]
    variables: dict[str, str]  # of its script

    def value(self, *names: str) -> str | None:
        """Of the first of these flags that is there."""
        for name in names:
            if name in self.flags:
                return " ".join(self.flags[name])
        return None

    def number(self, *names: str, default: int = 1) -> int:
        """`default` also for what is no number; that is found by itself (`values`)."""
        value = whole_number(self.value(*names) or "")
        return default if value is None else value

    def json(self, name: str) -> dict[str, Any]:
        try:
            value = json.loads(self.value(name) or "{}")
        except (ValueError, RecursionError):
            return {}
        return value if isinstance(value, dict) else {}


@dataclass(frozen=True)
class Router:
    """A script of a router, and the file it learns servers from, if it does."""

    name: str
    program: str  # "" if it is none that is known
    flags: dict[str, list[str]]
    discovery: Path | None


@dataclass(frozen=True)
class Launch:
    """All scripts of one engine, and the plan they were made from."""

    directory: Path
    plan: PlanFile
    processes: tuple[Process, ...]
    routers: tuple[Router, ...]
    strangers: tuple[str, ...]  # scripts that are not of this plan

    def of_role(self, role: str) -> list[Process]:
        return [process for process in self.processes if process.role == role]


def scripts_of(processes: Iterable[Process]) -> str:
    return ", ".join(sorted({process.script for process in processes}))


def find_launches(directory: Path) -> list[Launch]:
    """In it, or in its folders. Raises ConfigError if there are none."""
    places = [directory, *sorted(path for path in directory.iterdir() if path.is_dir())]
    found = [_read(place) for place in places if (place / PLAN_FILE).is_file()]
    if not found:
        raise ConfigError(
            f"{directory} has no {PLAN_FILE}, nor has a folder of it.",
            remedy="Give a directory that `longspan plan --output` wrote.",
        )
    return found


def _read(directory: Path) -> Launch:
    plan = read_plan(directory / PLAN_FILE)
    processes: list[Process] = []
    routers: list[Router] = []
    strangers: list[str] = []
    for path in sorted(directory.glob("*.sh")):
        if path.name in plan.urls:
            text = _text(path)
            variables = _variables(text)
            processes += [
                Process(path.name, role_of(path.name), flags, variables) for flags in _commands(text)
            ]
        elif path.stem.split("-")[0] == "router":
            routers.append(_router(path))
        else:
            strangers.append(path.name)
    return Launch(directory, plan, tuple(processes), tuple(routers), tuple(strangers))


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path} is not UTF-8: {error.reason} at byte {error.start}.",
            remedy=WRITE_IT_AGAIN,
        ) from None


def _router(path: Path) -> Router:
    text = re.sub(r"^\s*#.*\n", "", _text(path), flags=re.M)
    flags = next(iter(_commands(text)), {})
    program = re.search(r"vllm-router|sglang_router|load_balance_proxy|smg", text)
    file = " ".join(flags.get("--discovery-file", ()))
    place = path.parent / file.replace("$(dirname $0)", str(path.parent.absolute())) if file else None
    return Router(path.name, program[0] if program else "", flags, place)


def _variables(text: str) -> dict[str, str]:
    """What a script sets before its servers start, as it is written there."""
    lines = re.findall(r"^(?:export )?([A-Z][A-Z0-9_]*)=(\S*)", text, flags=re.M)
    return {name: value.strip("'\"") for name, value in lines}


def _commands(text: str) -> list[dict[str, list[str]]]:
    """{flag: values} of every command that has flags. vLLM takes underscores for hyphens, and short names."""
    found = []
    for line in re.sub(r"\\\n", " ", text).splitlines():
        if " --" not in line or line.lstrip().startswith(("#", "export ")):
            continue
        try:
            words = shlex.split(line, comments=True)
        except ValueError:
            continue
        flags: dict[str, list[str]] = {}
        current: list[str] = []
        for word in words:
            if word.startswith("--") or word in _SHORT:
                name, _, value = word.partition("=")
                current = flags.setdefault(_SHORT.get(name, name.replace("_", "-")), [])
                current += [value] if value else []
            elif flags and word != "&":
                current.append(word)
        found.append(flags)
    return found
