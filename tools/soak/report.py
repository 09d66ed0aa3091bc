"""What a soak found, as Markdown and as a plot of memory and files over time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from soak.load import Ledger
from soak.monitor import COUNTERS, Monitor, Sample, percentile

MIB = 2**20


@dataclass(frozen=True)
class Check:
    """One line of the verdict."""

    what: str
    found: str
    right: bool


@dataclass
class Report:
    """Everything that is told at the end."""

    command: str
    flags: Sequence[str]
    minutes: float
    pool_size: int
    ledger: Ledger
    monitor: Monitor
    checks: list[Check] = field(default_factory=list)

    def check(self, what: str, found: object, right: bool) -> None:
        self.checks.append(Check(what, str(found), right))

    @property
    def right(self) -> bool:
        return all(check.right for check in self.checks)

    def markdown(self, plot: str) -> str:
        lines = [
            "# Soak", "",
            f"{self.minutes:g} minutes of mixed load, by `{self.command}`, on", "",
            f"    longspan serve {' '.join(self.flags)}", "",
            f"{self.pool_size} requests have known answers: those of lone runs, one after the other, on a",
            "server of their own. Every finished answer, whole or streamed, is compared with them: text,",
            "reasoning, tool calls, log-probabilities, reasons and usage.", "",
            "| check | found | |", "|---|---|---|",
            *map(_row, self.checks),
            "", f"![memory and files over time]({plot})", "",
            "## What was asked", "",
            *_counts(self.ledger), "",
            "## What the server counted", "",
            *_counters(self.monitor.samples), "",
        ]  # fmt: skip
        if self.ledger.violations:
            lines += ["## What was wrong", "", f"{self.ledger.num_violations} in all; the first:", ""]
            lines += [f"- {' '.join(text.split())}" for text in self.ledger.violations] + [""]
        return "\n".join(lines)

    def plot(self, file: Path) -> None:
        """Needs matplotlib (`pip install longspan[bench]`)."""
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot

        samples = self.monitor.samples
        minutes = [sample.seconds / 60 for sample in samples]
        figure, axes = pyplot.subplots(3, 1, sharex=True, figsize=(9, 7), layout="constrained")
        axes[0].plot(minutes, [sample.usage.rss_bytes / MIB for sample in samples])
        axes[0].set(ylabel="resident memory, MiB", title="All processes of the server", ylim=(0, None))
        axes[1].plot(minutes, [sample.usage.files for sample in samples], label="open files")
        axes[1].plot(minutes, [sample.usage.threads for sample in samples], label="threads")
        for what in ("running", "waiting"):
            name = f"vllm:num_requests_{what}"
            axes[2].plot(minutes, [sample.metrics.get(name) for sample in samples], label=what)
        axes[2].set(xlabel="minutes", ylabel="sequences")
        for axis in axes[1:]:
            axis.legend(loc="upper left")
        for axis in axes:
            axis.grid(alpha=0.3)
        figure.savefig(file, dpi=110)
        pyplot.close(figure)


def _row(check: Check) -> str:
    return f"| {check.what} | {check.found} | {'right' if check.right else '**WRONG**'} |"


def _counts(ledger: Ledger) -> list[str]:
    rows: dict[str, list[str]] = defaultdict(list)
    for (kind, outcome), count in sorted(ledger.counts.items()):
        rows[kind].append(f"{count} {outcome}")
    return [
        "| kind | outcomes |",
        "|---|---|",
        *(f"| {kind} | {', '.join(row)} |" for kind, row in rows.items()),
    ]


def _counters(samples: Sequence[Sample]) -> list[str]:
    """Counters begin again when a worker dies, so the largest value since then counts."""
    rows = []
    for what, name in COUNTERS.items():
        values = [sample.metrics[name] for sample in samples if name in sample.metrics]
        if values:
            rows.append(f"| {what} | {max(values):.0f} |")
    return ["| counter | at most |", "|---|---|", *rows]


def latencies(seconds: Sequence[float]) -> str:
    shown = (f"{1000 * percentile(seconds, share):.0f}" for share in (0.5, 0.99, 1))
    return "{} ms median, {} ms p99, {} ms at most".format(*shown)
