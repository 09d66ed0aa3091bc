"""Int8 index keys: rounding, layout, scores and choices against plain computations."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.batches import Tables
from torch import Tensor

from longspan.ops import indexer as indexer_module
from longspan.ops.batch import QUAD, ZERO_CODE, MlaView, QuantizedKeys
from longspan.ops.index_keys import LARGEST, quantize_rows, read_quantized, write_index_keys
from longspan.ops.indexer import NO_TOKEN, NON_FINITE, index_select

HEADS = 3


def empty_pages(tables: Tables, dim: int) -> QuantizedKeys:
    """Nothing written: the codes of a largest value, the scales NaN."""
    quads = -(-dim // QUAD)
    return QuantizedKeys(
        codes=torch.full((tables.num_pages, quads, tables.page_size, QUAD), 255, dtype=torch.uint8),
        scale=torch.full((tables.num_pages, tables.page_size), torch.nan),
    )


def pages_of(tables: Tables, keys: list[Tensor]) -> QuantizedKeys:
    pages = empty_pages(tables, keys[0].shape[1])
    for s, rows in enumerate(keys):
        write_index_keys(pages, tables.batch([s], [len(rows)], [0]).slot_mapping, rows)
    return pages


def dequantised(rows: Tensor) -> Tensor:
    """The nearest of the 255 values that a row has, each number on its own."""
    scale = rows.abs().amax(-1, keepdim=True) / 127
    return torch.where(scale > 0, (rows / scale).round() * scale, 0.0)


@given(shape=st.tuples(st.integers(0, 5), st.integers(1, 9)), exponent=st.integers(-30, 30))
def test_no_number_moves_by_more_than_half_a_step(shape: tuple[int, int], exponent: int) -> None:
    torch.manual_seed(exponent)
    rows = torch.randn(shape) * 2.0**exponent
    q, scale = quantize_rows(rows)
    assert q.dtype == torch.int8 and q.shape == shape and scale.shape == shape[:1]
    assert (q.int().abs().amax(-1) == LARGEST).all()
    assert ((q * scale[:, None] - rows).abs() <= 0.5001 * scale[:, None]).all()


def test_halves_round_to_even_and_a_sign_is_kept() -> None:
    q, scale = quantize_rows(torch.tensor([[127.0, 0.5, 1.5, -0.5, -1.5, -127.0]]))
    assert scale.tolist() == [1.0] and q.tolist() == [[127, 0, 2, 0, -2, -127]]


def test_a_row_of_zeros_and_the_smallest_numbers_stay_in_range() -> None:
    q, scale = quantize_rows(torch.zeros(1, 5))
    assert not q.any() and scale.tolist() == [0.0]
    for tiny in (1e-45, 1e-44, 1.3e-43, 2.7e-43, 1e-42, 1e-39):
        q, scale = quantize_rows(torch.tensor([[tiny, -tiny]]))
        assert q.int().abs().max() <= LARGEST and scale.isfinite().all()
        assert q[0, 0] == -q[0, 1]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_number_that_is_none_shows_in_the_scale_of_its_row_alone(bad: float) -> None:
    rows = torch.ones(3, 4)
    rows[1, 2] = bad
    _, scale = quantize_rows(rows)
    assert scale.isfinite().tolist() == [True, False, True]


@pytest.mark.parametrize("dim", [1, 3, 4, 5, 8])
def test_four_dimensions_of_a_key_lie_side_by_side_and_the_last_quad_is_filled_with_zero(dim: int) -> None:
    torch.manual_seed(dim)
    tables = Tables(2, 9)
    pages = empty_pages(tables, dim)
    keys = torch.randn(3, dim)
    slots = tables.batch([1], [3], [3]).slot_mapping  # across a border of pages
    write_index_keys(pages, slots, keys)
    q, scale = quantize_rows(keys)
    for t, slot in enumerate(slots.tolist()):
        page, offset = divmod(slot, tables.page_size)
        assert pages.scale[page, offset] == scale[t]
        for i in range(pages.codes.shape[1] * QUAD):
            want = int(q[t, i]) + ZERO_CODE if i < dim else ZERO_CODE
            assert pages.codes[page, i // QUAD, offset, i % QUAD] == want
    assert int(pages.scale.isfinite().sum()) == 3
    untouched = pages.scale.isnan()[:, None, :, None].expand(pages.codes.shape)
    assert (pages.codes[untouched] == 255).all()


@given(dim=st.integers(1, 9), tokens=st.integers(1, 12), data=st.data())
def test_any_span_reads_back_what_was_written(dim: int, tokens: int, data: st.DataObject) -> None:
    torch.manual_seed(dim * 100 + tokens)
    begin = data.draw(st.integers(0, tokens))
    end = data.draw(st.integers(begin, tokens))
    tables = Tables(2, 12)
    keys = [torch.randn(12, dim), torch.randn(tokens, dim)]
    q, scale = read_quantized(pages_of(tables, keys), tables.pages[1], begin, end, dim)
    want_q, want_scale = quantize_rows(keys[1][begin:end])
    assert torch.equal(q, want_q.float()) and torch.equal(scale, want_scale)


def test_keys_in_strided_pages_are_written_in_place() -> None:
    tables = Tables(1, 8)
    plain = empty_pages(tables, 6)
    wide = torch.full((tables.num_pages, 2, tables.page_size, QUAD + 3), 255, dtype=torch.uint8)
    strided = QuantizedKeys(wide[..., :QUAD], torch.full((tables.num_pages, 9), torch.nan)[:, ::2][:, :4])
    keys, slots = torch.randn(8, 6), tables.batch([0], [8], [0]).slot_mapping
    for pages in (plain, strided):
        write_index_keys(pages, slots, keys)
    assert torch.equal(plain.codes, strided.codes)
    torch.testing.assert_close(plain.scale, strided.scale, equal_nan=True, rtol=0, atol=0)


@settings(max_examples=40)
@given(
    dim=st.integers(1, 9),
    heads=st.integers(1, 3),
    tokens=st.integers(1, 30),
    k=st.integers(1, 8),
    data=st.data(),
)
def test_choices_are_those_of_float_scores_of_the_dequantised_values(
    dim: int, heads: int, tokens: int, k: int, data: st.DataObject
) -> None:
    torch.manual_seed(data.draw(st.integers(0, 99)))
    context = data.draw(st.integers(0, tokens - 1))
    tables = Tables(2, 32)
    keys = [torch.randn(7, dim), torch.randn(tokens, dim)]
    batch = tables.batch([1], [tokens - context], [context])
    query, weight = torch.randn(batch.num_tokens, heads, dim), torch.randn(batch.num_tokens, heads)
    view = MlaView(torch.empty(0), pages_of(tables, keys))
    got = index_select(query, weight, view, batch, k)
    dots = torch.einsum("qhd,sd->qhs", dequantised(query).double(), dequantised(keys[1]).double())
    scores = torch.einsum("qh,qhs->qs", weight.double(), dots.relu() * dim**-0.5)
    for row, position in enumerate(range(context, tokens)):
        chosen = [p for p in got[row].tolist() if p != NO_TOKEN]
        assert chosen == sorted(set(chosen)) and len(chosen) == min(k, position + 1)
        assert max(chosen) <= position
        visible = scores[row, : position + 1]
        left = [s for s in range(position + 1) if s not in chosen]
        if left:  # what was left out is nowhere better than what was chosen, but for rounding
            assert visible[left].max() <= visible[chosen].min() + 1e-5


@settings(max_examples=20)
@given(tokens=st.integers(1, 40), k=st.integers(1, 9), chunk=st.integers(1, 40), seed=st.integers(0, 99))
def test_chunks_choose_what_the_whole_chooses(tokens: int, k: int, chunk: int, seed: int) -> None:
    torch.manual_seed(seed)
    tables = Tables(1, tokens)
    keys, query = torch.randn(tokens, 5), torch.randn(tokens, HEADS, 5)
    weight = torch.randn(tokens, HEADS)
    view = MlaView(torch.empty(0), pages_of(tables, [keys]))
    whole = index_select(query, weight, view, tables.batch([0], [tokens], [0]), k)
    for begin in range(0, tokens, chunk):
        rows = slice(begin, min(begin + chunk, tokens))
        batch = tables.batch([0], [rows.stop - begin], [begin])
        assert torch.equal(index_select(query[rows], weight[rows], view, batch, k), whole[rows])


def test_equal_keys_in_different_blocks_go_to_the_lower_position(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(indexer_module, "INDEX_KEY_BLOCK", 3)
    tables = Tables(1, 20)
    view = MlaView(torch.empty(0), pages_of(tables, [torch.ones(20, 4) * 0.3]))
    got = index_select(torch.ones(1, HEADS, 4), torch.ones(1, HEADS), view, tables.batch([0], [1], [19]), 5)
    assert got[0].tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("where", ["key", "query", "unwritten"])
def test_a_non_finite_number_is_flagged_for_the_rows_that_see_it_and_no_other(bad: float, where: str) -> None:
    torch.manual_seed(0)
    tables = Tables(1, 16)
    keys, query = torch.randn(12, 5), torch.randn(12, HEADS, 5)
    if where == "key":
        keys[10, 3] = bad
    elif where == "query":
        query[10:, 1, 2] = bad
    pages = pages_of(tables, [keys[:10] if where == "unwritten" else keys])
    batch = tables.batch([0], [12], [0])
    got = index_select(query, torch.randn(12, HEADS), MlaView(torch.empty(0), pages), batch, 4)
    assert (got[:, 0] == NON_FINITE).nonzero()[:, 0].tolist() == [10, 11]


def test_an_empty_batch_writes_and_chooses_nothing() -> None:
    tables = Tables(1, 8)
    pages, batch = empty_pages(tables, 4), tables.batch([], [], [])
    write_index_keys(pages, batch.slot_mapping, torch.empty(0, 4))
    assert pages.scale.isnan().all()
    view = MlaView(torch.empty(0), pages)
    assert index_select(torch.empty(0, HEADS, 4), torch.empty(0, HEADS), view, batch, 3).shape == (0, 3)
