"""`longspan bench`: flags, what is refused before anything is read, and the order of the run."""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

from longspan.engine.options import (
    AUTO_DTYPE,
    ELEMENT_BYTES,
    EngineOptions,
    add_index_key_argument,
    add_thread_arguments,
)
from longspan.errors import CapacityError
from longspan.memory.sizes import bytes_per_sequence, bytes_per_token

if TYPE_CHECKING:
    from longspan.bench.report import Report
    from longspan.config import ModelConfig

DEPTHS = (0, 4096, 16384, 65536, 131072)
LIMIT_MEASUREMENTS = 3  # before the steps, and again after
_TABLE_WIDTH = 96  # a narrower terminal wraps: better than a figure cut short


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", type=Path, help="checkpoint directory in the published format")
    group = parser.add_argument_group("what is measured")
    group.add_argument(
        "--depth",
        type=_depths,
        metavar="LIST",
        help="tokens in memory before the step, as in 0,4K,1M (default: those of 0,4K,16K,64K,128K that the "
        "model was made for)",
    )
    group.add_argument(
        "--batch", type=_count, default=1, metavar="N", help="sequences that decode at once (default: 1)"
    )
    group.add_argument(
        "--prefill-chunk",
        type=int,
        default=2048,
        metavar="N",
        help="tokens of a prefill step, of one sequence; 0 leaves prefill out (default: %(default)s)",
    )
    group.add_argument(
        "--steps",
        type=_count,
        metavar="N",
        help="steps of which the median is taken (default: as many as fit in two seconds, 3 to 50)",
    )
    group = parser.add_argument_group("engine")
    group.add_argument(
        "--dtype", choices=list(ELEMENT_BYTES), default=AUTO_DTYPE, help="default: %(default)s"
    )
    add_index_key_argument(group)
    group.add_argument(
        "--backend",
        metavar="NAME",
        help="operator table; torch pins the reference (default: the best there is)",
    )
    add_thread_arguments(group)
    group = parser.add_argument_group("output, beside the table")
    group.add_argument("--json", type=Path, metavar="FILE", help="all figures, as longspan.bench.report says")
    group.add_argument("--plot", type=Path, metavar="FILE", help="tokens/s by depth (.png, .svg or .pdf)")


def main(args: argparse.Namespace) -> int:
    """Raises LongspanError, for what can't be measured before it reads any weights."""
    from longspan.config import load_config

    config = load_config(args.model)
    depths = _checked_depths(config, args.depth)
    _check(args, config, depths)

    from rich.console import Console

    report = _measure(args, config, depths)
    console = Console(markup=False, highlight=False, soft_wrap=True)
    console.width = max(console.width, _TABLE_WIDTH)
    console.print(report.heading() + "\n")
    console.print(report.table())
    if args.json:
        args.json.write_text(json.dumps(report.as_dict(), indent=2) + "\n")
    if args.plot:
        report.plot(args.plot)
    return 0


def _measure(args: argparse.Namespace, config: ModelConfig, depths: list[int]) -> Report:
    from longspan.bench.measure import Bench
    from longspan.bench.report import Report, Row
    from longspan.bench.workload import Step, work_of
    from longspan.formats.progress import track
    from longspan.model.loader import load_model
    from longspan.ops.backend import select_backend
    from longspan.ops.limits import machine_limits, weight_bytes

    options = EngineOptions(backend=args.backend, threads=args.threads, cpus=args.cpus)
    select_backend(options.backend).use_threads(options.threads, options.cpus)
    model = load_model(args.model, args.dtype, args.backend)
    weights = weight_bytes(model.weights.lm_head)
    before = [machine_limits(weights) for _ in range(LIMIT_MEASUREMENTS)]
    bench = Bench(model, args.batch, _longest(args, config, depths), args.index_key_dtype)
    bench.warm_up()
    steps = [("prefill", Step(1, args.prefill_chunk, depth)) for depth in depths if args.prefill_chunk]
    steps += [("decode", Step(args.batch, 1, depth)) for depth in depths]
    rows = [
        Row(
            phase,
            step,
            work_of(config, step, ELEMENT_BYTES[args.dtype], args.index_key_dtype),
            bench.time(step, args.steps),
        )
        for phase, step in track(steps, "Measuring")
    ]
    after = [machine_limits(weights) for _ in range(LIMIT_MEASUREMENTS)]
    return Report(
        model=args.model.resolve().name,
        family=config.family,
        dtype=args.dtype,
        index_key_dtype=args.index_key_dtype,
        backend=model.ops.name,
        measurements=before + after,
        rows=rows,
    )


def _checked_depths(config: ModelConfig, asked: list[int] | None) -> list[int]:
    """Steps at the last depth may reach beyond it: the model has no positions that could run out."""
    longest = config.max_position
    if asked is None:
        return [depth for depth in DEPTHS if depth <= longest]
    if max(asked) > longest:
        raise CapacityError(
            f"--depth {max(asked)} is beyond the {longest} tokens that the model was made for.",
            remedy=f"Give at most {longest}.",
        )
    return sorted(set(asked))


def _longest(args: argparse.Namespace, config: ModelConfig, depths: list[int]) -> int:
    """Tokens of one sequence, with those of the step; enough to warm up with."""
    from longspan.bench.measure import warm_up_tokens

    return max(max(depths) + max(args.prefill_chunk, 1), warm_up_tokens(config))


def _check(args: argparse.Namespace, config: ModelConfig, depths: list[int]) -> None:
    if args.prefill_chunk < 0:
        raise CapacityError(
            f"--prefill-chunk is {args.prefill_chunk}.",
            remedy="Give a number of tokens, or 0 for no prefill.",
        )
    if args.index_key_dtype != "auto" and config.indexer is None:
        raise CapacityError(
            f"--index-key-dtype is {args.index_key_dtype}, but this model has no sparse indexer.",
            remedy="Leave it out.",
        )
    if args.plot and importlib.util.find_spec("matplotlib") is None:
        raise CapacityError(
            "--plot needs matplotlib, which is not installed.", remedy="pip install 'longspan[bench]'"
        )
    for flag, file in (("--json", args.json), ("--plot", args.plot)):
        if file and not file.resolve().parent.is_dir():
            raise CapacityError(
                f"{flag} {file}: {file.parent} is no directory.", remedy="Make it, or choose another."
            )
    _check_memory(args, config, depths)


def _check_memory(args: argparse.Namespace, config: ModelConfig, depths: list[int]) -> None:
    from longspan.memory.activations import activation_bytes
    from longspan.memory.plan import available_memory, show_bytes

    element = ELEMENT_BYTES[args.dtype]
    token = args.batch * bytes_per_token(config, element, args.index_key_dtype).total
    fixed = args.batch * bytes_per_sequence(config, element).total
    fixed += activation_bytes(config, max(args.prefill_chunk, args.batch), args.batch, element)
    needed, available = fixed + token * _longest(args, config, depths), available_memory()
    if needed > available:
        deepest = (available - fixed) // token - max(args.prefill_chunk, 1)
        raise CapacityError(
            f"Depth {max(depths)} with {args.batch} sequences takes {show_bytes(needed)} beside the weights; "
            f"{show_bytes(available)} are free.",
            remedy=f"The deepest that fits is {deepest}."
            if deepest > 0
            else "Lower --prefill-chunk or --batch.",
        )


def _depths(text: str) -> list[int]:
    """ "0,4K,1M" -> [0, 4096, 1048576]."""
    found = [re.fullmatch(r"(\d+)([KM]?)", part.strip().upper()) for part in text.split(",")]
    if not all(found):
        raise argparse.ArgumentTypeError(f"{text!r} is no list of depths such as 0,4K,1M")
    return [int(m[1]) * {"": 1, "K": 2**10, "M": 2**20}[m[2]] for m in found if m]


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least 1")
    return int(text)
