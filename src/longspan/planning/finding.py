"""One point of the go-live list and how it came out."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Status = Literal["pass", "fail", "unknown"]
WRITE_AGAIN = "Write the scripts again with `longspan plan --output`."


@dataclass(frozen=True)
class Finding:
    where: str
    point: str
    status: Status
    found: str
    remedy: str = ""

    def as_json(self) -> dict[str, str]:
        return {key: str(value) for key, value in vars(self).items()}


def judge(where: str, point: str, good: bool, found: str, remedy: str) -> Finding:
    return Finding(where, point, "pass" if good else "fail", found, "" if good else remedy)


def by_script(faults: Iterable[tuple[str, str]]) -> list[str]:
    """Of (script, fault): a fault once, with all scripts that have it."""
    scripts: dict[str, list[str]] = {}
    for script, fault in faults:
        if script not in scripts.setdefault(fault, []):
            scripts[fault].append(script)
    return [f"{fault} in {', '.join(names)}" for fault, names in scripts.items()]


def judge_faults(where: str, point: str, faults: Iterable[str], fine: str, remedy: str) -> Finding:
    """Passes without faults, and then says `fine`."""
    text = "; ".join(dict.fromkeys(faults))
    return judge(where, point, not text, text or fine, remedy)
