"""Speed of the native mixture of experts, against what memory and cores of this machine allow.

    python benchmarks/moe.py [--shape full|small] [--tokens 1 8 2048]

`full` is one layer of K3.1 Pro with 64 of its experts in memory (1.1 GB); `small` a layer of a small model.
Weights are random MXFP4 codes. Decode reads each expert that is hit once: its ratio is to the read
bandwidth. Prefill is bound by arithmetic: its ratio is that of the operator's products to the bfloat16 peak.
Times are medians of `--runs` runs; limits are measured next to each row, over the memory of the experts.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from longspan.config import ActivationConfig
from longspan.ops.ffn import FfnWeights
from longspan.ops.moe import ExpertWeights, LatentProjection, MoeWeights, MxfpWeight
from longspan.ops.native.extension import extension
from longspan.ops.native.moe import moe_output, routed_experts
from longspan.ops.router import RouterWeights, route

SITU = ActivationConfig("situ", beta=4.0, linear_beta=25.0)


@dataclass(frozen=True)
class Shape:
    hidden: int
    latent: int
    width: int
    experts: int
    top_k: int
    shared: int


SHAPES = {
    "full": Shape(hidden=7168, latent=3584, width=3072, experts=64, top_k=16, shared=6144),
    "small": Shape(hidden=1024, latent=512, width=448, experts=40, top_k=4, shared=896),
}


def make_weights(shape: Shape) -> tuple[MoeWeights, Tensor]:
    """The weights, and the memory that holds the codes of all experts: at least 512 MB, beyond any cache."""
    s = shape
    needed = s.experts * 3 * s.width * s.latent // 2
    memory = torch.randint(0, 256, (max(needed, 2**29),), dtype=torch.uint8)
    used = 0

    def dense(rows: int, cols: int) -> Tensor:
        return torch.randn(rows, cols, dtype=torch.bfloat16) / cols**0.5

    def packed(rows: int, cols: int) -> MxfpWeight:
        nonlocal used
        codes = memory[used : (used := used + rows * cols // 2)].view(rows, cols // 2)
        return MxfpWeight(codes, torch.randint(118, 122, (rows, cols // 32), dtype=torch.uint8))

    bank = [
        ExpertWeights(packed(s.width, s.latent), packed(s.width, s.latent), packed(s.latent, s.width))
        for _ in range(s.experts)
    ]
    router = RouterWeights(dense(s.experts, s.hidden), torch.zeros(s.experts), s.top_k, 1, 1, True, 2.5)
    latent = LatentProjection(
        dense(s.latent, s.hidden), torch.ones(s.latent, dtype=torch.bfloat16), dense(s.hidden, s.latent)
    )
    shared = FfnWeights(dense(s.shared, s.hidden), dense(s.shared, s.hidden), dense(s.hidden, s.shared), SITU)
    return MoeWeights(router, latent, bank, shared, SITU, 1e-5), memory


def median(work: Callable[[Tensor], object], inputs: list[Tensor]) -> float:
    times = []
    for x in inputs:  # once for the caches and the page tables
        work(x)
    for x in inputs:
        began = time.perf_counter()
        work(x)
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def nbytes(*weights: Tensor | MxfpWeight) -> int:
    return sum(w.packed.nbytes + w.scale.nbytes if isinstance(w, MxfpWeight) else w.nbytes for w in weights)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--shape", default="small", choices=SHAPES)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 2048])
    parser.add_argument("--runs", type=int, default=9)
    args = parser.parse_args()

    shape, native = SHAPES[args.shape], extension()
    weights, memory = make_weights(shape)
    expert = weights.bank[0]
    expert_bytes = nbytes(expert.gate, expert.up, expert.down)
    assert weights.latent and weights.shared
    around_bytes = nbytes(weights.latent.up, weights.shared.gate, weights.shared.up, weights.shared.down)
    # Of bfloat16 weights each has two bytes and takes two operations.
    before_bytes = nbytes(weights.latent.down, weights.router.gate)
    routed_experts(torch.randn(512, shape.hidden, dtype=torch.bfloat16), weights)  # all experts are known

    table = Table(
        "tokens", "operator", "ms", "GB/s", "limit", "ratio", "GFLOP/s", "limit", "ratio",
        title=f"{args.shape}, bfloat16 x MXFP4, {native.num_threads()} threads",
    )  # fmt: skip
    for tokens in args.tokens:
        inputs = [torch.randn(tokens, shape.hidden, dtype=torch.bfloat16) for _ in range(args.runs)]
        hit = statistics.median(float(route(x, weights.router)[0].unique().numel()) for x in inputs)
        pairs = tokens * shape.top_k
        r = torch.randn(tokens, shape.latent, dtype=torch.bfloat16)
        rows = (
            (
                "routed_experts",
                lambda x: routed_experts(x, weights),
                hit * expert_bytes + before_bytes,
                pairs * 6 * shape.latent * shape.width + tokens * before_bytes,
            ),
            (
                "moe_output",
                lambda x, r=r: moe_output(r, x, weights),
                around_bytes,
                tokens * around_bytes,
            ),
        )
        for name, work, read, operations in rows:
            seconds = median(work, inputs)
            bandwidth = max(native.read_bandwidth(memory.data_ptr(), memory.nbytes) for _ in range(3))
            peak = max(native.bf16_peak(1_000_000) for _ in range(3))
            speed, arithmetic = read / seconds / 1e9, operations / seconds / 1e9
            table.add_row(
                str(tokens), name, f"{seconds * 1e3:.3f}",
                f"{speed:.1f}", f"{bandwidth:.1f}", f"{speed / bandwidth:.0%}",
                f"{arithmetic:.0f}", f"{peak:.0f}", f"{arithmetic / peak:.0%}",
            )  # fmt: skip
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
