"""A directory of launch scripts read back, as they are now: somebody may have edited them."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longspan.errors import ConfigError
from longspan.planning.hardware import ENGINES

PLAN_FILE = "plan.json"
ROLES = ("server", "prefill", "decode")
_FIELDS = {
    "engine": str,
    "family": str,
    "scheme": str,
    "context": int,
    "topology": str,
    "hardware": dict,
    "sides": list,
    "urls": dict,
}
_SHORT = {
    "-tp": "--tensor-parallel-size",
    "-dp": "--data-parallel-size",
    "-dpn": "--data-parallel-rank",
    "-dcp": "--decode-context-parallel-size",
    "-ep": "--enable-expert-parallel",
}


@dataclass(frozen=True)
class Process:
    """One command of a script."""

    script: str
    role: str
    flags: dict[str, list[str]]

    def value(self, *names: str) -> str | None:
        """Of the first of these flags that is there."""
        for name in names:
            if name in self.flags:
                return " ".join(self.flags[name])
        return None

    def number(self, *names: str, default: int = 1) -> int:
        value = self.value(*names)
        return int(value) if value and value.isdecimal() else default

    def json(self, name: str) -> dict[str, Any]:
        try:
            value = json.loads(self.value(name) or "{}")
        except ValueError:
            return {}
        return value if isinstance(value, dict) else {}


@dataclass(frozen=True)
class Launch:
    """All scripts of one engine, and the plan they were made from."""

    directory: Path
    plan: dict[str, Any]
    processes: tuple[Process, ...]
    routers: dict[str, str]  # name -> text, files they read included

    @property
    def engine(self) -> str:
        return self.plan["engine"]

    def of_role(self, role: str) -> list[Process]:
        return [process for process in self.processes if process.role == role]


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
    try:
        plan = json.loads((directory / PLAN_FILE).read_text())
    except ValueError:
        plan = None
    wrong = _faults(plan)
    if wrong or plan is None:
        raise ConfigError(
            f"{directory / PLAN_FILE} is no plan: it lacks {', '.join(wrong)}, or has something else there.",
            remedy="Write it again with `longspan plan --output`.",
        )
    processes, routers = [], {}
    for path in sorted(directory.glob("*.sh")):
        role = path.stem.split("-")[0]
        if role in ROLES:
            processes += [Process(path.name, role, flags) for flags in _commands(path.read_text())]
        else:
            routers[path.name] = path.read_text()
    workers = directory / "workers.json"
    for name, text in routers.items():
        if "--discovery-file" in text and workers.is_file():
            routers[name] = text + workers.read_text()
    return Launch(directory, plan, tuple(processes), routers)


def _faults(plan: Any) -> list[str]:
    """Fields that are not what `plan --output` writes."""
    if not isinstance(plan, dict):
        return list(_FIELDS)
    wrong = [field for field, kind in _FIELDS.items() if not isinstance(plan.get(field), kind)]
    if wrong:
        return wrong
    if plan["engine"] not in ENGINES:
        wrong.append("engine")
    if "name" not in plan["hardware"]:
        wrong.append("hardware")
    if not all(isinstance(side, dict) and {"role", "nodes", "split"} <= set(side) for side in plan["sides"]):
        wrong.append("sides")
    if not all(isinstance(urls, list) for urls in plan["urls"].values()):
        wrong.append("urls")
    return wrong


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
