"""What a machine has, as hardware.toml or a file of the user's own says; its form is described there.

Every number carries where it was read, or the assumption behind it. What does not fit the form is an error
that names the table, what was found and what was expected.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from math import inf
from pathlib import Path
from typing import Any

from longspan.errors import CapacityError, ConfigError
from longspan.planning.schemes import SCHEMES

ENGINES = ("longspan", "vllm-ascend", "sglang")
_ENGINES_OF = {"cpu": ("longspan",), "cuda": ("longspan", "sglang"), "ascend": ENGINES}
FAMILIES = ("kimi-linear", "k3", "k3.1")
GIB = 2**30


@dataclass(frozen=True)
class Number:
    """A figure and why it is believed. `assumed`: nobody published it."""

    value: float
    reason: str
    assumed: bool


@dataclass(frozen=True)
class Refusal:
    """A family of models that a machine must not be planned for."""

    why: str
    instead: str
    source: str


@dataclass(frozen=True)
class Hardware:
    """One kind of node. Rates are in 10^9 bytes a second and device."""

    name: str
    title: str
    kind: str
    engines: tuple[str, ...]
    devices_per_node: Number
    memory_gib: Number
    memory_gb_s: Number
    link_gb_s: Number
    network_gb_s: Number
    usable: Number
    schemes: Mapping[str, str]  # scheme -> what it is on this machine
    refused: Mapping[str, Refusal]  # family -> why

    @property
    def devices(self) -> int:
        return int(self.devices_per_node.value)

    @property
    def memory_bytes(self) -> int:
        return int(self.memory_gib.value * GIB)

    @property
    def reserve_bytes(self) -> int:
        """What an engine leaves to the runtime: graphs, buffers of collectives, fragmentation."""
        return self.memory_bytes - int(self.memory_bytes * self.usable.value)

    @property
    def numbers(self) -> dict[str, Number]:
        return {name: getattr(self, name) for name in _NUMBERS}

    def require(self, family: str, scheme: str) -> None:
        """Raises CapacityError if this family or these weights are not for this machine."""
        if family in self.refused:
            refusal = self.refused[family]
            raise CapacityError(
                f"{self.title} is not planned for {family}: {refusal.why} ({refusal.source}).",
                remedy=f"Choose --hardware {refusal.instead}.",
            )
        if scheme not in self.schemes:
            raise CapacityError(
                f"{self.title} has no scheme {scheme!r}: its arithmetic or its engines lack it.",
                remedy=f"Choose --scheme {' or '.join(self.schemes)}.",
            )


_NUMBERS = ("devices_per_node", "memory_gib", "memory_gb_s", "link_gb_s", "network_gb_s", "usable")


def bundled() -> dict[str, Hardware]:
    """{name: hardware} that the package knows."""
    text = files("longspan.planning").joinpath("hardware.toml").read_text()
    return _parse(tomllib.loads(text), "hardware.toml")


def load_hardware(name: str) -> Hardware:
    """A bundled name, or a TOML file with one table of the same form. Raises ConfigError."""
    known = bundled()
    if name in known:
        return known[name]
    path = Path(name)
    if not path.is_file():
        raise ConfigError(
            f"No hardware is called {name!r}, and no file either.",
            remedy=f"Give one of {', '.join(known)}, or a TOML file of the form of hardware.toml.",
        )
    try:
        values = tomllib.loads(path.read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}.") from None
    found = _parse(values, str(path))
    if len(found) != 1:
        raise ConfigError(
            f"{path} describes {len(found)} machines ({', '.join(found) or 'none'}); one was expected.",
            remedy="Write one table, as in [my-server].",
        )
    return next(iter(found.values()))


def _parse(values: dict[str, Any], where: str) -> dict[str, Hardware]:
    sources = _table(f"{where}, [sources]", values.pop("sources", {}))
    tables = _Tables(where, {name: _text(f"{where}, {name}", text) for name, text in sources.items()})
    return {name: tables.hardware(name, table) for name, table in values.items()}


class _Tables:
    """Reads tables of one file; errors name the file and the table."""

    def __init__(self, where: str, sources: Mapping[str, str]) -> None:
        self._where = where
        self._sources = sources

    def hardware(self, name: str, table: Any) -> Hardware:
        at = f"{self._where}, [{name}]"
        table = _table(at, table)
        legal = {"title", "kind", "engines", "schemes", "refused", *_NUMBERS}
        required = legal - {"refused"}
        if unknown := sorted(set(table) - legal):
            raise ConfigError(f"{at} has unknown fields: {', '.join(unknown)}.", remedy=_form(legal))
        if missing := sorted(required - set(table)):
            raise ConfigError(f"{at} lacks {', '.join(missing)}.", remedy=_form(legal))
        numbers = {field: self._number(f"{at} {field}", table[field]) for field in _NUMBERS}
        devices = numbers["devices_per_node"].value
        if devices != int(devices):
            raise ConfigError(f"{at} devices_per_node is {devices}; a whole number was expected.")
        if numbers["usable"].value > 1:
            raise ConfigError(f"{at} usable is {numbers['usable'].value}; a part of at most 1 was expected.")
        kind = _one_of(f"{at} kind", table["kind"], tuple(_ENGINES_OF))
        engines = _names(f"{at} engines", table["engines"], ENGINES)
        if foreign := [engine for engine in engines if engine not in _ENGINES_OF[kind]]:
            raise ConfigError(
                f"{at} engines has {', '.join(foreign)}, which can't run on kind {kind!r}.",
                remedy=f"Legal there are {', '.join(_ENGINES_OF[kind])}.",
            )
        return Hardware(
            name=_text(f"{at} name", name),
            title=_text(f"{at} title", table["title"]),
            kind=kind,
            engines=engines,
            schemes=_texts(f"{at} schemes", table["schemes"], tuple(SCHEMES)),
            refused={
                _one_of(f"{at} refused", family, FAMILIES): self._refusal(f"{at} refused.{family}", refusal)
                for family, refusal in _table(f"{at} refused", table.get("refused", {})).items()
            },
            **numbers,
        )

    def _number(self, at: str, table: Any) -> Number:
        reasons = ("assumed", "source")
        found = [kind for kind in reasons if isinstance(table, dict) and kind in table]
        if not found or set(table) != {"value", *found}:
            raise ConfigError(
                f"{at} is {table!r}.",
                remedy="Write { value = 64, source = '...' } or { value = 64, assumed = '...' }.",
            )
        value = table["value"]
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < inf:
            raise ConfigError(f"{at} is {value!r}; a number above 0 was expected.")
        texts = [_text(f"{at} {kind}", table[kind]) for kind in found]
        reason = "; ".join(self._sources.get(text, text) for text in texts)
        return Number(float(value), reason, assumed="assumed" in found)

    def _refusal(self, at: str, table: Any) -> Refusal:
        if not isinstance(table, dict) or set(table) != {"why", "instead", "source"}:
            raise ConfigError(f"{at} is {table!r}; why, instead and source were expected.")
        source = _text(at, table["source"])
        return Refusal(
            _text(at, table["why"]), _text(at, table["instead"]), self._sources.get(source, source)
        )


def _form(legal: set[str]) -> str:
    return f"The fields are {', '.join(sorted(legal))}."


def _table(at: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ConfigError(f"{at} is {value!r}; a table was expected.")
    return value


def _text(at: str, value: Any) -> str:
    if not isinstance(value, str):
        raise ConfigError(f"{at} is {value!r}; a text was expected.")
    if not value.isprintable():  # it would break lines of tables and of scripts
        raise ConfigError(f"{at} is {value!r}; one line without control characters was expected.")
    return value


def _one_of(at: str, value: Any, legal: tuple[str, ...]) -> str:
    if value not in legal:
        raise ConfigError(f"{at} is {value!r}.", remedy=f"Legal are {', '.join(legal)}.")
    return value


def _names(at: str, value: Any, legal: tuple[str, ...]) -> tuple[str, ...]:
    if not isinstance(value, list) or not value:
        raise ConfigError(f"{at} is {value!r}; a list was expected.", remedy=f"Legal are {', '.join(legal)}.")
    return tuple(dict.fromkeys(_one_of(at, name, legal) for name in value))


def _texts(at: str, value: Any, legal: tuple[str, ...]) -> dict[str, str]:
    if not isinstance(value, dict) or not value:
        raise ConfigError(
            f"{at} is {value!r}; a table was expected.", remedy=f"Legal are {', '.join(legal)}."
        )
    return {_one_of(at, name, legal): _text(f"{at}.{name}", text) for name, text in value.items()}
