"""The native indexer against the torch reference; cuts, threads and mates change no choice."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.batches import Tables
from torch import Tensor

from longspan.ops.batch import QUAD, MlaView, QuantizedKeys, StepBatch
from longspan.ops.index_keys import quantize_rows, write_index_keys
from longspan.ops.indexer import NO_TOKEN, NON_FINITE
from longspan.ops.indexer import index_select as reference
from longspan.ops.native.extension import extension
from longspan.ops.native.indexer import index_select

KINDS = ["float32", "bfloat16", "int8"]
kinds = st.sampled_from(KINDS)


@pytest.fixture(autouse=True)
def _threads():
    before = extension().num_threads()
    extension().set_threads(2)
    yield
    extension().set_threads(before)


def view_of(kind: str, tables: Tables, keys: list[Tensor], spare: int = 0) -> MlaView:
    """Keys in pages, NaN where none is; `spare` numbers of somebody else follow each row or scale."""
    dim = keys[0].shape[1]
    if kind != "int8":
        pages = tables.pages_of([torch.cat([k, torch.full((len(k), spare), torch.nan)], 1) for k in keys])
        return MlaView(torch.empty(0), pages.to(getattr(torch, kind))[..., :dim])
    shape = (tables.num_pages, -(-dim // QUAD), tables.page_size, QUAD + spare)
    scale = torch.full((tables.num_pages, tables.page_size, 1 + spare), torch.nan)
    pages = QuantizedKeys(torch.full(shape, 255, dtype=torch.uint8)[..., :QUAD], scale[..., 0])
    for s, rows in enumerate(keys):
        write_index_keys(pages, tables.batch([s], [len(rows)], [0]).slot_mapping, rows)
    return MlaView(torch.empty(0), pages)


def query_dtype(kind: str) -> torch.dtype:
    return torch.bfloat16 if kind == "bfloat16" else torch.float32


def whole(kind: str, *shape: int) -> Tensor:
    """Small whole numbers, full of ties, whose scores are exact in any order; int8 keeps them as they are."""
    numbers = torch.randint(-2, 3, shape).float()
    if kind == "int8":
        numbers[..., 0] = 127.0
    return numbers


def scores_of(kind: str, query: Tensor, weight: Tensor, keys: Tensor) -> Tensor:
    """float64 scores [Q, S] of the values that pages of this kind hold, but for the factor 1 / sqrt(Di)."""
    if kind == "int8":
        q, scale = quantize_rows(query)
        query, weight = q.double(), weight.double() * scale
        q, scale = quantize_rows(keys)
        keys = q.double() * scale[:, None]
    elif kind == "bfloat16":
        keys = keys.bfloat16()
    dots = torch.einsum("qhd,sd->qhs", query.double(), keys.double())
    return torch.einsum("qh,qhs->qs", weight.double(), dots.relu())


@settings(max_examples=60, deadline=None)
@given(
    kind=kinds,
    heads=st.sampled_from([1, 2, 4, 5, 16, 17, 31, 33, 48]),
    dim=st.sampled_from([1, 4, 16, 64]),  # 1 / sqrt(Di) is a power of two: the reference is exact too
    k=st.integers(1, 70),
    page_size=st.sampled_from([1, 3, 16, 24, 64]),
    spare=st.integers(0, 3),
    sequences=st.lists(st.tuples(st.integers(0, 20), st.integers(0, 300)), max_size=4),
    seed=st.integers(0, 99),
)
def test_whole_numbers_choose_exactly_what_the_reference_chooses(
    kind: str,
    heads: int,
    dim: int,
    k: int,
    page_size: int,
    spare: int,
    sequences: list[tuple[int, int]],
    seed: int,
) -> None:
    torch.manual_seed(seed)
    tables = Tables(max(1, len(sequences)), 320, page_size)
    keys = [whole(kind, n + c, dim) for n, c in sequences] or [torch.empty(0, dim)]
    batch = tables.batch(range(len(sequences)), [n for n, _ in sequences], [c for _, c in sequences])
    query = whole(kind, batch.num_tokens, heads, dim).to(query_dtype(kind))
    weight = torch.randint(-2, 3, (batch.num_tokens, heads)).float()
    view = view_of(kind, tables, keys, spare)
    assert torch.equal(index_select(query, weight, view, batch, k), reference(query, weight, view, batch, k))


@settings(max_examples=60, deadline=None)
@given(
    kind=kinds,
    heads=st.integers(1, 34),
    dim=st.sampled_from([1, 2, 3, 6, 10, 31, 36, 128, 129]),
    tokens=st.integers(1, 200),
    rows=st.integers(1, 19),
    k=st.integers(1, 40),
    seed=st.integers(0, 99),
)
def test_what_is_left_out_is_nowhere_better_than_what_is_chosen(
    kind: str, heads: int, dim: int, tokens: int, rows: int, k: int, seed: int
) -> None:
    torch.manual_seed(seed)
    rows = min(rows, tokens)
    tables = Tables(1, tokens, 16)
    keys = torch.randn(tokens, dim)
    batch = tables.batch([0], [rows], [tokens - rows])
    query = torch.randn(rows, heads, dim).to(query_dtype(kind))
    weight = torch.randn(rows, heads)
    got = index_select(query, weight, view_of(kind, tables, [keys]), batch, k)
    scores = scores_of(kind, query, weight, keys)
    bound = 1e-5 * scores_of(kind, query.abs(), weight.abs(), keys.abs())
    for row, visible in enumerate(range(tokens - rows + 1, tokens + 1)):
        chosen = got[row][got[row] != NO_TOKEN]
        assert chosen.tolist() == sorted(set(chosen.tolist())) and len(chosen) == min(k, visible)
        assert (got[row, len(chosen) :] == NO_TOKEN).all() and chosen[-1] < visible
        left = torch.ones(visible, dtype=torch.bool)
        left[chosen] = False
        if left.any():
            best_left = (scores[row, :visible] - bound[row, :visible])[left].max()
            assert best_left <= (scores + bound)[row, chosen].min()


@settings(max_examples=30, deadline=None)
@given(
    kind=kinds,
    heads=st.sampled_from([1, 3, 17]),
    dim=st.sampled_from([5, 16]),
    tokens=st.integers(1, 150),
    k=st.integers(1, 30),
    chunk=st.integers(1, 50),
    seed=st.integers(0, 99),
)
def test_chunks_choose_what_the_whole_chooses(
    kind: str, heads: int, dim: int, tokens: int, k: int, chunk: int, seed: int
) -> None:
    torch.manual_seed(seed)
    tables = Tables(2, max(tokens, 9), 8)
    keys, mate = torch.randn(tokens, dim), torch.randn(9, dim)
    query, weight = torch.randn(tokens, heads, dim).to(query_dtype(kind)), torch.randn(tokens, heads)
    view = view_of(kind, tables, [keys, mate])
    together = index_select(query, weight, view, tables.batch([0], [tokens], [0]), k)
    for begin in range(0, tokens, chunk):
        end = min(begin + chunk, tokens)
        batch = tables.batch([1, 0], [2, end - begin], [7, begin])  # after two rows of a mate
        rows = torch.cat([torch.arange(2) % tokens, torch.arange(begin, end)])
        assert torch.equal(index_select(query[rows], weight[rows], view, batch, k)[2:], together[begin:end])


def long_case(kind: str, rows: int) -> tuple[Tensor, Tensor, MlaView, StepBatch]:
    """Enough keys that a few rows are cut in pieces, and many are shared out as they are."""
    torch.manual_seed(rows)
    tokens, heads, dim = 5000, 16, 16
    tables = Tables(1, tokens, 64)
    batch = tables.batch([0], [rows], [tokens - rows])
    query = torch.randn(rows, heads, dim).to(query_dtype(kind))
    return query, torch.randn(rows, heads), view_of(kind, tables, [torch.randn(tokens, dim)]), batch


@pytest.mark.parametrize("rows", [1, 9, 300])
@pytest.mark.parametrize("kind", KINDS)
def test_any_number_of_threads_chooses_the_same(kind: str, rows: int) -> None:
    query, weight, view, batch = long_case(kind, rows)
    choices = []
    for threads in (1, 2, 3, 7):
        extension().set_threads(threads)
        choices.append(index_select(query, weight, view, batch, 20))
    assert all(torch.equal(choices[0], choice) for choice in choices[1:])
    alone = index_select(query[-1:], weight[-1:], view, Tables(1, 5000, 64).batch([0], [1], [4999]), 20)
    assert torch.equal(choices[0][-1:], alone)


@pytest.mark.parametrize("order", ["rising", "falling", "equal", "plateaus", "rising then equal"])
@pytest.mark.parametrize("k", [1, 63, 64, 65, 500])
def test_streams_in_any_order_of_scores_keep_the_best_and_the_first_of_equals(order: str, k: int) -> None:
    tokens = 3000
    at = torch.arange(tokens)
    value = {
        "rising": at,
        "falling": tokens - at,
        "equal": torch.ones(tokens),
        "plateaus": at // 200 % 5,
        "rising then equal": at.clamp(max=700),
    }[order].float()
    tables = Tables(1, tokens, 16)
    view, batch = view_of("float32", tables, [value[:, None]]), tables.batch([0], [1], [tokens - 1])
    got = index_select(torch.ones(1, 1, 1), torch.ones(1, 1), view, batch, k)
    assert got[0].tolist() == sorted(sorted(range(tokens), key=lambda s: (-value[s], s))[:k])


def test_a_zero_of_either_sign_is_the_same_score() -> None:
    tables = Tables(1, 200, 16)
    keys = 1e-30 * (torch.arange(200) % 3 == 0)[:, None]  # times the weight below: -0.0
    view, batch = view_of("float32", tables, [keys]), tables.batch([0], [1], [199])
    got = index_select(torch.ones(1, 1, 1), torch.full((1, 1), -1e-30), view, batch, 90)
    assert got[0].tolist() == list(range(90))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("where", ["key", "query", "weight", "unwritten"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_non_finite_number_is_flagged_for_the_rows_that_see_it_and_no_other(
    kind: str, where: str, bad: float
) -> None:
    torch.manual_seed(0)
    tables = Tables(1, 16)
    keys, query, weight = torch.randn(12, 5).abs(), torch.randn(12, 3, 5).abs(), torch.randn(12, 3)
    if where == "key":
        keys[10, 3] = bad
    elif where == "query":
        query[10:, 1, 2] = bad
    elif where == "weight":
        weight[10:, 2] = bad
    query = query.to(query_dtype(kind))
    view = view_of(kind, tables, [keys[:10] if where == "unwritten" else keys])
    batch = tables.batch([0], [12], [0])
    got = index_select(query, weight, view, batch, 4)
    assert (got[:, 0] == NON_FINITE).nonzero()[:, 0].tolist() == [10, 11]
    assert (got[10:, 1:] == NO_TOKEN).all()
    assert torch.equal(got[:10], reference(query, weight, view, batch, 4)[:10])


@pytest.mark.parametrize("piece", [0, 2500, 4990])
def test_a_broken_key_in_any_piece_of_a_long_row_is_flagged(piece: int) -> None:
    query, weight, view, batch = long_case("float32", 1)
    table = batch.block_tables[0]
    view.index_key[table[piece // 64], piece % 64, 3] = torch.nan
    assert index_select(query, weight, view, batch, 20)[0, :2].tolist() == [NON_FINITE, NO_TOKEN]


@pytest.mark.parametrize("kind", KINDS)
def test_more_top_k_than_tokens_takes_them_all_and_an_empty_batch_nothing(kind: str) -> None:
    tables = Tables(1, 8)
    view = view_of(kind, tables, [torch.rand(3, 4)])
    query = torch.rand(3, 2, 4).to(query_dtype(kind))
    got = index_select(query, torch.rand(3, 2), view, tables.batch([0], [3], [0]), 100)
    assert got[:, :3].tolist() == [[0, -1, -1], [0, 1, -1], [0, 1, 2]] and (got[:, 3:] == NO_TOKEN).all()
    assert index_select(query[:0], torch.rand(0, 2), view, tables.batch([], [], []), 4).shape == (0, 4)


def test_keys_of_another_dtype_than_the_queries_are_refused() -> None:
    tables = Tables(1, 8)
    view, batch = view_of("float32", tables, [torch.rand(3, 4)]), tables.batch([0], [3], [0])
    with pytest.raises(ValueError, match="must be the same"):
        index_select(torch.rand(3, 2, 4, dtype=torch.bfloat16), torch.rand(3, 2), view, batch, 1)
    with pytest.raises(ValueError, match="view with index keys"):
        index_select(torch.rand(3, 2, 4), torch.rand(3, 2), MlaView(torch.empty(0), None), batch, 1)


@pytest.mark.parametrize("kind", KINDS)
def test_more_pieces_than_keys_leave_some_empty(kind: str) -> None:
    extension().set_threads(40)
    torch.manual_seed(0)
    tables = Tables(1, 300, page_size=1)
    keys = torch.randn(300, 128).to(query_dtype(kind)).float()
    batch = tables.batch([0], [1], [299])
    query = torch.randn(1, 64, 128).to(query_dtype(kind))
    weight, view = torch.rand(1, 64), view_of(kind, tables, [keys])
    assert torch.equal(index_select(query, weight, view, batch, 1), reference(query, weight, view, batch, 1))
