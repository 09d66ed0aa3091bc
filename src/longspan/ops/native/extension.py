"""Which extension module computes: the best one that is built and that this processor can run."""

from __future__ import annotations

import importlib
import importlib.util
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
    built, broken = _modules()
    wanted = os.environ.get(ISA_VARIABLE)
    runs = next(iter(built.values())).supported() if built else []
    usable = [isa for isa in built if isa in runs]
    if wanted and wanted not in usable:
        raise ConfigError(
            f"{ISA_VARIABLE} is {wanted!r}; {_found(built, broken)}, "
            f"this processor runs {', '.join(runs) or 'none of them'}.",
            remedy=f"Legal here: {', '.join(usable) or 'none'}.",
        )
    if wanted:
        return Choice(built[wanted], wanted, f"{ISA_VARIABLE} asks for it")
    if not usable:
        return Choice(None, None, _found(built, broken))
    best = usable[-1]
    return Choice(built[best], best, f"the best of {', '.join(usable)} that this processor runs")


def built_for() -> list[str]:
    """Instruction sets whose modules can be loaded."""
    return list(_modules()[0])


def _found(built: dict[str, ModuleType], broken: dict[str, str]) -> str:
    if not built and not broken:
        return "this installation has no native operators: it found no C++ compiler"
    told = [f"built are {', '.join(built)}"] if built else []
    return "; ".join(told + [f"the module for {isa} does not load: {why}" for isa, why in broken.items()])


def _modules() -> tuple[dict[str, ModuleType], dict[str, str]]:
    """The modules that load, and why others don't."""
    built: dict[str, ModuleType] = {}
    broken: dict[str, str] = {}
    for isa in ISAS:
        name = f"longspan._native_{isa}"
        if importlib.util.find_spec(name) is None:
            continue
        try:
            built[isa] = importlib.import_module(name)
        except ImportError as error:
            broken[isa] = str(error)
    return built, broken


def extension() -> Any:
    """The module chosen; only for code that runs when there is one."""
    module = choose().module
    assert module is not None
    return module
