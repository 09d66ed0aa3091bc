"""A sweep as a picture: throughput against what it costs, until the first token and between tokens."""

from __future__ import annotations

from pathlib import Path

from longspan.bench.serving.report import Report

_PANELS = {"ttft": "time to first token", "itl": "between tokens"}


def plot(report: Report, file: Path) -> None:
    """The kind of file is its suffix's. Needs matplotlib."""
    from matplotlib.figure import Figure  # pyright: ignore[reportMissingImports]

    points = [point for point in report.points if point.summary.completed]
    throughput = [point.summary.output_rate for point in points]
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    for place, (name, title) in enumerate(_PANELS.items(), 1):
        axes = figure.add_subplot(1, len(_PANELS), place)
        found = [point.summary.latencies[name] for point in points]
        lines = {"median": [d.median for d in found]}
        lines |= {f"p{p:g}": [d.percentiles[p] for d in found] for p in report.percentiles}
        for label, values in lines.items():
            axes.plot(throughput, [value * 1e3 for value in values], marker="o", label=label)
        for x, d, point in zip(throughput, found, points, strict=True):
            axes.annotate(
                point.load.show(),
                (x, d.median * 1e3),
                textcoords="offset points",
                xytext=(4, -11),
                fontsize=7,
            )
        axes.set(title=title, xlabel="output tokens/s", ylabel="ms")
        axes.margins(x=0.12)
        axes.set_ylim(bottom=0)
        axes.set_xlim(left=0)
        axes.legend(loc="upper left")
    figure.suptitle(f"{report.model}: {report.workload}", fontsize=9)
    figure.savefig(file, dpi=150)
