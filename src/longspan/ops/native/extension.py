"""Which extension module computes: the best one that is built and that this processor can run."""

from __future__ import annotations

import importlib
import os
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any

from longspan.errors import ConfigError

ISA_VARIABLE = "LONGSPAN_ISA"
ISAS = ("portable", "avx2", "avx512")  # best last


@dataclass(frozen=True)
class Choice:
    """`module` None: there are no native operators here. `reason` says why, in one line."""

    module: ModuleType | None
    isa: str | None
    reason: str


@cache
def choose() -> Choice:
    """The choice of this process. ConfigError if LONGSPAN_ISA asks for what can't be had."""
    built = {isa: module for isa in ISAS if (module := _import(isa)) is not None}
    if not built:
        return Choice(None, None, "this installation has no native operators: it found no C++ compiler")
    runs = next(iter(built.values())).supported()
    usable = [isa for isa in built if isa in runs]
    wanted = os.environ.get(ISA_VARIABLE)
    if wanted:
        if wanted not in usable:
            raise ConfigError(
                f"{ISA_VARIABLE} is {wanted!r}; built are {', '.join(built)}, "
                f"this processor runs {', '.join(runs)}.",
                remedy=f"Legal here: {', '.join(usable) or 'none'}.",
            )
        return Choice(built[wanted], wanted, f"{ISA_VARIABLE} asks for it")
    if not usable:
        return Choice(None, None, f"built are {', '.join(built)}, this processor runs {', '.join(runs)}")
    best = usable[-1]
    return Choice(built[best], best, f"the best of {', '.join(usable)} that this processor runs")


def is_built(isa: str) -> bool:
    return _import(isa) is not None


def _import(isa: str) -> ModuleType | None:
    try:
        return importlib.import_module(f"longspan._native_{isa}")
    except ImportError:
        return None


def extension() -> Any:
    """The module chosen; only for code that runs when there is one."""
    module = choose().module
    assert module is not None
    return module
