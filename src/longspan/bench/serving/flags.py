"""Flags of `longspan bench serve`, what they may be, and what makes no sense together."""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from longspan.bench.serving.dialogue import CHAT, COMPLETIONS, OURS
from longspan.bench.serving.metrics import LIMITED
from longspan.bench.serving.report import TITLES
from longspan.errors import BenchError

KEY_VARIABLES = ("LONGSPAN_API_KEY", "OPENAI_API_KEY")
DATASETS = ("random", "trace", "jsonl")
T = TypeVar("T")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    _add_server_arguments(parser)
    _add_load_arguments(parser)
    _add_data_arguments(parser)
    _add_output_arguments(parser)


def _add_server_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("url", nargs="?", help="the server, as http://HOST:PORT (default: --host and --port)")
    group = parser.add_argument_group("server")
    group.add_argument("--base-url", metavar="URL", help="the same as URL")
    group.add_argument("--host", default="127.0.0.1", help="default: %(default)s")
    group.add_argument("--port", type=int, default=8000, help="default: %(default)s")
    group.add_argument("--model", metavar="NAME", help="default: the first of /v1/models")
    group.add_argument(
        "--endpoint",
        choices=(COMPLETIONS, CHAT),
        default=COMPLETIONS,
        help="default: %(default)s",
    )
    key = next((os.environ[name] for name in KEY_VARIABLES if os.environ.get(name)), None)
    group.add_argument(
        "--api-key",
        metavar="KEY",
        default=key,
        help=f"default: {' or '.join('$' + k for k in KEY_VARIABLES)}",
    )
    group.add_argument(
        "--extra-body",
        type=_object,
        default={},
        metavar="JSON",
        help="more fields, as '{\"temperature\": 0}'",
    )
    group.add_argument(
        "--ignore-eos",
        action="store_true",
        help="all answers get their full length (servers that know the field)",
    )
    group.add_argument(
        "--timeout", type=_positive, default=3600, metavar="S", help="of a request (default: %(default)s)"
    )


def _add_load_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("load; lists are swept, every rate with every limit")
    group.add_argument(
        "--num-prompts",
        type=_count,
        metavar="N",
        help="conversations of a point (default: 100, or all of a file)",
    )
    group.add_argument(
        "--request-rate",
        type=_list_of(_rate),
        default=[math.inf],
        metavar="LIST",
        help="conversations that begin a second, as 1,2,4; inf: as fast as --max-concurrency lets them "
        "(default: inf)",
    )
    group.add_argument(
        "--burstiness",
        type=_rate,
        default=1.0,
        metavar="X",
        help="of arrivals: 1 is a Poisson process, less comes in bursts, inf is even (default: 1)",
    )
    group.add_argument(
        "--max-concurrency",
        type=_list_of(_count),
        default=[None],
        metavar="LIST",
        help="requests under way at most, as 1,4,16 (default: no limit)",
    )
    group.add_argument("--warmup", type=_natural, default=1, metavar="N", help="requests before (default: 1)")
    group.add_argument(
        "--seed",
        type=_natural,
        default=0,
        help="of lengths, text and arrivals; with a seed used before, the server's cache may know the text "
        "(default: 0)",
    )


def _add_data_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("conversations")
    group.add_argument("--dataset-name", choices=DATASETS, default="random", help="default: %(default)s")
    group.add_argument("--dataset-path", type=Path, metavar="FILE", help="of trace and jsonl")
    group.add_argument(
        "--random-input-len", type=_count, default=1024, metavar="N", help="default: %(default)s"
    )
    group.add_argument(
        "--random-output-len",
        type=_count,
        default=128,
        metavar="N",
        help="also where a jsonl file has none (default: %(default)s)",
    )
    group.add_argument(
        "--random-range-ratio",
        type=_ratio,
        default=0.0,
        metavar="R",
        help="lengths are uniform within (1 - R) and (1 + R) times (default: 0)",
    )
    group.add_argument(
        "--random-prefix-len",
        type=_natural,
        default=0,
        metavar="N",
        help="tokens before them that conversations share (default: 0)",
    )
    group.add_argument(
        "--num-prefixes", type=_count, default=1, metavar="K", help="of which there are so many (default: 1)"
    )
    group.add_argument(
        "--multi-turn",
        type=_count,
        default=1,
        metavar="N",
        help="turns of a conversation; each goes on from the real answer before (default: 1)",
    )
    group.add_argument(
        "--speed",
        type=_positive,
        default=1.0,
        metavar="X",
        help="replays a trace so many times as fast (default: 1)",
    )
    group.add_argument(
        "--trace-length-scale",
        type=_positive,
        default=1.0,
        metavar="X",
        help="multiplies the lengths of a trace (default: 1)",
    )


def _add_output_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("output, beside the tables")
    group.add_argument(
        "--goodput",
        type=_limit,
        nargs="+",
        metavar="NAME:MS",
        help=f"counts requests within all limits, as ttft:200 tpot:50 (of {', '.join(LIMITED)})",
    )
    group.add_argument(
        "--percentile-metrics",
        type=_list_of(_metric),
        default=list(TITLES),
        metavar="LIST",
        help=f"rows of the table (default: {','.join(TITLES)})",
    )
    group.add_argument(
        "--metric-percentiles",
        type=_list_of(_percentile),
        default=[90.0, 95.0, 99.0],
        metavar="LIST",
        help="default: 90,95,99",
    )
    group.add_argument(
        "--json",
        "--save-result",
        type=Path,
        metavar="FILE",
        help="settings, all figures, a record of each request",
    )
    group.add_argument(
        "--plot", type=Path, metavar="FILE", help="throughput against latency (.png, .svg or .pdf)"
    )
    group.add_argument("--disable-tqdm", "--no-progress", action="store_true", help="draw no progress bar")


def check(args: argparse.Namespace) -> None:
    if args.url and args.base_url:
        raise BenchError("A URL and --base-url were given.", remedy="Give one.")
    if args.dataset_name != "random" and args.dataset_path is None:
        raise BenchError(
            f"--dataset-name {args.dataset_name} needs a file.", remedy="Add --dataset-path FILE."
        )
    if args.dataset_name == "random" and args.dataset_path is not None:
        raise BenchError(
            "--dataset-path is of no use to random.",
            remedy=f"Add --dataset-name {DATASETS[1]} or {DATASETS[2]}.",
        )
    if args.dataset_name == "trace" and args.multi_turn > 1:
        raise BenchError("--multi-turn: a trace has requests of one turn.", remedy="Leave it out.")
    if args.dataset_name == "trace" and args.request_rate != [math.inf]:
        raise BenchError("--request-rate: a trace has its own times.", remedy="Use --speed.")
    for module, flag, wanted in (("aiohttp", "bench serve", True), ("matplotlib", "--plot", args.plot)):
        if wanted and importlib.util.find_spec(module) is None:
            raise BenchError(
                f"{flag} needs {module}, which is not installed.", remedy="pip install 'longspan[bench]'"
            )
    for flag, file in (("--json", args.json), ("--plot", args.plot)):
        if file and not file.resolve().parent.is_dir():
            raise BenchError(
                f"{flag} {file}: {file.parent} is no directory.", remedy="Make it, or choose another."
            )


def _number(text: str, legal: Callable[[float], bool], kind: Callable[[str], T], what: str) -> T:
    try:
        value = kind(text)
    except ValueError:
        value = None
    if value is None or not legal(value):  # type: ignore[arg-type]
        raise argparse.ArgumentTypeError(f"{text!r} is no {what}")
    return value


def _count(text: str) -> int:
    return _number(text, lambda x: x >= 1, int, "whole number of at least 1")


def _natural(text: str) -> int:
    return _number(text, lambda x: x >= 0, int, "whole number of at least 0")


def _rate(text: str) -> float:
    return _number(text, lambda x: x > 0, float, "number above 0, or inf")


def _positive(text: str) -> float:
    return _number(text, lambda x: 0 < x < math.inf, float, "number above 0")


def _ratio(text: str) -> float:
    return _number(text, lambda x: 0 <= x < 1, float, "number from 0 to below 1")


def _percentile(text: str) -> float:
    return _number(text, lambda x: 0 <= x <= 100, float, "percentile from 0 to 100")


def _metric(text: str) -> str:
    if text not in TITLES:
        raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(TITLES)}")
    return text


def _limit(text: str) -> tuple[str, float]:
    """ "ttft:200" -> ("ttft", 0.2)"""
    name, _, limit = text.partition(":")
    if name not in LIMITED:
        raise argparse.ArgumentTypeError(f"{text!r}: the metric is none of {', '.join(LIMITED)}")
    return name, _positive(limit) / 1000


def _object(text: str) -> dict[str, Any]:
    try:
        content = json.loads(text)
    except ValueError:
        content = None
    if not isinstance(content, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON object")
    for name in content.keys() & {*OURS}:
        raise argparse.ArgumentTypeError(f"{name!r} is set by other flags")
    if content.get("n", 1) != 1:
        raise argparse.ArgumentTypeError("'n' must be 1: one answer is timed a request")
    return content


def _list_of(kind: Callable[[str], T]) -> Callable[[str], list[T]]:
    def read(text: str) -> list[T]:
        return [kind(part.strip()) for part in text.split(",")]

    read.__name__ = "list"
    return read
