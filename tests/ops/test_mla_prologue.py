"""The prologue and epilogue of MLA, plain and absorbed, against the definition."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.batches import Tables
from torch import Tensor

from longspan.ops.batch import MlaView, QuantizedKeys
from longspan.ops.index_keys import quantize_rows, read_quantized
from longspan.ops.mla_prologue import (
    IndexerWeights,
    MlaWeights,
    QueryLora,
    absorb_query,
    expand_latent,
    mla_epilogue,
    mla_prologue,
)
from longspan.ops.sparse_attention import sparse_attention

HIDDEN, RANK, NOPE, ROPE, VALUE, LORA = 24, 10, 6, 3, 5, 7
INDEX_HEADS, INDEX_DIM = 3, 4
SCALE = (NOPE + ROPE) ** -0.5


def make_weights(
    heads: int, lora: bool = True, index_from: int | None = None, gated: bool = False
) -> MlaWeights:
    """`index_from`: columns of the indexer's query projection, None without an indexer."""

    def w(*shape: int) -> Tensor:
        return torch.randn(*shape) * shape[-1] ** -0.5

    query = w(heads * (NOPE + ROPE), HIDDEN)
    if lora:
        query = QueryLora(w(LORA, HIDDEN), 1 + w(LORA), w(heads * (NOPE + ROPE), LORA))
    indexer = None
    if index_from is not None:
        indexer = IndexerWeights(
            query=w(INDEX_HEADS * INDEX_DIM, index_from),
            key=w(INDEX_DIM, HIDDEN),
            head_weight=w(INDEX_HEADS, HIDDEN),
            key_norm_weight=1 + w(INDEX_DIM),
            key_norm_bias=w(INDEX_DIM),
            key_norm_eps=1e-5,
        )
    return MlaWeights(
        query=query,
        kv_a=w(RANK + ROPE, HIDDEN),
        kv_a_norm=1 + w(RANK),
        up_key=w(heads * NOPE, RANK).view(heads, NOPE, RANK),
        up_value=w(heads * VALUE, RANK).view(heads, VALUE, RANK),
        latent_norm_eps=1e-6,
        indexer=indexer,
        gate=w(heads * VALUE, HIDDEN) if gated else None,
        output=w(HIDDEN, heads * VALUE),
    )


def poisoned_view(tables: Tables, index: bool = False) -> MlaView:
    """Latent and index key are slices of one fused row, as a host may lay them out."""
    fused = torch.full((tables.num_pages, tables.page_size, RANK + ROPE + INDEX_DIM), torch.nan)
    return MlaView(fused[..., : RANK + ROPE], fused[..., RANK + ROPE :] if index else None)


def plain_attention(q: Tensor, rows: Tensor, w: MlaWeights) -> Tensor:
    """Attention over expanded keys and values: q [T, H, N + R], rows [T, C + R] -> [T, H * V]."""
    keys, values = expand_latent(rows, w)
    scores = torch.einsum("thd,shd->hts", q, keys) * SCALE
    tokens = q.shape[0]
    scores = scores.masked_fill(~torch.ones(tokens, tokens, dtype=torch.bool).tril(), -torch.inf)
    return torch.einsum("hts,shv->thv", scores.softmax(-1), values).flatten(1)


@settings(max_examples=30)
@given(heads=st.integers(1, 5), tokens=st.integers(1, 13), lora=st.booleans(), gated=st.booleans())
def test_absorbed_and_expanded_attention_agree_at_any_head_count(
    heads: int, tokens: int, lora: bool, gated: bool
) -> None:
    torch.manual_seed(heads * 100 + tokens)
    w, x = make_weights(heads, lora, gated=gated), torch.randn(tokens, HIDDEN)
    tables = Tables(1, tokens)
    view, batch = poisoned_view(tables), tables.batch([0], [tokens], [0])

    asked = mla_prologue(x, w, view, batch.slot_mapping)
    out, _ = sparse_attention(asked.query, view, batch, None, RANK, SCALE)
    got = mla_epilogue(out, x, w)

    plain = mla_prologue(x, w, view, batch.slot_mapping, absorb=False)
    rows = view.latent.flatten(0, 1)[batch.slot_mapping]
    want = plain_attention(plain.query, rows, w)
    if w.gate is not None:
        want = want * (x @ w.gate.T).sigmoid()
    torch.testing.assert_close(got, want @ w.output.T, atol=1e-5, rtol=1e-4)


def test_latent_is_normalised_and_the_shared_key_is_not() -> None:
    torch.manual_seed(0)
    w, x = make_weights(2), torch.randn(5, HIDDEN)
    tables = Tables(1, 8)
    view, batch = poisoned_view(tables), tables.batch([0], [5], [0])
    mla_prologue(x, w, view, batch.slot_mapping)
    raw = x @ w.kv_a.T
    latent = raw[:, :RANK] * torch.rsqrt(raw[:, :RANK].square().mean(-1, keepdim=True) + 1e-6) * w.kv_a_norm
    got = view.latent.flatten(0, 1)[batch.slot_mapping]
    torch.testing.assert_close(got, torch.cat([latent, raw[:, RANK:]], -1))


def test_only_the_mapped_rows_are_written() -> None:
    w = make_weights(2, index_from=LORA)
    tables = Tables(2, 8)
    view, batch = poisoned_view(tables, index=True), tables.batch([1], [3], [4])
    mla_prologue(torch.randn(3, HIDDEN), w, view, batch.slot_mapping)
    assert isinstance(view.index_key, Tensor)
    for pages in (view.latent, view.index_key):
        written = (~pages.isnan().any(-1)).flatten().nonzero()[:, 0]
        assert written.tolist() == sorted(batch.slot_mapping.tolist())


@pytest.mark.parametrize("source", ["q-latent", "hidden"])
def test_indexer_reads_the_source_that_its_columns_tell(source: str) -> None:
    torch.manual_seed(1)
    w = make_weights(2, index_from=LORA if source == "q-latent" else HIDDEN)
    assert w.indexer and isinstance(w.query, QueryLora)
    x = torch.randn(4, HIDDEN)
    tables = Tables(1, 8)
    view, batch = poisoned_view(tables, index=True), tables.batch([0], [4], [0])
    asked = mla_prologue(x, w, view, batch.slot_mapping)

    low = x @ w.query.a.T
    low = low * torch.rsqrt(low.square().mean(-1, keepdim=True) + 1e-6) * w.query.norm
    query = (low if source == "q-latent" else x) @ w.indexer.query.T
    torch.testing.assert_close(asked.index_query, query.view(4, INDEX_HEADS, INDEX_DIM))
    torch.testing.assert_close(asked.index_weight, x @ w.indexer.head_weight.T * INDEX_HEADS**-0.5)
    key = x @ w.indexer.key.T
    key = (key - key.mean(-1, keepdim=True)) / (key.var(-1, unbiased=False, keepdim=True) + 1e-5).sqrt()
    key = key * w.indexer.key_norm_weight + w.indexer.key_norm_bias
    assert isinstance(view.index_key, Tensor)
    torch.testing.assert_close(view.index_key.flatten(0, 1)[batch.slot_mapping], key)


def test_int8_pages_get_the_same_index_keys_quantised() -> None:
    torch.manual_seed(3)
    w, x, tables = make_weights(2, index_from=LORA), torch.randn(6, HIDDEN), Tables(1, 12)
    batch, plain = tables.batch([0], [6], [3]), poisoned_view(tables, index=True)
    quantised = MlaView(
        poisoned_view(tables).latent,
        QuantizedKeys(
            torch.zeros(tables.num_pages, INDEX_DIM // 4, tables.page_size, 4, dtype=torch.uint8),
            torch.full((tables.num_pages, tables.page_size), torch.nan),
        ),
    )
    asked = [mla_prologue(x, w, view, batch.slot_mapping) for view in (plain, quantised)]
    assert torch.equal(asked[0].query, asked[1].query)
    assert isinstance(plain.index_key, Tensor) and isinstance(quantised.index_key, QuantizedKeys)
    keys = plain.index_key.flatten(0, 1)[batch.slot_mapping]
    got = read_quantized(quantised.index_key, tables.pages[0], 3, 9, INDEX_DIM)
    torch.testing.assert_close(got, tuple(t.float() for t in quantize_rows(keys)), rtol=0, atol=0)


def test_a_layer_with_an_indexer_refuses_a_view_without_index_keys() -> None:
    """Sparse attention must never turn itself off because a cache is missing."""
    tables = Tables(1, 4)
    with pytest.raises(ValueError, match="index keys"):
        mla_prologue(
            torch.randn(1, HIDDEN), make_weights(1, index_from=LORA), poisoned_view(tables), torch.tensor([0])
        )


def test_bfloat16_agrees_with_float32_to_its_noise() -> None:
    torch.manual_seed(2)
    w = make_weights(3)
    assert isinstance(w.query, QueryLora)
    low = dataclasses.replace(
        w,
        query=QueryLora(*(t.bfloat16() for t in (w.query.a, w.query.norm, w.query.b))),
        **{
            name: getattr(w, name).bfloat16()
            for name in ("kv_a", "kv_a_norm", "up_key", "up_value", "output")
        },
    )
    x = torch.randn(6, HIDDEN).bfloat16()
    tables = Tables(1, 8)
    batch = tables.batch([0], [6], [0])
    results = []
    for weights, rows, dtype in ((w, x.float(), torch.float32), (low, x, torch.bfloat16)):
        view = MlaView(
            torch.full((tables.num_pages, tables.page_size, RANK + ROPE), torch.nan, dtype=dtype), None
        )
        asked = mla_prologue(rows, weights, view, batch.slot_mapping)
        out, _ = sparse_attention(asked.query, view, batch, None, RANK, SCALE)
        results.append(mla_epilogue(out, rows, weights))
    assert results[1].dtype == torch.bfloat16
    torch.testing.assert_close(results[1].float(), results[0], atol=0.05, rtol=0.05)


def test_no_rows_are_fine() -> None:
    w = make_weights(2, index_from=LORA)
    tables = Tables(1, 4)
    asked = mla_prologue(
        torch.empty(0, HIDDEN), w, poisoned_view(tables, index=True), torch.empty(0, dtype=torch.int64)
    )
    assert asked.query.shape == (0, 2, RANK + ROPE)
    assert asked.index_query is not None and asked.index_query.shape == (0, INDEX_HEADS, INDEX_DIM)
    assert absorb_query(torch.empty(0, 2, NOPE + ROPE), w).shape == (0, 2, RANK + ROPE)
    assert mla_epilogue(torch.empty(0, 2, RANK), torch.empty(0, HIDDEN), w).shape == (0, HIDDEN)
