"""`longspan bench serve`: the order of a run."""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longspan.bench.serving import datasets, flags
from longspan.bench.serving.arrivals import arrival_times
from longspan.bench.serving.counters import grown, read_counters
from longspan.bench.serving.datasets import Conversation
from longspan.bench.serving.dialogue import Dialect, Dialogue
from longspan.bench.serving.metrics import summarise
from longspan.bench.serving.prompts import PromptSource
from longspan.bench.serving.report import Load, Point, Report
from longspan.bench.serving.run import Record, Watch, hold_all
from longspan.errors import BenchError

if TYPE_CHECKING:
    from longspan.bench.serving.server import Server

WARM_UP_FILL = 1_000_000  # text that no point has
_TABLE_WIDTH = 120
Dataset = Callable[[PromptSource, int], list[Conversation]]  # the second number: of the point

add_arguments = flags.add_arguments


def main(args: argparse.Namespace) -> int:
    """1 if a point had no answer at all. Raises BenchError for what can't be measured."""
    flags.check(args)

    from rich.console import Console

    console = Console(markup=False, highlight=False, soft_wrap=True)
    console.width = max(console.width, _TABLE_WIDTH)

    def show(report: Report) -> None:
        """Its last point: a sweep takes long, and may be broken off."""
        point = report.points[-1]
        if len(report.points) == 1:
            console.print(report.heading())
        console.print(f"\n{report.facts(point)}\n")
        console.print(report.latency_table(point))
        for warning in report.warnings(point):
            console.print(f"! {warning}")

    report = asyncio.run(_measure(args, _dataset(args), show))
    if len(report.points) > 1:
        console.print()
        console.print(report.sweep_table())
    if args.json:
        args.json.write_text(json.dumps(report.as_dict(), indent=1) + "\n")
    if args.plot:
        from longspan.bench.serving.plot import plot

        plot(report, args.plot)
    return 0 if all(point.summary.completed for point in report.points) else 1


async def _measure(args: argparse.Namespace, dataset: Dataset, show: Callable[[Report], None]) -> Report:
    """Calls `show` after each point."""
    from longspan.bench.serving.server import Server, prompt_source  # aiohttp may be missing

    url = args.url or args.base_url or f"http://{args.host}:{args.port}"
    url = url if "://" in url else f"http://{url}"
    async with Server.connect(url, args.api_key, args.timeout) as server:
        card = await server.card(args.model)
        dialect = Dialect(args.endpoint, card["id"], args.ignore_eos, args.extra_body)
        source = await prompt_source(server, dialect, args.multi_turn)
        first = dataset(source, 0)
        _check_lengths(first, card.get("max_model_len"))
        await _warm_up(args, server, dialect, dataset(source, WARM_UP_FILL))
        report = Report(
            date=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            url=server.url,
            model=dialect.model,
            endpoint=dialect.endpoint,
            workload=_workload(args, first),
            metrics=args.percentile_metrics,
            percentiles=args.metric_percentiles,
            settings={k: _plain(v) for k, v in vars(args).items() if k not in ("api_key", "command")},
        )
        loads = _loads(args)
        for i, load in enumerate(loads):
            label = f"{load.show()} ({i + 1} of {len(loads)})"
            report.points.append(await _point(args, server, dialect, dataset(source, i), load, label))
            show(report)
        return report


def _loads(args: argparse.Namespace) -> list[Load]:
    rates = [None] if args.dataset_name == "trace" else args.request_rate
    return [Load(rate, limit) for rate, limit in itertools.product(rates, args.max_concurrency)]


def _dataset(args: argparse.Namespace) -> Dataset:
    """Reads the file, if there is one. All points have the same lengths, each has fresh text."""
    if args.dataset_name == "trace":
        lines = datasets.read_trace(args.dataset_path, args.num_prompts)
        return lambda source, fill: datasets.trace_conversations(
            lines, args.speed, args.trace_length_scale, source, args.seed, fill
        )
    if args.dataset_name == "jsonl":
        read = datasets.read_conversations(
            args.dataset_path, args.random_output_len, args.multi_turn, args.num_prompts
        )
        return lambda source, fill: read
    lengths = datasets.Lengths(
        args.random_input_len,
        args.random_output_len,
        args.random_range_ratio,
        args.random_prefix_len,
        args.num_prefixes,
        args.multi_turn,
    )
    count = args.num_prompts or 100
    return lambda source, fill: datasets.random_conversations(lengths, count, source, args.seed, fill)


async def _warm_up(
    args: argparse.Namespace, server: Server, dialect: Dialect, conversations: list[Conversation]
) -> None:
    """Raises BenchError with the server's own words if it answers none."""
    dialogues = [Dialogue(conversation, dialect) for conversation in conversations[: args.warmup]]
    records = await hold_all(dialogues, None, None, lambda body: server.stream(dialect.endpoint, body))
    if records and all(record.error for record in records):
        raise BenchError(
            f"The server answered no request of the warm-up: {records[0].message}.",
            remedy="See its log; --warmup 0 goes on without.",
        )


async def _point(
    args: argparse.Namespace,
    server: Server,
    dialect: Dialect,
    conversations: list[Conversation],
    load: Load,
    label: str,
) -> Point:
    dialogues = [Dialogue(conversation, dialect) for conversation in conversations]
    if load.rate is None:
        arrivals = [conversation.at or 0.0 for conversation in conversations]
    else:
        arrivals = arrival_times(len(dialogues), load.rate, args.burstiness, args.seed)
    planned = sum(len(dialogue.turns) for dialogue in dialogues)
    before = read_counters(await server.metrics())
    with _Progress(planned, label, hidden=args.disable_tqdm) as advance:
        async with Watch(time.perf_counter) as watch:
            records = await hold_all(
                dialogues,
                None if load.closed else arrivals,
                load.max_concurrency,
                lambda body: server.stream(dialect.endpoint, body),
                advance,
            )
    counters = grown(before, read_counters(await server.metrics()))
    limits = dict(args.goodput) if args.goodput else None
    summary = summarise(records, planned, args.metric_percentiles, limits)
    return Point(load, summary, watch.health(), counters, records)


class _Progress:
    """A bar on stderr, if that is a terminal."""

    def __init__(self, total: int, label: str, hidden: bool) -> None:
        from rich.console import Console
        from rich.progress import Progress

        off = hidden or not sys.stderr.isatty()
        self._bar = Progress(
            console=Console(file=sys.stderr), transient=True, refresh_per_second=2, disable=off
        )
        self._task = self._bar.add_task(label, total=total)

    def __enter__(self) -> Callable[[Record], None]:
        self._bar.start()
        return lambda _: self._bar.advance(self._task)

    def __exit__(self, *_: object) -> None:
        self._bar.stop()


def _workload(args: argparse.Namespace, conversations: list[Conversation]) -> str:
    turns = f", up to {args.multi_turn} turns each" if args.multi_turn > 1 else ""
    if args.dataset_name == "trace":
        scale = "" if args.trace_length_scale == 1 else f", lengths x {args.trace_length_scale:g}"
        return (
            f"trace {args.dataset_path.name}: {len(conversations)} requests, {args.speed:g} x as fast{scale}"
        )
    if args.dataset_name == "jsonl":
        return f"{args.dataset_path.name}: {len(conversations)} conversations{turns}"
    spread = f" +- {args.random_range_ratio:.0%}" if args.random_range_ratio else ""
    shared = (
        f" after one of {args.num_prefixes} prefixes of {args.random_prefix_len}"
        if args.random_prefix_len
        else ""
    )
    return (
        f"random: {len(conversations)} conversations{turns}, {args.random_input_len} tokens in{shared}, "
        f"{args.random_output_len} out{spread}"
    )


def _check_lengths(conversations: list[Conversation], longest: int | None) -> None:
    lengths = [length for conversation in conversations if (length := conversation.longest) is not None]
    if longest is not None and lengths and max(lengths) > longest:
        raise BenchError(
            f"The longest conversation has {max(lengths)} tokens with its answers; "
            f"the server's context has {longest}.",
            remedy="Shorten the lengths, or lower --trace-length-scale or --multi-turn.",
        )


def _plain(value: Any) -> Any:
    """Fit for JSON, which has no paths and no infinity."""
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return "inf" if isinstance(value, float) and math.isinf(value) else value
