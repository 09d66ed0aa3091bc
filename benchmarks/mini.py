"""The claims for the mini shape: decode by depth, dense decode, prefill, batches, each with its yardstick.

    longspan make-checkpoint /tmp/mini --shape mini
    longspan make-checkpoint /tmp/k3-mini --shape mini --family k3
    python benchmarks/mini.py /tmp/mini /tmp/k3-mini [--plot decode.png]

Medians of steps at the model level, memory filled at random. The limits (reads of the very weights, BF16
peak) are measured just before and after the steps they are held against. llama.cpp's figures were measured
once on such a machine: llama-cpp-python 0.3.36, native build, flash attention, f16 cache, K3 shape.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from longspan.bench.measure import Bench
from longspan.bench.workload import Step, work_of
from longspan.model.decoder import Decoder
from longspan.model.loader import load_model
from longspan.ops.backend import select_backend
from longspan.ops.limits import MachineLimits, machine_limits, weight_bytes

K = 1024
DEPTHS = (0, 4 * K, 16 * K, 64 * K, 128 * K)
CHUNK = 2048
TICKS = (25, 50, 100, 200, 400, 800)  # ms
LLAMA_CPP = dict(zip(DEPTHS, (26.3, 16.5, 9.0, 2.84, 1.56), strict=True))  # decode, tokens/s


@dataclass(frozen=True)
class Decode:
    """Decode of one model with one kind of index keys."""

    name: str
    seconds: dict[int, float]  # of a step, by depth
    batch_seconds: float  # of a step of 16 sequences at depth 0
    read_bytes: float  # a second, around the steps at depth 0
    read_share: float  # of them, at depth 0


def decode(name: str, path: Path, keys: str) -> Decode:
    model = load_model(path)
    bench = Bench(model, 16, 128, keys)
    bench.warm_up()
    batch = bench.time(Step(16, 1, 0), 15).median
    bench = Bench(model, 1, 128 * K + 64, keys)
    seconds: dict[int, float] = {}
    reads = [limits_of(model).read_bytes]
    for depth in DEPTHS:
        seconds[depth] = bench.time(Step(1, 1, depth), 25).median
        if depth == 0:
            reads.append(limits_of(model).read_bytes)
    read = statistics.mean(reads)
    work = work_of(model.config, Step(1, 1, 0), 2, keys)
    return Decode(name, seconds, batch, read, work.total_bytes / seconds[0] / read)


def prefill(path: Path, depth: int, keys: str) -> tuple[float, float, float]:
    """Tokens a second, the BF16 peak around it, and the share of it that the weights' operations are."""
    model = load_model(path)
    bench = Bench(model, 1, depth + CHUNK, keys)
    bench.warm_up()
    step = Step(1, CHUNK, depth)
    peaks = [limits_of(model).bf16_operations]
    seconds = bench.time(step, 2).median
    peaks.append(limits_of(model).bf16_operations)
    peak = statistics.mean(peaks)
    return CHUNK / seconds, peak, work_of(model.config, step, 2, keys).weight_operations / seconds / peak


def limits_of(model: Decoder) -> MachineLimits:
    return machine_limits(weight_bytes(model.weights.lm_head))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("k31", type=Path, help="mini checkpoint with an indexer")
    parser.add_argument("k3", type=Path, help="mini checkpoint without")
    parser.add_argument("--plot", type=Path, help="save decode time by depth here")
    args = parser.parse_args()
    select_backend().use_threads(None, ())
    runs = [
        decode("K3.1, bf16 index keys", args.k31, "auto"),
        decode("K3.1, int8 index keys", args.k31, "int8"),
        decode("K3, dense", args.k3, "auto"),
    ]
    prefills = {
        f"depth {depth // K} K{', int8 index keys' * (keys == 'int8')}": prefill(args.k31, depth, keys)
        for depth, keys in ((0, "auto"), (16 * K, "auto"), (16 * K, "int8"))
    }
    console = Console(width=120)
    heads = [f"{depth // K} K" for depth in DEPTHS]
    table = Table("decode, tokens/s", *heads, "batch 16", "reads, GB/s", "of reads, at 0")
    for run in runs:
        first = run.seconds[0]
        speeds = [f"{1 / s:.1f} ({first / s:.0%})" for s in run.seconds.values()]
        batch = f"{16 / run.batch_seconds:.0f} ({16 * first / run.batch_seconds:.1f}x)"
        table.add_row(run.name, *speeds, batch, f"{run.read_bytes / 1e9:.1f}", f"{run.read_share:.0%}")
    dense = runs[-1].seconds
    ratios = [f"{speed:g} (1/{1 / dense[depth] / speed:.1f})" for depth, speed in LLAMA_CPP.items()]
    table.add_row("llama.cpp, K3, dense", *ratios, "", "", "")
    console.print(table)

    table = Table(f"prefill, {CHUNK} tokens", "tokens/s", "BF16 peak, GFLOP/s", "of peak, weights alone")
    for name, (speed, peak, share) in prefills.items():
        table.add_row(name, f"{speed:.0f}", f"{peak / 1e9:.0f}", f"{share:.0%}")
    console.print(table)
    if args.plot:
        plot(runs, args.plot)


def plot(runs: list[Decode], file: Path) -> None:
    from matplotlib.figure import Figure  # pyright: ignore[reportMissingImports]

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    lines = {run.name: run.seconds for run in runs}
    lines["llama.cpp, K3, dense"] = {depth: 1 / speed for depth, speed in LLAMA_CPP.items()}
    for name, seconds in lines.items():
        milliseconds = [1e3 * s for s in seconds.values()]
        axes.plot([depth // K for depth in seconds], milliseconds, marker="o", label=name)
    axes.set(xlabel="depth, thousands of tokens", ylabel="ms per token", title="decode, mini shape")
    axes.set_yscale("log")
    axes.set_yticks(TICKS, labels=map(str, TICKS))
    axes.minorticks_off()
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(file, dpi=120)


if __name__ == "__main__":
    main()
