"""Sparse and dense attention over cached latents against a softmax written out."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.batches import Tables
from torch import Tensor

from longspan.ops import sparse_attention as attention_module
from longspan.ops.batch import MlaView
from longspan.ops.indexer import NO_TOKEN, NON_FINITE
from longspan.ops.sparse_attention import sparse_attention

RANK, ROPE, SCALE = 6, 2, 0.3
DIM = RANK + ROPE


def slow_row(query: Tensor, rows: Tensor, positions: list[int]) -> tuple[Tensor, Tensor]:
    """query [H, D] over the listed rows, float64 -> out [H, RANK], lse [H]."""
    if not positions:
        return torch.zeros(query.shape[0], RANK), torch.full((query.shape[0],), -torch.inf)
    chosen = rows[positions].double()
    scores = SCALE * query.double() @ chosen.T
    return (scores.softmax(-1) @ chosen[:, :RANK]).float(), scores.logsumexp(-1).float()


@pytest.fixture(params=["default", "small", "ones"])
def blocks(request, monkeypatch) -> None:
    sizes = {"default": None, "small": (100, 3, 4), "ones": (1, 1, 1)}[request.param]
    if sizes:
        for name, size in zip(
            ("GATHER_ELEMENTS", "DENSE_QUERY_BLOCK", "DENSE_KEY_BLOCK"), sizes, strict=True
        ):
            monkeypatch.setattr(attention_module, name, size)


SHAPES = [(1, 0), (7, 0), (1, 9), (4, 5), (0, 3), (13, 2)]  # (rows, context)


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("heads", [1, 3])
def test_dense_rows_attend_to_everything_up_to_themselves(heads: int) -> None:
    torch.manual_seed(0)
    tables = Tables(len(SHAPES), 16)
    cached = [torch.randn(n + c, DIM) for n, c in SHAPES]
    batch = tables.batch(range(len(SHAPES)), [n for n, _ in SHAPES], [c for _, c in SHAPES])
    query = torch.randn(batch.num_tokens, heads, DIM)
    out, lse = sparse_attention(query, MlaView(tables.pages_of(cached), None), batch, None, RANK, SCALE)
    for row, (s, p) in enumerate(zip(batch.row_seqs.tolist(), batch.row_positions.tolist(), strict=True)):
        want, want_lse = slow_row(query[row], cached[s], list(range(p + 1)))
        torch.testing.assert_close(out[row], want, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(lse[row], want_lse, atol=1e-5, rtol=1e-5)


@settings(max_examples=40)
@given(st.data())
def test_any_selection_equals_the_softmax_over_it(data: st.DataObject) -> None:
    torch.manual_seed(data.draw(st.integers(0, 9)))
    tables = Tables(len(SHAPES), 16)
    cached = [torch.randn(n + c, DIM) for n, c in SHAPES]
    batch = tables.batch(range(len(SHAPES)), [n for n, _ in SHAPES], [c for _, c in SHAPES])
    width = data.draw(st.integers(0, 6))
    chosen = [
        data.draw(st.lists(st.integers(0, p), unique=True, max_size=min(width, p + 1)))
        for p in batch.row_positions.tolist()
    ]
    selected = torch.tensor([c + [NO_TOKEN] * (width - len(c)) for c in chosen], dtype=torch.int64).view(
        len(chosen), width
    )
    query = torch.randn(batch.num_tokens, 3, DIM)
    out, lse = sparse_attention(query, MlaView(tables.pages_of(cached), None), batch, selected, RANK, SCALE)
    for row, s in enumerate(batch.row_seqs.tolist()):
        want, want_lse = slow_row(query[row], cached[s], chosen[row])
        torch.testing.assert_close(out[row], want, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(lse[row], want_lse, atol=1e-5, rtol=1e-5)


@pytest.mark.usefixtures("blocks")
def test_selecting_everything_is_dense_attention() -> None:
    torch.manual_seed(1)
    tables = Tables(1, 12)
    view = MlaView(tables.pages_of([torch.randn(12, DIM)]), None)
    batch = tables.batch([0], [9], [3])
    query = torch.randn(9, 2, DIM)
    everything = torch.arange(12)
    selected = torch.where(everything <= batch.row_positions[:, None], everything, NO_TOKEN)
    dense = sparse_attention(query, view, batch, None, RANK, SCALE)
    sparse = sparse_attention(query, view, batch, selected, RANK, SCALE)
    torch.testing.assert_close(sparse, dense, atol=1e-6, rtol=1e-5)


def test_a_row_with_an_empty_set_gives_zeros_and_minus_infinity() -> None:
    tables = Tables(1, 4)
    view = MlaView(tables.pages_of([torch.randn(4, DIM)]), None)
    selected = torch.tensor([[NO_TOKEN, NO_TOKEN], [1, NO_TOKEN]])
    out, lse = sparse_attention(
        torch.randn(2, 3, DIM), view, tables.batch([0], [2], [2]), selected, RANK, SCALE
    )
    assert (out[0] == 0).all() and (lse[0] == -torch.inf).all()
    assert out[1].isfinite().all() and lse[1].isfinite().all()


def test_partial_results_merge_by_their_lse() -> None:
    torch.manual_seed(2)
    tables = Tables(1, 8)
    view = MlaView(tables.pages_of([torch.randn(8, DIM)]), None)
    batch, query = tables.batch([0], [1], [7]), torch.randn(1, 3, DIM)
    parts = [
        sparse_attention(query, view, batch, torch.tensor([s]), RANK, SCALE)
        for s in ([0, 3, 5], [1, 7, NO_TOKEN], [NO_TOKEN] * 3)
    ]
    lse = torch.stack([p[1] for p in parts])
    merged = (lse.softmax(0)[..., None] * torch.stack([p[0] for p in parts])).sum(0)
    want = sparse_attention(query, view, batch, torch.tensor([[0, 1, 3, 5, 7]]), RANK, SCALE)
    torch.testing.assert_close((merged, lse.logsumexp(0)), want)


def test_a_row_the_indexer_could_not_judge_becomes_nan_and_no_other() -> None:
    tables = Tables(1, 4)
    view = MlaView(tables.pages_of([torch.randn(4, DIM)]), None)
    selected = torch.tensor([[0, 1], [NON_FINITE, NO_TOKEN], [0, 2]])
    out, lse = sparse_attention(
        torch.randn(3, 2, DIM), view, tables.batch([0], [3], [1]), selected, RANK, SCALE
    )
    assert out[1].isnan().all() and lse[1].isnan().all()
    assert out[[0, 2]].isfinite().all() and lse[[0, 2]].isfinite().all()


def test_scores_far_apart_do_not_overflow() -> None:
    tables = Tables(1, 8)
    rows = torch.zeros(8, DIM)
    rows[:, 0] = torch.tensor([-9e3, 0.0, 9e3, 1.0, -9e3, 9e3, 0.0, 2.0])
    view, batch = MlaView(tables.pages_of([rows]), None), tables.batch([0], [1], [7])
    query = torch.ones(1, 1, DIM)
    want, want_lse = slow_row(query[0], rows, list(range(8)))
    for selected in (None, torch.arange(8)[None]):
        out, lse = sparse_attention(query, view, batch, selected, RANK, SCALE)
        torch.testing.assert_close(out[0], want)
        torch.testing.assert_close(lse[0], want_lse)


@pytest.mark.parametrize("selected", [None, torch.empty(0, 4, dtype=torch.int64)])
def test_an_empty_batch_gives_nothing(selected: Tensor | None) -> None:
    tables = Tables(1, 4)
    view = MlaView(torch.empty(tables.num_pages, tables.page_size, DIM), None)
    out, lse = sparse_attention(torch.empty(0, 3, DIM), view, tables.batch([], [], []), selected, RANK, SCALE)
    assert out.shape == (0, 3, RANK) and lse.shape == (0, 3)
