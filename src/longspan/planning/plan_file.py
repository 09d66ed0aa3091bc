"""plan.json read back: the fields that the go-live list needs, each of its own type."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from longspan.errors import ConfigError
from longspan.planning.hardware import ENGINES

PLAN_FILE = "plan.json"
WRITE_IT_AGAIN = "Write it again with `longspan plan --output`."

Count = Annotated[int, Field(ge=1)]
Role = Literal["server", "prefill", "decode"]
ScriptName = Annotated[str, Field(pattern=r"^(server|prefill|decode)-\d+\.sh$")]
Address = Annotated[str, Field(pattern=r"^http://[^\s/]+:\d+$")]


class _Part(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True)


class PlannedSplit(_Part):
    tensor: Count
    data: Count
    expert: Count
    context: Count


class PlannedFits(_Part):
    step_tokens: Count


class PlannedHardware(_Part):
    name: str


class PlannedSide(_Part):
    role: Role
    nodes: Count
    split: PlannedSplit
    fits: PlannedFits

    @property
    def experts_over_data(self) -> bool:
        return self.split.expert == self.split.tensor * self.split.data > 1


class PlanFile(_Part):
    engine: str
    family: str
    scheme: str
    context: Count
    topology: str
    hardware: PlannedHardware
    sides: Annotated[list[PlannedSide], Field(min_length=1)]
    urls: dict[ScriptName, list[Address]]

    @field_validator("engine")
    @classmethod
    def _known(cls, name: str) -> str:
        if name not in ENGINES:
            raise ValueError(f"{name!r} is none of {', '.join(ENGINES)}")
        return name

    @model_validator(mode="after")
    def _a_script_for_each_node(self) -> Self:
        scripts = Counter(map(role_of, self.urls))
        if scripts != {side.role: side.nodes for side in self.sides}:
            raise ValueError(f"urls should have a script for each node of sides, and has {len(self.urls)}")
        return self

    @property
    def split_in_two(self) -> bool:
        """Whether some nodes prefill and others decode."""
        return any(side.role != "server" for side in self.sides)

    def urls_of(self, role: str) -> list[str]:
        return [url for name, urls in self.urls.items() if role_of(name) == role for url in urls]

    def host_of(self, script: str) -> str | None:
        """Where its servers are asked; None if none of its servers is."""
        urls = self.urls[script]
        return host_and_port(urls[0])[0] if urls else None

    @property
    def spread(self) -> bool:
        """Whether servers must be reached from other hosts."""
        hosts = {host_and_port(url)[0] for urls in self.urls.values() for url in urls}
        return sum(side.nodes for side in self.sides) > 1 and not all(map(is_loopback, hosts))


def role_of(script: str) -> str:
    return script.partition("-")[0]


def host_and_port(url: str) -> tuple[str, str]:
    host, _, port = url.removeprefix("http://").rpartition(":")
    return host, port


def is_loopback(host: str) -> bool:
    return host in ("localhost", "::1", "[::1]") or host.startswith("127.")


def read_plan(file: Path) -> PlanFile:
    """Raises ConfigError that names the fields which are missing or of another type."""
    try:
        return PlanFile.model_validate_json(file.read_bytes())
    except ValidationError as error:
        raise ConfigError(f"{file} is no plan: {faults_of(error)}.", remedy=WRITE_IT_AGAIN) from None


def faults_of(error: ValidationError) -> str:
    """One line: the first fields that are wrong, and what was found there."""
    faults = []
    for fault in error.errors(include_url=False)[:3]:
        where = ".".join(map(str, fault["loc"]))
        found = "" if fault["type"] in ("missing", "value_error") else f", found {fault['input']!r:.40}"
        text = fault["msg"].removeprefix("Value error, ") + found
        faults.append(f"{where}: {text}" if where else text)
    return "; ".join(" ".join(fault.split()) for fault in faults)
