"""Figures as a frame for the terminal. A row is there if the server has something to say in it."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from longspan.top.figures import Figures

_LATENCY_TITLES = {
    "ttft": "first token",
    "itl": "between tokens",
    "queue": "in queue",
    "e2e": "whole request",
}
_PRESSURE = ("preemptions", "swaps", "evictions")
_FREE = ("·", "grey50")
_ARENA = {  # what is told apart by glyph too: not every terminal has colours
    "page_running": ("pages running", "█", "green"),
    "page_cached": ("pages cached", "▓", "cyan"),
    "state_running": ("states running", "▒", "yellow"),
    "state_cached": ("states cached", "░", "magenta"),
    "free": ("free", *_FREE),
}
_BAR_CELLS = 40  # so that all fits 80 columns
_SPARKS = "▁▂▃▄▅▆▇█"
_SPARK_CELLS = 30


def frame(url: str, figures: Figures, history: Sequence[float], trouble: str = "") -> RenderableType:
    """`history`: tokens generated a second, oldest first. `trouble`: why these figures are old."""
    parts: list[RenderableType] = [_rows(figures, history)]
    if figures.latency:
        parts += ["", _latency(figures)]
    if trouble:
        parts += ["", Text(trouble, style="bold red")]
    models = ", ".join(figures.models) or "no model"
    title = Text.assemble(("longspan top ", "bold"), url, "  ", (models, "cyan"))
    return Panel(Group(*parts), title=title, title_align="left", subtitle=_subtitle(figures), padding=(1, 1))


def _subtitle(figures: Figures) -> str:
    return f"last {figures.seconds:.0f} s" if figures.seconds >= 1 else "now"


def _rows(figures: Figures, history: Sequence[float]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for title, content in (
        ("generation", _rate(figures, "generation_tokens", "tokens/s", sparks(history))),
        ("prompts", _rate(figures, "prompt_tokens", "tokens/s", _hits(figures))),
        ("requests", _requests(figures)),
        ("steps", _steps(figures)),
        ("arena", _arena(figures)),
        ("host pool", _host_pool(figures)),
        ("pressure", _pressure(figures)),
        ("since start", _totals(figures)),
    ):
        if content:
            table.add_row(title, content)
    return table


def _rate(figures: Figures, name: str, unit: str, more: str) -> str:
    rate = figures.rates.get(name)
    return "" if rate is None else f"{number(rate):>8} {unit}   {more}"


def _hits(figures: Figures) -> str:
    hits = figures.prefix_hit_rate
    return "" if hits is None else f"{percent(hits)} from the prefix cache"


def _requests(figures: Figures) -> str:
    counts = {"running": figures.running, "waiting": figures.waiting, "swapped": figures.swapped}
    words = [f"{number(count)} {name}" for name, count in counts.items() if count is not None]
    rate = figures.rates.get("requests")
    return ", ".join([*words, *([] if rate is None else [f"{number(rate)} finished/s"])])


def _steps(figures: Figures) -> str:
    words = []
    if (rate := figures.rates.get("steps")) is not None:
        words.append(f"{number(rate)}/s")
    if figures.tokens_per_step is not None:
        words.append(f"{number(figures.tokens_per_step)} tokens each")
    if figures.model_share is not None:
        words.append(f"{figures.model_share:.1%} of their time in the model")
    return ", ".join(words)


def _pressure(figures: Figures) -> str:
    """That memory is short."""
    rates = {name: figures.rates.get(name) for name in _PRESSURE}
    return ", ".join(f"[red]{number(rate)} {name}/s[/]" for name, rate in rates.items() if rate)


def _arena(figures: Figures) -> RenderableType | None:
    if not figures.arena:
        if figures.cache_usage is None:
            return None
        used = figures.cache_usage
        strip = bar([(used, "█", "green"), (1 - used, *_FREE)])
        return Text.assemble(strip, f"  {percent(used)} held by requests")
    total = figures.arena["total"]
    kinds = [(figures.arena[kind] / total, *looks) for kind, looks in _ARENA.items()]
    strip = bar([(share, glyph, style) for share, _, glyph, style in kinds])
    legend = [
        Text.assemble((f"{glyph} ", style), f"{name} {percent(share)}") for share, name, glyph, style in kinds
    ]
    gap = Text("  ")
    return Group(Text.assemble(strip, f"  of {size(total)}"), gap.join(legend[:2]), gap.join(legend[2:]))


def _host_pool(figures: Figures) -> RenderableType | None:
    if not figures.host_pool:
        return None
    total, used = figures.host_pool["total"], figures.host_pool["used"]
    strip = bar([(used / total, "█", "blue"), (1 - used / total, *_FREE)])
    return Text.assemble(strip, f"  {size(used)} of {size(total)}")


def _totals(figures: Figures) -> str:
    totals = figures.totals
    words = [f"{number(count)} {escape(reason)}" for reason, count in totals.get("requests", {}).items()]
    words += [f"[red]{number(n)} {escape(reason)}[/]" for reason, n in totals.get("rejected", {}).items()]
    words += [f"{number(totals[name])} {name}" for name in _PRESSURE if totals.get(name)]
    return ", ".join(words)


def _latency(figures: Figures) -> Table:
    table = Table(box=None, padding=(0, 3, 0, 0), header_style="dim")
    table.add_column("latency", style="bold")
    columns = list(next(iter(figures.latency.values())))
    for column in columns:
        table.add_column(column, justify="right", min_width=8)
    for name, values in figures.latency.items():
        table.add_row(_LATENCY_TITLES[name], *(duration(values[column]) for column in columns))
    return table


def bar(shares: Sequence[tuple[float, str, str]]) -> Text:
    """A strip of cells, by (share, glyph, style).

    Each share of 1 ends at the cell nearest to where it should: errors never add up.
    """
    text, begin, total = Text(), 0, 0.0
    for share, glyph, style in shares:
        total += max(share, 0.0)
        end = min(round(total * _BAR_CELLS), _BAR_CELLS)
        text.append(glyph * (end - begin), style)
        begin = end
    return text


def sparks(values: Sequence[float]) -> str:
    """The last values as bars, the highest of them full."""
    values = values[-_SPARK_CELLS:]
    top = max(values, default=0.0)
    return "".join(_SPARKS[round(value / top * (len(_SPARKS) - 1))] for value in values) if top > 0 else ""


def number(value: float) -> str:
    """Three digits or more: 0, 0.12, 1.23, 45.6, 789, 12,345."""
    if value == round(value) or abs(value) >= 100:
        return f"{round(value):,}"
    return f"{value:.2f}" if abs(value) < 10 else f"{value:.1f}"


def percent(share: float) -> str:
    return "<1%" if 0 < share < 0.005 else f"{share:.0%}"


def size(value: float) -> str:
    """Bytes in binary units."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def duration(seconds: float) -> str:
    if seconds < 1:
        return f"{seconds * 1e3:.2f} ms" if seconds < 0.01 else f"{seconds * 1e3:.0f} ms"
    return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:.0f} s"
