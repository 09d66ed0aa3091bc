"""What is known of one HTTP request: gathered while it is served, read when it is over."""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextvars import ContextVar
from dataclasses import dataclass, field

from longspan.engine.output import Times
from longspan.serve.metrics import Choice, Meter


@dataclass
class Record:
    """Times are seconds on `time.monotonic`'s clock."""

    method: str
    route: str = ""  # a path of the app; whatever the client asked for beside these is "other"
    status: int = 0  # 499: the client hung up before there was an answer
    request_id: str = ""
    arrived: float = field(default_factory=time.monotonic)
    ended: float = 0.0
    meters: list[Meter] = field(default_factory=list)  # of the engine's requests, one per prompt

    @property
    def asks_for_work(self) -> bool:
        """The rest only looks: probes, scrapers, lists of models."""
        return self.method == "POST"

    @property
    def abandoned(self) -> bool:
        """The client hung up."""
        if self.error is not None:
            return False
        return self.status == 499 or any(meter.abandoned for meter in self.meters)

    @property
    def error(self) -> Exception | None:
        return next((meter.error for meter in self.meters if meter.error is not None), None)

    @property
    def choices(self) -> list[Choice]:
        return [choice for meter in self.meters for choice in meter.choices]

    @property
    def prompt_tokens(self) -> int:
        """Each prompt once, however many choices read it."""
        return sum(len(meter.request.prompt_token_ids) for meter in self.meters)

    @property
    def cached_tokens(self) -> int:
        return sum(meter.choices[0].cached_tokens for meter in self.meters)

    @property
    def output_tokens(self) -> int:
        return sum(choice.num_tokens for choice in self.choices)

    @property
    def seconds(self) -> float:
        return self.ended - self.arrived

    @property
    def seconds_to_first_token(self) -> float | None:
        firsts = [meter.first_token for meter in self.meters if meter.first_token is not None]
        return min(firsts) - self.arrived if firsts else None

    @property
    def finish_reasons(self) -> list[str]:
        """One per choice that came to its end."""
        return [choice.finish.reason for choice in self.choices if choice.finish]

    @property
    def times(self) -> Times | None:
        """Those of the first choice that came to its end: where its time went."""
        return next((choice.finish.times for choice in self.choices if choice.finish), None)


_current: ContextVar[Record | None] = ContextVar("record", default=None)


def begin(method: str) -> Record:
    """The record of the request that this task, and the tasks it starts, serve from now on."""
    record = Record(method)
    _current.set(record)
    return record


def remember(meters: Iterable[Meter]) -> None:
    """Adds to the record of the request being served, if it came over HTTP."""
    if (record := _current.get()) is not None:
        record.meters += meters
