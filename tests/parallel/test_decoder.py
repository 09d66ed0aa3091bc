"""The whole decoder over several ranks against the decoder of one process, in float32."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch
from support.rank_cases import Fork, Script, Split, Trace, run_script, run_split
from support.ranks import Ranks
from torch import Tensor

import longspan
from longspan.ops.backend import backends
from longspan.ops.shard import WHOLE

TOLERANCE = 1e-4
BACKENDS = list(backends())


def ids(seed: int, count: int) -> list[int]:
    return torch.randint(0, 61, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def chunked_script() -> Script:
    """Prompts in chunks and decoding, mixed: 40 tokens of one sequence, 21 and 9 of others."""
    a, b, c = ids(1, 40), ids(2, 21), ids(3, 9)
    steps = [
        {0: a[:5]},
        {0: a[5:22], 1: b[:3]},
        {1: b[3:18], 0: a[22:23], 2: c[:7]},
        *({0: a[23 + i : 24 + i], 1: b[18 + i : 19 + i], 2: c[7 + i : 8 + i]} for i in range(2)),
        {0: a[25:40], 1: b[20:]},
    ]
    return Script(steps, num_seqs=3, max_tokens=40)


@cache
def alone(path: Path, backend: str) -> longspan.model.decoder.Decoder:
    return longspan.load_model(path, dtype="float32", backend=backend)


def check(traces: list[Trace], reference: Trace) -> None:
    """Every rank has the logits of the one process; together the ranks chose and hold what it did."""
    for trace in traces:
        for got, want in zip(trace.logits, reference.logits, strict=True):
            assert got.keys() == want.keys()
            for seq in want:
                torch.testing.assert_close(got[seq], want[seq], atol=TOLERANCE, rtol=0)
    by_shard = {trace.shard: trace for trace in traces}.values()
    for step, chosen in enumerate(reference.selected):
        for layer, want in enumerate(chosen):
            got = torch.cat([trace.selected[step][layer] for trace in by_shard], 1)
            assert rows(got) == rows(want)
    for seq, keys in enumerate(reference.keys):
        for layer, want in enumerate(keys):
            whole = torch.full_like(want, torch.nan)
            for trace in by_shard:
                mine = trace.keys[seq][layer]
                whole[trace.shard.position(torch.arange(len(mine)))] = mine
            assert sum(len(trace.keys[seq][layer]) for trace in by_shard) == len(want)
            torch.testing.assert_close(whole, want, atol=TOLERANCE, rtol=0)


def rows(selected: Tensor) -> list[list[int]]:
    """What is chosen, ascending: a token chosen on two ranks shows up twice."""
    return [sorted(p for p in row if p != -1) for row in selected.tolist()]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "split",
    [
        Split(tensor=2),
        Split(tensor=4),
        Split(tensor=2, context=2),
        Split(tensor=2, context=2, interleave=4),
        Split(tensor=4, context=2, interleave=2),
        Split(tensor=4, context=4),
        Split(tensor=4, context=4, interleave=4),
    ],
    ids=lambda split: f"tp{split.tensor}-dcp{split.context}-by{split.interleave}",
)
def test_several_ranks_compute_what_one_does(
    split: Split, backend: str, ranks: Ranks, checkpoint: Path
) -> None:
    split = Split(split.tensor, split.context, interleave=split.interleave, backend=backend)
    script = chunked_script()
    reference = run_script(alone(checkpoint, backend), script, WHOLE)
    assert any(reference.selected)
    check(ranks.run(split.size, run_split, checkpoint, split, [script]), reference)
