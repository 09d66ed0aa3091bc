"""Decode context parallel at the sizes of K3.1 Pro: what a rank receives, and two ways of doing it.

    python benchmarks/parallel.py [--runs 7] [--ranks 8]

Ranks are processes of this machine over gloo and loopback; a rank has one thread. Three tables:

    traffic    bytes a rank receives for a token of a full-attention layer, counted in a step of two tokens
               of a sequence of `TOKENS`, beside the formula of `parallel/context.py`; and what it would be
               if queries, or the index keys of the others, were gathered
    outputs    partial outputs exchanged and merged as they arrive, against all partial outputs gathered on
               every rank and then merged at once
    choice     candidates gathered and merged, against index keys gathered (their scores still to be made)

Seconds are medians of `--runs` on rank 0. With more ranks than processors they tell little of a cluster.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from math import ceil
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor

from longspan.config import parse_config
from longspan.ops.backend import select_backend
from longspan.ops.batch import MlaView, StepBatch
from longspan.ops.shard import Shard
from longspan.parallel.context import ContextParallel, merge_ranks
from longspan.parallel.group import Group
from longspan.parallel.layout import Layout
from longspan.parallel.traffic import Traffic
from longspan.shapes import SHAPES, published_config

CONFIG = parse_config(published_config(SHAPES["real-layer"]))
TENSOR = 8  # ranks that share out the heads, in the tables of times
HEADS = CONFIG.mla.num_heads // TENSOR
LATENT, ROPE = CONFIG.mla.kv_lora_rank, CONFIG.mla.qk_rope_head_dim
assert CONFIG.indexer
INDEX, TOP_K = CONFIG.indexer, CONFIG.indexer.top_k
TOKENS = 20_001
PAGE = 64


class Row(NamedTuple):
    """One line of a table."""

    table: str
    size: int
    cells: tuple[Any, ...]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--ranks", type=int, default=8)
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    context = multiprocessing.get_context("spawn")
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as directory:
        here, there = context.Pipe()
        processes = [
            context.Process(target=work, args=(rank, args.ranks, args.runs, f"{directory}/store", there))
            for rank in range(args.ranks)
        ]
        for process in processes:
            process.start()
        there.close()
        while row := here.recv():
            rows.append(row)
        for process in processes:
            process.join()
    report(rows)


def report(rows: list[Row]) -> None:
    headings = {
        "traffic": ("bytes of", "counted", "formula", "gathered instead"),
        "outputs": ("rows", "streaming", "gathered, then merged", "ratio", "MB received", "MB gathered"),
        "choice": ("tokens", "candidates", "index keys gathered", "ratio", "KB received", "KB gathered"),
    }
    console = Console(width=110)
    for name, columns in headings.items():
        table = Table(title=name)
        for column in ("ranks", *columns):
            table.add_column(column, justify="right")
        for row in rows:
            if row.table == name:
                table.add_row(str(row.size), *map(str, row.cells))
        console.print(table)


def work(rank: int, ranks: int, runs: int, store: str, results: Connection) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    select_backend().use_threads(1, [])
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    torch.manual_seed(0)
    for size in (2, 4, 8):
        if size > ranks:
            break
        members = dist.new_group(list(range(size)))
        if rank < size:
            group = Group(members, Traffic())
            rows = traffic(group)
            if size <= 4:
                rows += [outputs(group, tokens, runs) for tokens in (1, 64, 512)]
                rows += [choice(group, tokens, runs) for tokens in (8192, 65536)]
            if rank == 0:
                for row in rows:
                    results.send(row)
        dist.barrier()
    if rank == 0:
        results.send(None)


def traffic(group: Group) -> list[Row]:
    """Two tokens of one sequence through the operators, index keys and latents dealt one by one."""
    layout = Layout(CONFIG, tensor=group, context=group)
    context = ContextParallel(select_backend(), layout)
    shard, heads = layout.shard, layout.context_heads
    here = shard.count(TOKENS)
    pages = ceil(here / PAGE)
    view = MlaView(
        torch.randn(pages, PAGE, LATENT + ROPE).bfloat16(),
        torch.randn(pages, PAGE, INDEX.head_dim).bfloat16(),
    )
    batch = StepBatch(
        token_ids=torch.zeros(2, dtype=torch.int64),
        query_starts=torch.tensor([0, 2]),
        context_lens=torch.tensor([TOKENS - 2]),
        block_tables=torch.arange(pages)[None],
        slot_mapping=torch.tensor([-1, -1]),
        state_slots=torch.tensor([0]),
        logit_rows=torch.arange(2),
        shard=shard,
    )
    torch.manual_seed(0)
    query = torch.randn(2, heads, LATENT + ROPE).bfloat16()
    index_query = torch.randn(2, INDEX.num_heads, INDEX.head_dim).bfloat16()
    group.traffic.clear()
    selected = context.index_select(index_query, torch.randn(2, INDEX.num_heads), view, batch, TOP_K)
    context.sparse_attention(query, view, batch, selected, LATENT, 0.1)
    counted, others = group.traffic, group.size - 1
    own = CONFIG.mla.num_heads // group.size
    candidates = others * min(TOP_K, ceil(TOKENS / group.size)) * 8
    partial = others * own * (LATENT + 1) * 4
    keys = (TOKENS - here) * INDEX.head_dim * 2
    queries = others * own * (LATENT + ROPE) * 2 + partial
    return [
        Row(
            "traffic",
            group.size,
            (
                "candidates",
                f"{counted.per_row('candidates'):,.0f}",
                f"{candidates:,}",
                f"{keys:,} of index keys",
            ),
        ),
        Row(
            "traffic",
            group.size,
            ("outputs", f"{counted.per_row('outputs'):,.0f}", f"{partial:,}", f"{queries:,} with queries"),
        ),
    ]


def outputs(group: Group, tokens: int, runs: int) -> Row:
    out, lse = torch.randn(tokens, HEADS * group.size, LATENT), torch.randn(tokens, HEADS * group.size)
    own = slice(group.rank * HEADS, (group.rank + 1) * HEADS)

    ops = select_backend()

    def streaming() -> Tensor:
        return merge_ranks(ops, group, out, lse)[0]

    def gathered() -> Tensor:
        everything = group.all_gather(torch.cat([out, lse[..., None]], -1), "outputs")[:, :, own]
        weights = everything[..., -1:].softmax(0)
        return (weights * everything[..., :-1]).sum(0)

    torch.testing.assert_close(streaming(), gathered(), atol=1e-4, rtol=0)
    received = (group.size - 1) * tokens * HEADS * (LATENT + 1) * 4 / 1e6
    return compare(group, "outputs", tokens, runs, streaming, gathered, received, received * group.size)


def choice(group: Group, tokens: int, runs: int) -> Row:
    """One row, whose keys are here in the order of the shard."""
    shard = Shard(group.rank, group.size)
    here = shard.count(tokens)
    keys = torch.randn(here, INDEX.head_dim).bfloat16()
    width = min(TOP_K, ceil(tokens / group.size))
    candidates = (torch.randint(2**31, (1, width)) << 32).sort(descending=True).values
    merge = select_backend().merge_candidates

    def exchanged() -> Tensor:
        return merge(group.all_gather(candidates, "candidates"), shard, TOP_K)

    def gathered() -> Tensor:
        return group.all_gather(keys, "candidates")

    received = (group.size - 1) * width * 8 / 1e3
    whole = (group.size - 1) * keys.nbytes / 1e3
    return compare(group, "choice", tokens, runs, exchanged, gathered, received, whole)


def compare(
    group: Group,
    table: str,
    what: int,
    runs: int,
    ours: Callable[[], Tensor],
    other: Callable[[], Tensor],
    received: float,
    gathered: float,
) -> Row:
    """The two take turns."""
    seconds: dict[Callable[[], Tensor], list[float]] = {ours: [], other: []}
    for _ in range(runs + 1):
        for run, taken in seconds.items():
            group.all_reduce(torch.zeros(1, 1), "sums")
            began = time.perf_counter()
            run()
            taken.append(time.perf_counter() - began)
    a, b = (statistics.median(taken[1:]) for taken in seconds.values())
    cells = (f"{what:,}", f"{a * 1e3:.2f} ms", f"{b * 1e3:.2f} ms", f"{b / a:.1f}")
    return Row(table, group.size, (*cells, f"{received:,.2f}", f"{gathered:,.2f}"))


if __name__ == "__main__":
    main()
