"""The native attention over cached latents against the torch reference, and against itself, bit for bit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.batches import Tables
from torch import Tensor

from longspan.ops import sparse_attention as reference
from longspan.ops.batch import MlaView, StepBatch
from longspan.ops.indexer import NO_TOKEN, NON_FINITE
from longspan.ops.native.sparse_attention import sparse_attention
from longspan.ops.shard import WHOLE, Shard

TILE, PIECE = 128, 512  # keys, as the kernel takes them
DTYPES = st.sampled_from([torch.float32, torch.bfloat16])
# (heads, rank, rope): odd ones, tails of every kind, and the published proportions
SHAPES = st.sampled_from(
    [(1, 1, 1), (3, 6, 2), (4, 64, 32), (5, 36, 10), (7, 80, 16), (16, 128, 64), (130, 20, 4)]
)
SHARDS = st.sampled_from([WHOLE, Shard(0, 2, 1), Shard(1, 2, 16), Shard(2, 3, 5), Shard(3, 4, 300)])
EDGES = [0, 1, 2, TILE - 1, TILE, TILE + 1, PIECE - 1, PIECE, PIECE + 1]


class Case:
    """Sequences of (new rows, context) over scrambled, strided pages; what was not written is NaN."""

    def __init__(
        self,
        sequences: list[tuple[int, int]],
        shape: tuple[int, int, int],
        dtype: torch.dtype,
        seed: int,
        shard: Shard = WHOLE,
    ):
        torch.manual_seed(seed)
        self.sequences, self.shard = sequences, shard
        self.heads, self.rank, rope = shape
        width = self.rank + rope
        self.scale = width**-0.5
        self.tables = Tables(len(sequences), max(n + c for n, c in sequences) or 1, page_size=16, seed=seed)
        latent = self.tables.pages_of([torch.randn(n + c, width) for n, c in sequences]).to(dtype)
        # A wider row and a wider page than the latents: hosts pack several kinds side by side.
        packed = torch.full((latent.shape[0], latent.shape[1] + 1, width + 3), torch.nan, dtype=dtype)
        packed[:, :-1, :width] = latent
        self.view = MlaView(packed[:, :-1, :width], None)
        self.query = (2 * torch.randn(sum(n for n, _ in sequences), self.heads, width)).to(dtype)

    def batch(self) -> StepBatch:
        lengths, contexts = [n for n, _ in self.sequences], [c for _, c in self.sequences]
        return self.tables.batch(range(len(self.sequences)), lengths, contexts, shard=self.shard)

    def select(self, top_k: int, chance: float) -> Tensor:
        """[T, top_k]: about `chance` of the visible tokens of each row, with holes anywhere among them."""
        visible = self.batch().row_visible
        selected = torch.full((len(visible), top_k), NO_TOKEN)
        for row, count in enumerate(visible.tolist()):
            chosen = torch.randperm(count)[:top_k]
            chosen = chosen[torch.rand(len(chosen)) < chance]
            selected[row, torch.randperm(top_k)[: len(chosen)]] = chosen
        return selected

    def run(self, selected: Tensor | None, attention=sparse_attention) -> tuple[Tensor, Tensor]:
        return attention(self.query, self.view, self.batch(), selected, self.rank, self.scale)

    def check(self, selected: Tensor | None) -> None:
        out, lse = self.run(selected)
        want, want_lse = self.run(selected, reference.sparse_attention)
        # Weights are rounded to the model's type: half an ulp of each, against values of size 1.
        tolerance = 1e-4 if self.query.dtype == torch.float32 else 2**-7
        torch.testing.assert_close(out, want, atol=tolerance, rtol=tolerance, equal_nan=True)
        torch.testing.assert_close(lse, want_lse, atol=1e-4, rtol=1e-4, equal_nan=True)


def sequences(most_rows: int, most_context: int) -> st.SearchStrategy:
    context = st.one_of(
        st.sampled_from([e for e in EDGES if e <= most_context]), st.integers(0, most_context)
    )
    return st.lists(st.tuples(st.integers(0, most_rows), context), min_size=1, max_size=3)


def same_bits(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> bool:
    return all(torch.equal(x.nan_to_num(nan=7e7), y.nan_to_num(nan=7e7)) for x, y in zip(a, b, strict=True))


@settings(max_examples=40)
@given(sequences(9, 700), SHAPES, DTYPES, SHARDS, st.integers(0, 99))
def test_dense_rows_equal_the_reference(shapes, shape, dtype, shard, seed) -> None:
    Case(shapes, shape, dtype, seed, shard).check(None)


@settings(max_examples=40)
@given(sequences(5, 700), SHAPES, DTYPES, SHARDS, st.sampled_from(EDGES), st.floats(0, 1), st.integers(0, 99))
def test_selected_rows_equal_the_reference(shapes, shape, dtype, shard, top_k, chance, seed) -> None:
    case = Case(shapes, shape, dtype, seed, shard)
    case.check(case.select(top_k, chance))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize(
    "shapes", [[(1, 1700)], [(3, 900), (1, 2100)], [(40, 30), (1, 1100), (0, 3), (2, 510)]]
)
def test_threads_change_no_bit(shapes, sparse, dtype, with_threads: Callable[[int], None]) -> None:
    case = Case(shapes, (6, 80, 16), dtype, 1)
    selected = case.select(1300, 0.9) if sparse else None
    results = []
    for count in (1, 2, 3, 7):
        with_threads(count)
        results.append(case.run(selected))
    case.check(selected)
    assert all(same_bits(results[0], other) for other in results[1:])


@settings(max_examples=20)
@given(st.data(), DTYPES, st.booleans(), st.sampled_from([(3, 6, 2), (5, 36, 10), (16, 128, 64)]))
def test_rows_alone_give_the_bits_of_rows_in_a_batch(data, dtype, sparse, shape) -> None:
    """However a sequence is cut in chunks and whatever runs beside it."""
    shapes = data.draw(sequences(12, 600).filter(lambda s: sum(n for n, _ in s) > 0))
    case = Case(shapes, shape, dtype, 2)
    selected = case.select(600, 0.8) if sparse else None
    whole = case.run(selected)
    start = 0
    for s, (rows, context) in enumerate(shapes):
        first = 0
        while first < rows:
            chunk = data.draw(st.integers(1, rows - first))
            some = slice(start + first, start + first + chunk)
            batch = case.tables.batch([s], [chunk], [context + first])
            part = sparse_attention(
                case.query[some],
                case.view,
                batch,
                None if selected is None else selected[some],
                case.rank,
                case.scale,
            )
            assert same_bits(part, (whole[0][some], whole[1][some]))
            first += chunk
        start += rows


def test_holes_in_a_selection_change_no_bit() -> None:
    case = Case([(1, 900)], (5, 36, 10), torch.bfloat16, 3)
    chosen = torch.arange(0, 900, 1)
    holes = torch.full((1, 2000), NO_TOKEN)
    holes[0, torch.randperm(2000)[:900].sort().values] = chosen
    assert same_bits(case.run(chosen[None]), case.run(holes))


@pytest.mark.parametrize("context", [3, 1500])
def test_a_row_the_indexer_could_not_judge_becomes_nan_and_no_other(context) -> None:
    case = Case([(4, context)], (5, 36, 10), torch.bfloat16, 4)
    selected = case.select(context, 0.9)
    clean = case.run(selected)
    selected[1] = NO_TOKEN
    selected[1, 0] = NON_FINITE
    selected[2] = NO_TOKEN
    out, lse = case.run(selected)
    assert out[1].isnan().all() and lse[1].isnan().all()
    assert (out[2] == 0).all() and (lse[2] == -torch.inf).all()
    assert torch.equal(out[[0, 3]], clean[0][[0, 3]]) and torch.equal(lse[[0, 3]], clean[1][[0, 3]])


@pytest.mark.parametrize("shapes", [[(5, 0)], [(130, 0)], [(1, 2)], [(2, 2600), (1, 0)]])
def test_rows_that_see_none_of_a_shard_give_zeros_beside_rows_that_see_some(shapes) -> None:
    case = Case(shapes, (3, 36, 10), torch.bfloat16, 8, Shard(1, 2, 3))
    out, lse = case.run(None)
    blind = case.batch().row_visible == 0
    assert blind.any() and (out[blind] == 0).all() and (lse[blind] == -torch.inf).all()
    case.check(None)


@pytest.mark.parametrize("sparse", [False, True])
def test_a_query_that_is_not_finite_spoils_its_own_row_only(sparse) -> None:
    case = Case([(6, 700)], (3, 36, 10), torch.bfloat16, 5)
    selected = case.select(200, 1.0) if sparse else None
    clean = case.run(selected)
    case.query[2, 1, 7] = torch.nan
    out, lse = case.run(selected)
    assert out[2, 1].isnan().all() and lse[2, 1].isnan()
    keep = torch.ones(6, 3, dtype=torch.bool)
    keep[2, 1] = False
    assert torch.equal(out[keep], clean[0][keep]) and torch.equal(lse[keep], clean[1][keep])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scores_far_apart_do_not_overflow(dtype) -> None:
    case = Case([(1, 1100)], (2, 6, 2), dtype, 6)
    case.query *= 3000
    case.check(None)
    case.check(torch.arange(1101)[None])


def test_an_empty_batch_gives_nothing() -> None:
    case = Case([(0, 3)], (3, 6, 2), torch.float32, 7)
    for selected in (None, torch.empty(0, 4, dtype=torch.int64)):
        out, lse = case.run(selected)
        assert out.shape == (0, 3, 6) and lse.shape == (0, 3)
