"""What one run found: a table for each point, one for the sweep, and JSON.

JSON is one object; fields are only ever added. All times are seconds:

- longspan, date, url, model, endpoint, settings (every flag of the command but the key)
- points: a list of {request_rate (null: no schedule, closed loop or all at once), max_concurrency,
  requests: {planned, completed, errors: {kind: count}}, duration, tokens: {prompt, output},
  requests_per_second, output_tokens_per_second, total_tokens_per_second, goodput,
  cache_hit_rate: {usage, server}, peak_concurrency, latencies,
  client: {lag_p99, lag_max, cpu, bottleneck}, server_counters: {name: growth}, records}
- latencies: ttft and e2el (from the time scheduled), ttft_sent and e2el_sent (from the time sent), wait,
  tpot, itl, as longspan.bench.serving.metrics defines them: {count, mean, median, std, min, max, p90, ...}
- records: one object a request with the fields of longspan.bench.serving.run.Record; seconds from the start
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.table import Table

from longspan import __version__
from longspan.bench.serving.counters import hit_rate
from longspan.bench.serving.metrics import Distribution, Summary
from longspan.bench.serving.run import ClientHealth, Record

TITLES = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2el": "E2EL"}
SENT = {"ttft": "ttft_sent", "e2el": "e2el_sent"}
_WAIT_WORTH_TELLING = 0.005


@dataclass(frozen=True)
class Load:
    """Of one point. `rate`: conversations a second; None: a trace, which has its own times."""

    rate: float | None
    max_concurrency: int | None

    @property
    def closed(self) -> bool:
        """So many users, each of whom asks again when answered."""
        return self.rate == math.inf and self.max_concurrency is not None

    def show(self) -> str:
        """ "4/s, max 16" """
        if self.closed:
            return f"{self.max_concurrency} user{'' if self.max_concurrency == 1 else 's'}"
        rate = (
            "as timed"
            if self.rate is None
            else "all at once"
            if math.isinf(self.rate)
            else f"{self.rate:g}/s"
        )
        return f"{rate}, max {self.max_concurrency}" if self.max_concurrency else rate


@dataclass(frozen=True)
class Point:
    load: Load
    summary: Summary
    client: ClientHealth
    counters: Mapping[str, float]
    records: Sequence[Record]

    @property
    def hit_rate(self) -> float | None:
        """As usage says, or else the server's counters."""
        said = self.summary.hit_rate
        return hit_rate(self.counters) if said is None else said

    def as_dict(self) -> dict[str, Any]:
        s, rate = self.summary, self.load.rate
        return {
            "request_rate": None if rate is None or math.isinf(rate) else rate,
            "max_concurrency": self.load.max_concurrency,
            "requests": {"planned": s.planned, "completed": s.completed, "errors": dict(s.errors)},
            "duration": s.duration,
            "tokens": {"prompt": s.prompt_tokens, "output": s.output_tokens},
            "requests_per_second": s.request_rate,
            "output_tokens_per_second": s.output_rate,
            "total_tokens_per_second": s.total_rate,
            "goodput": s.goodput,
            "cache_hit_rate": {"usage": s.hit_rate, "server": hit_rate(self.counters)},
            "peak_concurrency": s.peak_concurrency,
            "latencies": {name: _figures(d) for name, d in s.latencies.items()},
            "client": dataclasses.asdict(self.client) | {"bottleneck": self.client.bottleneck},
            "server_counters": dict(self.counters),
            "records": [dataclasses.asdict(record) for record in self.records],
        }


@dataclass(frozen=True)
class Report:
    """`metrics`: the rows that are shown, of TITLES."""

    date: str
    url: str
    model: str
    endpoint: str
    workload: str  # in words
    metrics: Sequence[str]
    percentiles: Sequence[float]
    settings: Mapping[str, Any]
    points: list[Point] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """As described above."""
        return {
            "longspan": __version__,
            "date": self.date,
            "url": self.url,
            "model": self.model,
            "endpoint": self.endpoint,
            "settings": dict(self.settings),
            "points": [point.as_dict() for point in self.points],
        }

    def heading(self) -> str:
        return f"{self.model} at {self.url}{self.endpoint}\n{self.workload}"

    def facts(self, point: Point) -> str:
        """What one point achieved, but for its latencies."""
        s = point.summary
        lost = s.planned - s.completed - sum(s.errors.values())
        failed = [f"{count} {kind}" for kind, count in s.errors.items()]
        failed += [f"{lost} not sent after a failed turn"] if lost else []
        done = f"{s.completed} of {s.planned} done in {s.duration:.2f} s" + "".join(f"; {f}" for f in failed)
        per_request = f"{_mean(s.prompt_tokens, s.completed)} in, {_mean(s.output_tokens, s.completed)} out"
        rates = (
            f"{s.request_rate:.2f} requests/s, {s.output_rate:,.1f} output tokens/s, "
            f"{s.total_rate:,.1f} tokens/s in all; at most {s.peak_concurrency} at once"
        )
        lines = [f"{point.load.show()}: {done}", rates, f"mean tokens of a request: {per_request}"]
        if s.goodput is not None:
            lines.append(f"goodput {s.goodput:.2f} requests/s")
        if point.hit_rate is not None:
            lines.append(f"prefix cache: {point.hit_rate:.1%} of prompt tokens")
        return "\n  ".join(lines)

    def warnings(self, point: Point) -> list[str]:
        client, wait = point.client, point.summary.latencies["wait"]
        found = []
        if client.bottleneck:
            found.append(
                f"The client was a bottleneck: its event loop woke {client.lag_p99 * 1e3:.0f} ms late (p99) "
                f"and used {client.cpu:.0%} of a core. Latencies hold its delays: give it a core of its own, "
                "or less to do."
            )
        if wait.mean > _WAIT_WORTH_TELLING:
            found.append(
                f"Requests waited in the client, {wait.mean * 1e3:.0f} ms on average: TTFT and E2EL count "
                "from the time scheduled, the rows `sent` from when they were sent."
            )
        if any(record.counted_chunks for record in point.records if record.error is None):
            found.append("The server sends no usage: chunks were counted as output tokens.")
        first = next((record.message for record in point.records if record.error), None)
        return [*found, f"First failure: {first}"] if first else found

    def latency_table(self, point: Point) -> Table:
        """Milliseconds."""
        table = Table(box=None, pad_edge=False)
        table.add_column("ms", no_wrap=True)
        for column in ("mean", "median", *(f"p{p:g}" for p in self.percentiles), "max"):
            table.add_column(column, justify="right", no_wrap=True)
        waited = point.summary.latencies["wait"].mean > _WAIT_WORTH_TELLING
        for name in self.metrics:
            table.add_row(TITLES[name], *self._row(point.summary.latencies[name]))
            if waited and name in SENT:
                table.add_row(f"{TITLES[name]} sent", *self._row(point.summary.latencies[SENT[name]]))
        return table

    def sweep_table(self) -> Table:
        """One row a point: throughput, and median and highest percentile of each latency in milliseconds."""
        high = max(self.percentiles)
        with_goodput = self.points[0].summary.goodput is not None
        table = Table(
            box=None, pad_edge=False, caption=f"latencies: median / p{high:g}, ms", caption_justify="left"
        )
        table.add_column("load", no_wrap=True)
        columns = ["done", "req/s", "out tok/s", "peak", *(["goodput"] if with_goodput else [])]
        for column in [*columns, *(TITLES[name] for name in self.metrics), "hits"]:
            table.add_column(column, justify="right", no_wrap=True)
        for point in self.points:
            s, hits = point.summary, point.hit_rate
            cells = [f"{s.completed}/{s.planned}", f"{s.request_rate:.2f}", f"{s.output_rate:,.1f}"]
            cells.append(str(s.peak_concurrency))
            cells += [f"{s.goodput:.2f}"] if s.goodput is not None else []
            for name in self.metrics:
                found = s.latencies[name]
                cells.append(f"{_ms(found, found.median)} / {_ms(found, found.percentiles[high])}")
            table.add_row(point.load.show(), *cells, "" if hits is None else f"{hits:.0%}")
        return table

    def _row(self, found: Distribution) -> list[str]:
        values = [found.mean, found.median, *(found.percentiles[p] for p in self.percentiles), found.max]
        return [_ms(found, value) for value in values]


def _figures(found: Distribution) -> dict[str, float]:
    percentiles = {f"p{p:g}": value for p, value in found.percentiles.items()}
    plain = {name: value for name, value in dataclasses.asdict(found).items() if name != "percentiles"}
    return plain | percentiles


def _ms(found: Distribution, seconds: float) -> str:
    """Nothing where nothing was measured."""
    if not found.count:
        return "-"
    ms = seconds * 1e3
    return f"{ms:,.0f}" if ms >= 1000 else f"{ms:.1f}" if ms >= 10 else f"{ms:.2f}"


def _mean(total: int, count: int) -> str:
    return f"{total / count:,.1f}" if count else "-"
