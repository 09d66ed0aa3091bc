"""Speed of the native attention over cached latents, beside what the machine can do at most.

    python benchmarks/qsfa.py [--dtype float32] [--runs 9] [--only sparse]

QSFA is attention to selected entries of the cache. FLOPs are those of the absorbed form, 2 (2 rank + rope)
for each head and attended token; bytes are those of the attended rows, each read once. Both limits are
measured in the same run; the last column names the nearer one and says how much of it is reached. Medians
of `--runs` calls, each with other selected tokens.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.table import Table

from longspan import large_pages
from longspan.ops.batch import MlaView, StepBatch
from longspan.ops.limits import machine_limits
from longspan.ops.native.extension import choose
from longspan.ops.native.sparse_attention import sparse_attention

RANK, ROPE, PAGE = 512, 64, 64
MINI, PRO = 16, 96  # heads


@dataclass(frozen=True)
class Case:
    name: str
    heads: int
    rows: int
    context: int
    top_k: int | None = None  # None: dense


CASES = (
    Case("sparse decode, 2,048 of 1 M", PRO, 1, (1 << 20) - 1, 2048),
    Case("sparse decode, 2,048 of 1 M, 8 rows", PRO, 8, (1 << 20) - 8, 2048),
    Case("sparse decode, 2,048 of 1 M", MINI, 1, (1 << 20) - 1, 2048),
    Case("sparse prefill, 2,048 rows x 2,048 of 16 K", MINI, 2048, 14336, 2048),
    Case("sparse prefill, 256 rows x 2,048 of 16 K", PRO, 256, 16128, 2048),
    Case("dense decode at 16 K", MINI, 1, 16383),
    Case("dense decode at 128 K", MINI, 1, 131071),
    Case("dense decode at 16 K", PRO, 1, 16383),
    Case("dense prefill, 2,048 rows at 0", MINI, 2048, 0),
    Case("dense prefill, 512 rows at 16 K", MINI, 512, 15872),
)


def memory(tokens: int, dtype: torch.dtype) -> torch.Tensor:
    """Pages of one sequence, in large pages of the system where it gives any; what they hold repeats."""
    shape = (tokens // PAGE, PAGE, RANK + ROPE)
    pages = large_pages.empty(shape, dtype)
    some = torch.randn(64, *shape[1:]).to(dtype)
    for begin in range(0, len(pages), len(some)):
        pages[begin : begin + len(some)] = some[: len(pages) - begin]
    return pages


def batch_of(case: Case, pages: torch.Tensor) -> StepBatch:
    slots = torch.arange(case.rows)
    return StepBatch(
        token_ids=slots,
        query_starts=torch.tensor([0, case.rows]),
        context_lens=torch.tensor([case.context]),
        block_tables=torch.randperm(len(pages))[None],
        slot_mapping=slots,
        state_slots=torch.zeros(1, dtype=torch.int64),
        logit_rows=slots,
    )


def selection(case: Case, batch: StepBatch) -> torch.Tensor | None:
    """Random visible tokens of each row, ascending, as the indexer lists them."""
    if case.top_k is None:
        return None
    ends = batch.row_positions[:, None] + 1
    return (torch.rand(case.rows, case.top_k, dtype=torch.float64) * ends).long().sort(-1).values


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--only", default="", help="only the cases whose name holds this")
    args = parser.parse_args()
    torch.manual_seed(0)
    if choose().module is None:
        raise SystemExit(choose().reason)
    dtype = getattr(torch, args.dtype)
    cases = [case for case in CASES if args.only in case.name]
    pages = memory(max(case.context + case.rows for case in cases), dtype)
    view = MlaView(pages, None)

    limits = machine_limits()
    peak, bandwidth = limits.bf16_operations / 1e9, limits.read_bytes / 1e9
    title = f"{args.dtype}, {limits.threads} threads; {peak:,.0f} GFLOP/s (bfloat16), {bandwidth:.1f} GB/s"
    table = Table("", "heads", "ms", "GFLOP/s", "GB/s", "of peak", "nearest limit", title=title)
    for case in cases:
        batch = batch_of(case, pages)
        # Fresh tokens for each call: what the last one read is still in the cache.
        selections = [selection(case, batch) for _ in range(args.runs)]
        query = torch.randn(case.rows, case.heads, RANK + ROPE).to(dtype)
        seconds = []
        for selected in selections:
            began = time.perf_counter()
            sparse_attention(query, view, batch, selected, RANK, (RANK + ROPE) ** -0.5)
            seconds.append(time.perf_counter() - began)
        took = statistics.median(seconds)
        if selected is None:
            pairs, read = int((batch.row_positions + 1).sum()), case.context + case.rows
        else:
            pairs, read = selected.numel(), min(selected.numel(), case.context + case.rows)
        flops = 2 * pairs * case.heads * (2 * RANK + ROPE) / took / 1e9
        rate = read * (RANK + ROPE) * dtype.itemsize / took / 1e9
        of_peak, of_bandwidth = flops / peak, rate / bandwidth
        limit = f"compute, {of_peak:.0%}" if of_peak > of_bandwidth else f"memory, {of_bandwidth:.0%}"
        numbers = (f"{took * 1e3:.2f}", f"{flops:,.0f}", f"{rate:.1f}", f"{of_peak:.0%}")
        table.add_row(case.name, str(case.heads), *numbers, limit)
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
