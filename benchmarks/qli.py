"""The lightning indexer against what the machine can do: seconds of one call, top-k included.

    python benchmarks/qli.py [--runs 7] [--seed 0]

The limit of a case is the larger of streaming its keys once from memory and its multiply-accumulates at the
peak of their kind, both measured in the same run. Keys, queries and weights are random; medians of `--runs`.

A second table has what one rank does where the keys are dealt to several (DCP): the candidates of its share,
sorted and packed, beside `index_select` from all keys; and what it takes of all ranks' candidates.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from rich.console import Console
from rich.table import Table

from longspan.ops.batch import QUAD, MlaView, QuantizedKeys, StepBatch
from longspan.ops.limits import MachineLimits, machine_limits
from longspan.ops.native.extension import extension
from longspan.ops.native.indexer import index_candidates, index_select, merge_candidates
from longspan.ops.shard import Shard

PAGE_SIZE = 64
DIM = 128
TOP_K = 2048
RANKS = (1, 2, 4)
K = 1024


@dataclass(frozen=True)
class Case:
    name: str
    keys: str  # bf16 or int8
    heads: int
    tokens: int  # of each sequence, its new rows included
    rows: int = 1  # new rows of each sequence
    sequences: int = 1

    @property
    def operations(self) -> float:
        visible = self.rows * (self.tokens - (self.rows - 1) / 2)
        return 2 * self.heads * DIM * visible * self.sequences

    @property
    def key_bytes(self) -> float:
        return self.sequences * self.tokens * (2 * DIM if self.keys == "bf16" else DIM + 4)

    def limit(self, machine: MachineLimits) -> float:
        peak = machine.bf16_operations if self.keys == "bf16" else machine.int8_operations
        return max(self.key_bytes / machine.read_bytes, self.operations / peak)


CASES = [
    Case("decode", "int8", 32, 1024 * K),
    Case("decode", "bf16", 32, 1024 * K),
    Case("decode", "int8", 16, 128 * K),
    Case("decode", "bf16", 16, 128 * K),
    Case("decode, 16 sequences", "int8", 32, 16 * K, sequences=16),
    Case("decode, 16 sequences", "bf16", 32, 16 * K, sequences=16),
    Case("prefill", "int8", 16, 16 * K, rows=2 * K),
    Case("prefill", "bf16", 16, 16 * K, rows=2 * K),
]


def memory_of(case: Case, ranks: int = 1) -> tuple[MlaView, StepBatch]:
    """Scrambled pages of a rank's random keys, and the last rows of each sequence."""
    pages = case.tokens // PAGE_SIZE // ranks
    count = pages * case.sequences
    if case.keys == "bf16":
        keys = torch.randn(count, PAGE_SIZE, DIM).bfloat16()
    else:
        codes = torch.randint(1, 256, (count, DIM // QUAD, PAGE_SIZE, QUAD), dtype=torch.uint8)
        keys = QuantizedKeys(codes, torch.rand(count, PAGE_SIZE) / 100 + 0.01)
    rows = case.rows * case.sequences
    batch = StepBatch(
        token_ids=torch.zeros(rows, dtype=torch.int64),
        query_starts=torch.arange(case.sequences + 1) * case.rows,
        context_lens=torch.full((case.sequences,), case.tokens - case.rows),
        block_tables=torch.randperm(count).view(case.sequences, pages),
        slot_mapping=torch.zeros(rows, dtype=torch.int64),
        state_slots=torch.arange(case.sequences),
        logit_rows=torch.arange(rows),
        shard=Shard(0, ranks, PAGE_SIZE),
    )
    return MlaView(torch.empty(0), keys), batch


def asked_of(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    rows = case.rows * case.sequences
    return torch.randn(rows, case.heads, DIM, dtype=torch.bfloat16), torch.randn(rows, case.heads)


def seconds(call: Callable[[], object], runs: int) -> float:
    times = []
    for _ in range(runs + 1):  # the first is the warm-up
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return statistics.median(times[1:])


def select_seconds(case: Case, runs: int) -> float:
    (query, weight), (view, batch) = asked_of(case), memory_of(case)
    batch = replace(batch, shard=Shard())
    return seconds(lambda: index_select(query, weight, view, batch, TOP_K), runs)


def rank_seconds(case: Case, ranks: int, runs: int) -> tuple[float, float]:
    """Of a rank's candidates, and of taking its own out of those of all ranks."""
    (query, weight), (view, batch) = asked_of(case), memory_of(case, ranks)
    candidates = seconds(lambda: index_candidates(query, weight, view, batch, TOP_K), runs)
    batches = [replace(batch, shard=Shard(rank, ranks, PAGE_SIZE)) for rank in range(ranks)]
    everyone = torch.stack([index_candidates(query, weight, view, b, TOP_K) for b in batches])
    return candidates, seconds(lambda: merge_candidates(everyone, batch.shard, TOP_K), runs)


def print_limits(runs: int) -> None:
    machine = machine_limits()
    table = Table("", "keys", "heads", "tokens", "rows", "ms", "limit, ms", "of the limit")
    table.title = (
        f"index_select, dim {DIM}, top-k {TOP_K}, {machine.threads} threads: "
        f"{machine.read_bytes / 1e9:.0f} GB/s, bf16 {machine.bf16_operations / 1e9:.0f} GFLOP/s, "
        f"int8 {machine.int8_operations / 1e9:.0f} GOP/s"
    )
    for case in CASES:
        took, limit = select_seconds(case, runs), case.limit(machine)
        size = f"{case.tokens // K} K"
        row = (case.name, case.keys, f"{case.heads}", size, f"{case.rows * case.sequences}")
        table.add_row(*row, f"{took * 1e3:.2f}", f"{limit * 1e3:.2f}", f"{limit / took:.0%}")
    Console(width=110).print(table)


def print_shards(runs: int) -> None:
    table = Table("", "keys", "heads", "tokens", "rows", "index_select")
    for ranks in RANKS:
        table.add_column(f"{ranks} rank{'s' * (ranks > 1)}")
    table.title = f"ms of one rank, candidates + merge, dim {DIM}, top-k {TOP_K}"
    for case in CASES:
        row = (
            case.name,
            case.keys,
            f"{case.heads}",
            f"{case.tokens // K} K",
            f"{case.rows * case.sequences}",
        )
        whole = f"{select_seconds(case, runs) * 1e3:.2f}"
        shares = [rank_seconds(case, ranks, runs) for ranks in RANKS]
        table.add_row(*row, whole, *(f"{c * 1e3:.2f} + {m * 1e3:.2f}" for c, m in shares))
    Console(width=110).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shards", action="store_true", help="the second table alone")
    args = parser.parse_args()
    extension().keep_freed_memory()  # as the engine does: no page is faulted in again
    torch.manual_seed(args.seed)
    if not args.shards:
        print_limits(args.runs)
    print_shards(args.runs)


if __name__ == "__main__":
    main()
