"""What was measured, held against the limits of the machine: a table, JSON, a plot.

JSON is one object; fields are only ever added. All is in bytes, seconds and operations:

- model, family, dtype, index_key_dtype, backend
- limits: {threads, read_bytes, bf16_operations, int8_operations}, what this machine does in a second; each
  the median of `measurements`, a list of the same, whose first half is from before the steps, the rest after
- rows: a list of {phase: "prefill" or "decode", sequences, rows, depth, steps, seconds: {median, fastest,
  slowest}, tokens_per_second, bytes: {weights, experts, cache, state}, operations: {weights, attention,
  index}, bytes_per_second, operations_per_second, read_share, compute_share, limit_tokens_per_second}

read_share is bytes a second over the bandwidth of the machine, compute_share operations a second over its
BF16 peak (int8 index keys: those of the index over the int8 peak). A step can't be faster than the larger of
the two allows, which is limit_tokens_per_second.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from longspan.bench.measure import Timing
from longspan.bench.workload import Step, Work
from longspan.ops.limits import MachineLimits

GIGA = 1e9


@dataclass(frozen=True)
class Row:
    """One phase at one depth."""

    phase: str  # "prefill" or "decode"
    step: Step
    work: Work
    timing: Timing

    @property
    def tokens_per_second(self) -> float:
        return self.step.tokens / self.timing.median


@dataclass(frozen=True)
class Report:
    """All rows of one run. `measurements` of the machine: before the first row and after the last."""

    model: str
    family: str
    dtype: str
    index_key_dtype: str
    backend: str
    measurements: Sequence[MachineLimits]
    rows: Sequence[Row]

    @property
    def limits(self) -> MachineLimits:
        """The median of each."""
        return MachineLimits(
            threads=self.measurements[0].threads,
            read_bytes=statistics.median(m.read_bytes for m in self.measurements),
            bf16_operations=statistics.median(m.bf16_operations for m in self.measurements),
            int8_operations=statistics.median(m.int8_operations for m in self.measurements),
        )

    def read_seconds(self, work: Work) -> float:
        """The least that reading takes."""
        return work.total_bytes / self.limits.read_bytes

    def compute_seconds(self, work: Work) -> float:
        """The least that computing takes; 0 where the peak is unknown."""
        bf16, int8 = self.limits.bf16_operations, self.limits.int8_operations
        index_peak = int8 if self.index_key_dtype == "int8" and int8 else bf16
        if not bf16:
            return 0.0
        products = work.weight_operations + work.attention_operations
        return products / bf16 + work.index_operations / index_peak

    def limit_tokens_per_second(self, row: Row) -> float:
        return row.step.tokens / max(self.read_seconds(row.work), self.compute_seconds(row.work))

    def as_dict(self) -> dict[str, Any]:
        """As described above."""
        head = ("model", "family", "dtype", "index_key_dtype", "backend")
        return {name: getattr(self, name) for name in head} | {
            "limits": dataclasses.asdict(self.limits)
            | {"measurements": [dataclasses.asdict(measured) for measured in self.measurements]},
            "rows": [self._row(row) for row in self.rows],
        }

    def _row(self, row: Row) -> dict[str, Any]:
        step, work, timing = row.step, row.work, row.timing
        return {
            "phase": row.phase,
            "sequences": step.sequences,
            "rows": step.rows,
            "depth": step.context,
            "steps": timing.steps,
            "seconds": {
                "median": timing.median,
                "fastest": timing.fastest,
                "slowest": timing.slowest,
            },
            "tokens_per_second": row.tokens_per_second,
            "bytes": {
                "weights": work.weight_bytes,
                "experts": work.expert_bytes,
                "cache": work.cache_bytes,
                "state": work.state_bytes,
            },
            "operations": {
                "weights": work.weight_operations,
                "attention": work.attention_operations,
                "index": work.index_operations,
            },
            "bytes_per_second": work.total_bytes / timing.median,
            "operations_per_second": work.total_operations / timing.median,
            "read_share": self.read_seconds(work) / timing.median,
            "compute_share": self.compute_seconds(work) / timing.median,
            "limit_tokens_per_second": self.limit_tokens_per_second(row),
        }

    def table(self) -> Table:
        table = Table(box=None, pad_edge=False)
        table.add_column("step", no_wrap=True)
        for column in (
            "depth",
            "tokens",
            "tokens/s",
            "ms/step",
            "GB/s",
            "of read",
            "GFLOP/s",
            "attn.",
            "of peak",
        ):
            table.add_column(column, justify="right", no_wrap=True)
        for row in self.rows:
            work, seconds = row.work, row.timing.median
            attention = work.attention_operations + work.index_operations
            table.add_row(
                row.phase,
                show_count(row.step.context),
                f"{row.step.tokens:,}",
                _figures(row.tokens_per_second),
                _figures(seconds * 1e3),
                _figures(work.total_bytes / seconds / GIGA),
                f"{self.read_seconds(work) / seconds:.0%}",
                _figures(work.weight_operations / seconds / GIGA),
                _figures(attention / seconds / GIGA),
                f"{self.compute_seconds(work) / seconds:.0%}" if self.limits.bf16_operations else "?",
            )
        return table

    def heading(self) -> str:
        """What ran, and the limits it is held against, with the spread of their measurements."""
        limits = self.limits
        reads = [measured.read_bytes / GIGA for measured in self.measurements]
        peaks = {"BF16 GFLOP/s": limits.bf16_operations, "int8 GOP/s": limits.int8_operations}
        known = "".join(f", {peak / GIGA:,.0f} {unit}" for unit, peak in peaks.items() if peak)
        keys = "" if self.index_key_dtype == "auto" else f", {self.index_key_dtype} index keys"
        return (
            f"{self.model}: {self.family}, {self.dtype}{keys}, {self.backend} operators\n"
            f"machine, {limits.threads} threads: reads the weights at {limits.read_bytes / GIGA:.1f} GB/s "
            f"({min(reads):.1f} to {max(reads):.1f}){known}"
        )

    def plot(self, file: Path) -> None:
        """Tokens a second by depth, and what the machine allows, a panel for each phase. Needs matplotlib."""
        from matplotlib.figure import Figure  # pyright: ignore[reportMissingImports]

        phases = list(dict.fromkeys(row.phase for row in self.rows))
        figure = Figure(figsize=(6 * len(phases), 4), layout="constrained")
        for place, phase in enumerate(phases):
            rows = [row for row in self.rows if row.phase == phase]
            depths = [show_count(row.step.context) for row in rows]
            axes = figure.add_subplot(1, len(phases), place + 1)
            axes.plot(depths, [row.tokens_per_second for row in rows], marker="o", label="measured")
            axes.plot(
                depths,
                [self.limit_tokens_per_second(row) for row in rows],
                linestyle="--",
                label="limit of the machine",
            )
            axes.set_title(f"{phase}, tokens a step: {rows[0].step.tokens}")
            axes.set(xlabel="depth", ylabel="tokens/s")
            axes.set_ylim(bottom=0)
            axes.legend()
        figure.suptitle(f"{self.model}, {self.dtype}, {self.backend}")
        figure.savefig(file, dpi=150)


def _figures(x: float) -> str:
    """Three figures where there are any: 0.012, 4.56, 78.9, 1,234."""
    if x >= 100:
        return f"{x:,.0f}"
    return f"{x:.1f}" if x >= 10 else f"{x:.2f}" if x >= 1 else f"{x:.3f}"


def show_count(count: int) -> str:
    """131072 -> "128K"; what is no multiple stays as it is."""
    for size, unit in ((2**20, "M"), (2**10, "K")):
        if count and count % size == 0:
            return f"{count // size}{unit}"
    return str(count)
