"""What plans must know of an engine, from engines.toml: how it keeps memory, what it can't do, its flags."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any


@dataclass(frozen=True)
class Engine:
    """`flags` and `variables` are all that scripts for it may say."""

    name: str
    title: str
    indexes_whole: bool
    vision: bool
    source: str
    flags: tuple[str, ...]
    variables: tuple[str, ...]
    notes: tuple[str, ...]
    page_tokens: int | None = None  # None: as our plugin chooses, where blocks hold pages or states
    even_experts: bool = False  # every rank must have as many
    split_dcp_whole: bool = False  # in a prefill/decode split DCP is 1 or TP
    without_sparse_dcp: Mapping[str, str] = field(default_factory=dict)  # hardware -> why


@cache
def _read() -> dict[str, dict[str, Any]]:
    return tomllib.loads(files("longspan.planning").joinpath("engines.toml").read_text())


def load_engine(name: str) -> Engine:
    table = _read()[name]
    lists = {key: tuple(table[key]) for key in ("flags", "variables", "notes")}
    values: dict[str, Any] = table | lists
    return Engine(name=name, **values)


def router_flags() -> tuple[str, ...]:
    return tuple(_read()["routers"]["flags"])
