"""The native prologue and epilogue of MLA against the torch reference."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.batches import Tables
from torch import Tensor

from longspan.ops import mla_prologue as reference
from longspan.ops.batch import QUAD, MlaView, QuantizedKeys
from longspan.ops.mla_prologue import IndexerWeights, MlaQueries, MlaWeights, QueryLora
from longspan.ops.native import mla
from longspan.ops.shard import WHOLE, Shard

from .conftest import THREADS

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2 * 2.0**-8}


@dataclass(frozen=True)
class Shape:
    hidden: int = 40
    heads: int = 3
    query_heads: int | None = None  # where they are others
    rank: int = 36
    nope: int = 10
    rope: int = 6
    value: int = 7
    lora: int | None = 21
    index_heads: int = 3
    index_dim: int = 10
    index_from_hidden: bool = False
    indexed: bool = True
    gated: bool = True


shapes = st.builds(
    Shape,
    hidden=st.sampled_from([1, 24, 65]),
    heads=st.integers(1, 5),
    query_heads=st.sampled_from([None, 1, 7]),
    rank=st.sampled_from([1, 16, 33, 70]),
    nope=st.sampled_from([1, 8, 31, 33]),
    rope=st.sampled_from([0, 1, 16]),
    value=st.sampled_from([1, 6, 17, 32]),
    lora=st.sampled_from([None, 1, 20, 64]),
    index_heads=st.integers(1, 4),
    index_dim=st.sampled_from([1, 4, 6, 18, 33]),
    index_from_hidden=st.booleans(),
    indexed=st.booleans(),
    gated=st.booleans(),
)
dtypes = st.sampled_from([torch.float32, torch.bfloat16])
shards = st.sampled_from([WHOLE, Shard(0, 2, 1), Shard(1, 3, 2), Shard(1, 2, 16)])


def make_weights(s: Shape, dtype: torch.dtype) -> MlaWeights:
    def w(*shape: int) -> Tensor:
        return (torch.randn(*shape) * shape[-1] ** -0.5).to(dtype)

    def norm(size: int) -> Tensor:
        return (1 + 0.2 * torch.randn(size)).to(dtype)

    query_heads = s.query_heads or s.heads
    query: QueryLora | Tensor = w(query_heads * (s.nope + s.rope), s.lora or s.hidden)
    if s.lora:
        query = QueryLora(w(s.lora, s.hidden), norm(s.lora), query)
    indexer = IndexerWeights(
        query=w(s.index_heads * s.index_dim, s.hidden if s.index_from_hidden or not s.lora else s.lora),
        key=w(s.index_dim, s.hidden),
        head_weight=w(s.index_heads, s.hidden),
        key_norm_weight=norm(s.index_dim),
        key_norm_bias=w(s.index_dim),
        key_norm_eps=1e-5,
    )
    return MlaWeights(
        query=query,
        kv_a=w(s.rank + s.rope, s.hidden),
        kv_a_norm=norm(s.rank),
        up_key=w(query_heads * s.nope, s.rank).view(query_heads, s.nope, s.rank),
        up_value=w(s.heads * s.value, s.rank).view(s.heads, s.value, s.rank),
        latent_norm_eps=1e-6,
        indexer=indexer if s.indexed else None,
        gate=w(s.heads * s.value, s.hidden) if s.gated else None,
        output=w(s.hidden, s.heads * s.value),
    )


def poisoned_view(s: Shape, tables: Tables, dtype: torch.dtype, quantised: bool = False) -> MlaView:
    """Latent and index key are slices of one fused row, as a host may lay them out."""
    width = s.rank + s.rope
    fused = torch.full((tables.num_pages, tables.page_size, width + s.index_dim), torch.nan, dtype=dtype)
    keys: Tensor | QuantizedKeys = fused[..., width:]
    if quantised:
        quads = -(-s.index_dim // QUAD)
        codes = torch.zeros(tables.num_pages, quads + 1, tables.page_size, QUAD, dtype=torch.uint8)
        scale = torch.full((tables.num_pages, 2 * tables.page_size), torch.nan)
        keys = QuantizedKeys(codes[:, 1:], scale[:, ::2])
    return MlaView(fused[..., :width], keys if s.indexed else None)


def memory_of(view: MlaView) -> list[Tensor]:
    keys = view.index_key
    if isinstance(keys, QuantizedKeys):
        return [view.latent, keys.codes, keys.scale]
    return [view.latent] if keys is None else [view.latent, keys]


def answers(asked: MlaQueries, view: MlaView) -> list[Tensor]:
    given = [asked.query, asked.index_query, asked.index_weight]
    return [*(x for x in given if x is not None), *memory_of(view)]


def assert_near(got: Tensor, want: Tensor, dtype: torch.dtype) -> None:
    assert got.shape == want.shape and got.dtype == want.dtype
    written = ~want.isnan()
    assert torch.equal(written, ~got.isnan())
    if written.any():
        scale = float(want[written].abs().max())
        torch.testing.assert_close(got, want, rtol=0, atol=TOLERANCE[dtype] * scale, equal_nan=True)


@settings(max_examples=60)
@given(s=shapes, tokens=st.sampled_from([0, 1, 2, 5, 9]), shard=shards, dtype=dtypes, seed=st.integers(0, 99))
def test_the_prologue_is_that_of_the_reference(
    s: Shape, tokens: int, shard: Shard, dtype: torch.dtype, seed: int
) -> None:
    torch.manual_seed(seed)
    w, x, tables = make_weights(s, dtype), torch.randn(tokens, s.hidden).to(dtype), Tables(2, 12)
    slots = tables.batch([1], [tokens], [3], shard=shard).slot_mapping
    views = [poisoned_view(s, tables, dtype) for _ in range(2)]
    want = answers(reference.mla_prologue(x, w, views[0], slots), views[0])
    got = answers(mla.mla_prologue(x, w, views[1], slots), views[1])
    for g, e in zip(got, want, strict=True):
        assert_near(g, e, dtype)


@settings(max_examples=60)
@given(s=shapes, tokens=st.sampled_from([0, 1, 2, 5, 9]), dtype=dtypes, seed=st.integers(0, 99))
def test_the_epilogue_is_that_of_the_reference(s: Shape, tokens: int, dtype: torch.dtype, seed: int) -> None:
    torch.manual_seed(seed)
    w, x = make_weights(s, dtype), torch.randn(tokens, s.hidden).to(dtype)
    latent_out = torch.randn(tokens, s.heads, s.rank)
    assert_near(mla.mla_epilogue(latent_out, x, w), reference.mla_epilogue(latent_out, x, w), dtype)


@settings(max_examples=30)
@given(dim=st.sampled_from([1, 3, 4, 10, 17, 64]), shard=shards, dtype=dtypes, seed=st.integers(0, 99))
def test_int8_pages_hold_the_native_index_keys_quantised_as_the_reference_does(
    dim: int, shard: Shard, dtype: torch.dtype, seed: int
) -> None:
    torch.manual_seed(seed)
    s = Shape(index_dim=dim)
    w, x, tables = make_weights(s, dtype), torch.randn(6, s.hidden).to(dtype), Tables(1, 12)
    slots = tables.batch([0], [6], [3], shard=shard).slot_mapping
    plain, got, want = (poisoned_view(s, tables, dtype, quantised) for quantised in (False, True, True))
    mla.mla_prologue(x, w, plain, slots)
    mla.mla_prologue(x, w, got, slots)
    assert isinstance(plain.index_key, Tensor) and isinstance(want.index_key, QuantizedKeys)
    reference.write_index_keys(want.index_key, slots, plain.index_key.flatten(0, 1)[slots])
    for g, e in zip(memory_of(got)[1:], memory_of(want)[1:], strict=True):
        torch.testing.assert_close(g, e, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("bias", "shows"), [(0.0, 0.0), (torch.nan, torch.nan), (torch.inf, torch.inf), (1e-44, 0.0)]
)
def test_a_key_that_int8_cannot_hold_shows_in_its_scale(bias: float, shows: float) -> None:
    s = Shape(index_dim=5)
    w, tables = make_weights(s, torch.float32), Tables(1, 4)
    assert w.indexer
    w.indexer.key_norm_bias[:] = 0
    w.indexer.key_norm_bias[2] = bias
    view, slots = poisoned_view(s, tables, torch.float32, quantised=True), torch.tensor([1])
    mla.mla_prologue(torch.zeros(1, s.hidden), w, view, slots)
    assert isinstance(view.index_key, QuantizedKeys)
    torch.testing.assert_close(view.index_key.scale[0, 1], torch.tensor(shows), equal_nan=True)
    assert view.index_key.codes[0, :, 1].eq(128).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("quantised", [False, True])
def test_threads_and_batch_mates_change_no_bit(dtype: torch.dtype, quantised: bool, with_threads) -> None:
    torch.manual_seed(5)
    s, tokens = Shape(hidden=130, heads=5, rank=100, nope=50, value=40, lora=70), 13
    w, x, tables = make_weights(s, dtype), torch.randn(tokens, s.hidden).to(dtype), Tables(1, 16)
    slots = tables.batch([0], [tokens], [0]).slot_mapping
    latent_out = torch.randn(tokens, s.heads, s.rank)

    def run(splits: list[int]) -> list[Tensor]:
        view = poisoned_view(s, tables, dtype, quantised)
        asked, outs = [], []
        for rows in torch.arange(tokens).split(splits):
            asked.append(mla.mla_prologue(x[rows], w, view, slots[rows]))
            outs.append(mla.mla_epilogue(latent_out[rows], x[rows], w))
        queries = MlaQueries(*(torch.cat(parts) for parts in zip(*map(_fields, asked), strict=True)))
        return [torch.cat(outs), *answers(queries, view)]

    with_threads(1)
    want = run([tokens])
    for threads in THREADS:
        with_threads(threads)
        for splits in ([tokens], [1] * tokens, [4, 1, 8]):
            for g, e in zip(run(splits), want, strict=True):
                torch.testing.assert_close(g, e, rtol=0, atol=0, equal_nan=True)


def test_a_long_prompt_is_cut_in_blocks_without_a_trace() -> None:
    torch.manual_seed(6)
    s, tokens, dtype = Shape(hidden=33, heads=2, rank=70, value=50), 300, torch.bfloat16
    w, x, tables = make_weights(s, dtype), torch.randn(tokens, s.hidden).to(dtype), Tables(1, tokens)
    slots, latent_out = tables.batch([0], [tokens], [0]).slot_mapping, torch.randn(tokens, s.heads, s.rank)
    views = [poisoned_view(s, tables, dtype) for _ in range(2)]
    whole = mla.mla_prologue(x, w, views[0], slots), mla.mla_epilogue(latent_out, x, w)
    want = reference.mla_prologue(x, w, views[1], slots), reference.mla_epilogue(latent_out, x, w)
    for g, e in zip(answers(whole[0], views[0]), answers(want[0], views[1]), strict=True):
        assert_near(g, e, dtype)
    assert_near(whole[1], want[1], dtype)
    for rows in torch.arange(tokens).split([1, 127, 128, 44]):
        asked = mla.mla_prologue(x[rows], w, views[0], slots[rows])
        assert torch.equal(asked.query, whole[0].query[rows])
        assert torch.equal(mla.mla_epilogue(latent_out[rows], x[rows], w), whole[1][rows])


def _fields(asked: MlaQueries) -> list[Tensor]:
    assert asked.index_query is not None and asked.index_weight is not None
    return [asked.query, asked.index_query, asked.index_weight]
