"""Choosing where keys are dealt to ranks is choosing from the whole: the reference alone."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.batches import Tables

from longspan.ops.batch import MlaView
from longspan.ops.indexer import index_candidates, index_select, merge_candidates
from longspan.ops.shard import Shard


@settings(max_examples=60, deadline=None)
@given(
    sequences=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 40)), min_size=1, max_size=3),
    size=st.integers(2, 4),
    interleave=st.sampled_from([1, 2, 4]),
    top_k=st.integers(1, 12),
    coarse=st.booleans(),
    seed=st.integers(0, 99),
)
def test_the_best_of_all_ranks_candidates_are_the_choice_from_the_whole(
    sequences: list[tuple[int, int]], size: int, interleave: int, top_k: int, coarse: bool, seed: int
) -> None:
    """Coarse keys tie; every token is chosen on the one rank that holds it."""
    noise = torch.Generator().manual_seed(seed)
    lengths, contexts = [n for n, _ in sequences], [c for _, c in sequences]
    keys = [torch.randn(n + c, 3, generator=noise) for n, c in sequences]
    query = torch.randn(sum(lengths), 2, 3, generator=noise)
    weight = torch.randn(sum(lengths), 2, generator=noise)
    if coarse:
        keys, query, weight = [k.round() for k in keys], query.round(), weight.round()
    tables = Tables(len(sequences), 60)
    seqs = range(len(sequences))

    whole = MlaView(torch.empty(0), tables.pages_of(keys))
    want = index_select(query, weight, whole, tables.batch(seqs, lengths, contexts), top_k)
    shards = [Shard(rank, size, interleave) for rank in range(size)]
    candidates = []
    for shard in shards:
        mine = [k[shard.position(torch.arange(shard.count(len(k))))] for k in keys]
        batch = tables.batch(seqs, lengths, contexts, shard=shard)
        view = MlaView(torch.empty(0), tables.pages_of(mine))
        candidates.append(index_candidates(query, weight, view, batch, top_k))
    got = []
    for shard in shards:
        local = merge_candidates(torch.stack(candidates), shard, top_k)
        got.append(torch.where(local < 0, local, shard.position(local)))
    for row, chosen in enumerate(torch.cat(got, 1).tolist()):
        assert sorted(p for p in chosen if p >= 0) == [p for p in want[row].tolist() if p >= 0]
