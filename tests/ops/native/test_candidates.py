"""Candidates of shards of a sequence: those of the reference, and merged the choice from the whole."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.batches import Tables
from torch import Tensor

from longspan.ops import indexer as reference
from longspan.ops.batch import MlaView, StepBatch
from longspan.ops.indexer import BROKEN, LAST_POSITION, NO_CANDIDATE, NO_TOKEN, NON_FINITE
from longspan.ops.native.indexer import index_candidates, index_select, merge_candidates
from longspan.ops.shard import WHOLE, Shard

from .conftest import THREADS
from .test_indexer import KINDS, query_dtype, view_of, whole

PAGE = 16
kinds = st.sampled_from(KINDS)
ranks = st.integers(1, 4)
interleaves = st.sampled_from([1, PAGE, 5])
ragged = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 200)), min_size=1, max_size=4)


class Dealt:
    """Sequences of (new rows, context) and their index keys, whole and dealt to ranks."""

    def __init__(
        self, kind: str, sequences: list[tuple[int, int]], keys: list[Tensor], size: int, interleave: int
    ):
        self.kind, self.sequences, self.keys = kind, sequences, keys
        self.shards = [Shard(rank, size, interleave) for rank in range(size)]
        self.tables = Tables(len(keys), max(len(k) for k in keys) + 1, PAGE)

    def batch(self, shard: Shard = WHOLE) -> StepBatch:
        lengths, contexts = [n for n, _ in self.sequences], [c for _, c in self.sequences]
        return self.tables.batch(range(len(self.sequences)), lengths, contexts, shard=shard)

    def view(self, shard: Shard = WHOLE) -> MlaView:
        own = [k[shard.position(torch.arange(shard.count(len(k))))] for k in self.keys]
        return view_of(self.kind, self.tables, own)

    def candidates(self, query: Tensor, weight: Tensor, k: int, operator=index_candidates) -> Tensor:
        """[ranks, T, w]"""
        return torch.stack([operator(query, weight, self.view(s), self.batch(s), k) for s in self.shards])

    def merged(self, candidates: Tensor, k: int, operator=merge_candidates) -> Tensor:
        """What all ranks choose -> positions in the sequences [T, k], as from the whole."""
        rows = torch.full((candidates.shape[1], k + 1), NO_TOKEN)
        everything = []
        for shard in self.shards:
            local = operator(candidates, shard, k)
            broken = (local[:, :1] == NON_FINITE).any(-1)
            rows[broken, 0] = NON_FINITE
            assert (local[broken, 1:] == NO_TOKEN).all()
            assert ((local[:, 1:] > local[:, :-1]) | (local[:, 1:] == NO_TOKEN)).all()
            everything.append(torch.where(local >= 0, shard.position(local), torch.iinfo(torch.int64).max))
        together = torch.cat(everything, 1).sort(-1).values
        nothing = together == torch.iinfo(torch.int64).max
        assert nothing[:, k:].all()
        width = min(k, together.shape[1])
        healthy = rows[:, 0] != NON_FINITE
        rows[healthy, :width] = together.masked_fill(nothing, NO_TOKEN)[healthy, :width]
        return rows[:, :k]


def unpacked(candidates: Tensor) -> tuple[Tensor, Tensor]:
    """Scores, NaN where there is none, and positions."""
    order = (candidates >> 32).int()
    scores = torch.where(order < 0, order ^ 0x7FFFFFFF, order).view(torch.float32)
    positions = LAST_POSITION - (candidates & LAST_POSITION)
    none = candidates == NO_CANDIDATE
    return scores.masked_fill(none, torch.nan), positions.masked_fill(none, -1)


@settings(max_examples=60, deadline=None)
@given(
    kind=kinds,
    heads=st.sampled_from([1, 5, 16, 33]),
    dim=st.sampled_from([1, 4, 16, 64]),  # 1 / sqrt(Di) is a power of two: the reference is exact too
    k=st.integers(1, 70),
    sequences=ragged,
    size=ranks,
    interleave=interleaves,
    seed=st.integers(0, 99),
)
def test_whole_numbers_give_exactly_the_candidates_and_the_choice_of_the_reference(
    kind: str,
    heads: int,
    dim: int,
    k: int,
    sequences: list[tuple[int, int]],
    size: int,
    interleave: int,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    dealt = Dealt(kind, sequences, [whole(kind, n + c, dim) for n, c in sequences], size, interleave)
    tokens = sum(n for n, _ in sequences)
    query = whole(kind, tokens, heads, dim).to(query_dtype(kind))
    weight = torch.randint(-2, 3, (tokens, heads)).float()
    got = dealt.candidates(query, weight, k)
    want = dealt.candidates(query, weight, k, reference.index_candidates)
    scores, positions = unpacked(got)
    want_scores, want_positions = unpacked(want)
    assert torch.equal(positions, want_positions)
    torch.testing.assert_close(scores * dim**-0.5, want_scores, rtol=0, atol=0, equal_nan=True)
    assert not scores.signbit().logical_and(scores == 0).any()
    for shard in dealt.shards:
        chosen = merge_candidates(got, shard, k)
        assert torch.equal(chosen, reference.merge_candidates(want, shard, k))


@settings(max_examples=80, deadline=None)
@given(
    kind=kinds,
    heads=st.sampled_from([1, 3, 17]),
    dim=st.sampled_from([1, 5, 16, 36]),
    k=st.integers(1, 40),
    beyond=st.lists(st.sampled_from([-2, -1, 0, 1, 2, 50, 300]), min_size=1, max_size=3),
    rows=st.integers(1, 12),
    size=ranks,
    interleave=interleaves,
    seed=st.integers(0, 99),
)
def test_candidates_of_any_shards_merge_to_the_choice_from_the_whole(
    kind: str,
    heads: int,
    dim: int,
    k: int,
    beyond: list[int],
    rows: int,
    size: int,
    interleave: int,
    seed: int,
) -> None:
    """Of sequences about as long as k, and longer."""
    torch.manual_seed(seed)
    totals = [max(1, k + more) for more in beyond]
    sequences = [(min(rows, n), n - min(rows, n)) for n in totals]
    dealt = Dealt(kind, sequences, [torch.randn(n, dim) for n in totals], size, interleave)
    tokens = sum(n for n, _ in sequences)
    query = torch.randn(tokens, heads, dim).to(query_dtype(kind))
    weight = torch.randn(tokens, heads)
    want = index_select(query, weight, dealt.view(), dealt.batch(), k)
    candidates = dealt.candidates(query, weight, k)
    assert (candidates[:, :, 1:] <= candidates[:, :, :-1]).all()
    assert torch.equal(dealt.merged(candidates, k), want)
    assert torch.equal(dealt.merged(candidates, k, reference.merge_candidates), want)


@settings(max_examples=60, deadline=None)
@given(
    size=ranks,
    interleave=interleaves,
    lengths=st.lists(st.integers(0, 60), min_size=1, max_size=5),
    k=st.integers(1, 70),
    scores=st.sampled_from([1, 3, 1000]),  # how many different ones: one, few, many
    seed=st.integers(0, 99),
)
def test_lists_of_any_scores_merge_as_in_the_reference(
    size: int, interleave: int, lengths: list[int], k: int, scores: int, seed: int
) -> None:
    torch.manual_seed(seed)
    shards = [Shard(rank, size, interleave) for rank in range(size)]
    width = min(k, shards[0].count(max(lengths))) or 1
    candidates = torch.full((size, len(lengths), width), NO_CANDIDATE)
    for shard in shards:
        for row, n in enumerate(lengths):
            positions = shard.position(torch.arange(shard.count(n)))
            order = torch.randint(-scores, scores, positions.shape) << 21
            keys = (order << 32 | LAST_POSITION - positions).sort(descending=True).values[:width]
            candidates[shard.rank, row, : len(keys)] = keys
    candidates[torch.rand(size, len(lengths)) < 0.1, 0] = BROKEN
    for shard in shards:
        got = merge_candidates(candidates, shard, k)
        assert torch.equal(got, reference.merge_candidates(candidates, shard, k))


@pytest.mark.parametrize("rows", [1, 9, 200])
@pytest.mark.parametrize("kind", KINDS)
def test_threads_change_no_candidate_of_a_long_sequence(kind: str, rows: int, with_threads) -> None:
    """A few rows are cut in pieces of their keys, many are shared out as they are."""
    torch.manual_seed(rows)
    dealt = Dealt(kind, [(rows, 5000 - rows)], [torch.randn(5000, 16)], 2, PAGE)
    query, weight = torch.randn(rows, 16, 16).to(query_dtype(kind)), torch.randn(rows, 16)
    want = index_select(query, weight, dealt.view(), dealt.batch(), 300)
    for threads in THREADS:
        with_threads(threads)
        assert torch.equal(dealt.merged(dealt.candidates(query, weight, 300), 300), want)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_row_with_a_broken_score_on_any_rank_is_broken_on_all(kind: str, size: int) -> None:
    torch.manual_seed(0)
    keys = torch.randn(30, 5)
    keys[26, 3] = torch.nan
    dealt = Dealt(kind, [(5, 25)], [keys], size, 4)
    query, weight = torch.randn(5, 3, 5).to(query_dtype(kind)), torch.randn(5, 3)
    candidates = dealt.candidates(query, weight, 7)
    holder = 26 // 4 % size
    assert (candidates[:, :, 0] == BROKEN).nonzero().tolist() == [[holder, row] for row in range(1, 5)]
    got = dealt.merged(candidates, 7)
    assert torch.equal(got, index_select(query, weight, dealt.view(), dealt.batch(), 7))
    assert (got[1:, 0] == NON_FINITE).all()


def test_zeros_of_either_sign_are_one_score_and_go_to_the_lower_positions() -> None:
    keys = 1e-30 * (torch.arange(200) % 3 == 0)[:, None]  # times the weight below: -0.0
    dealt = Dealt("float32", [(1, 199)], [keys], 2, 1)
    candidates = dealt.candidates(torch.ones(1, 1, 1), torch.full((1, 1), -1e-30), 90)
    assert dealt.merged(candidates, 90)[0].tolist() == list(range(90))


def test_no_rows_have_no_candidates_and_a_whole_choice_wants_all_keys() -> None:
    dealt = Dealt("float32", [(0, 9)], [torch.randn(9, 4)], 2, 1)
    candidates = dealt.candidates(torch.randn(0, 2, 4), torch.randn(0, 2), 5)
    assert candidates.shape == (2, 0, 0)
    assert merge_candidates(candidates, dealt.shards[1], 5).shape == (0, 0)
    with pytest.raises(ValueError, match="take index_candidates"):
        index_select(torch.randn(0, 2, 4), torch.randn(0, 2), dealt.view(), dealt.batch(dealt.shards[0]), 5)
