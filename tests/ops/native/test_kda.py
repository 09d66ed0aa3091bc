"""Native KDA against the torch reference: any split, any batch, any number of threads, both gates."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.batches import Tables
from torch import Tensor

from longspan.ops.batch import KdaView
from longspan.ops.kda import CHUNK, RECURRENT_MAX_TOKENS, KdaWeights, LowRank, kda
from longspan.ops.native.extension import choose, extension
from longspan.ops.native.kda import kda as native_kda

pytestmark = pytest.mark.skipif(choose().module is None, reason=f"no native operators: {choose().reason}")

# Of the power of two below the largest value: for bfloat16 three units of its last place.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3 * 2.0**-7}


@dataclasses.dataclass(frozen=True)
class Shape:
    heads: int
    dim: int
    hidden: int = 12
    kernel: int = 4


SHAPES = [
    Shape(1, 1, kernel=2),
    Shape(3, 6),
    Shape(2, 16, kernel=1),
    Shape(5, 17),
    Shape(1, 80),
    Shape(2, 128, 40),
]


@pytest.fixture(autouse=True)
def one_thread_afterwards() -> Iterator[None]:
    yield
    extension().set_threads(1)


def make_weights(
    shape: Shape, dtype: torch.dtype = torch.float32, bound: float | None = -5.0, low_rank_gate: bool = False
) -> KdaWeights:
    inner = shape.heads * shape.dim

    def w(*size: int) -> Tensor:
        return (torch.randn(*size) * size[-1] ** -0.5).to(dtype)

    def low_rank() -> LowRank:
        return LowRank(w(7, shape.hidden), w(inner, 7))

    return KdaWeights(
        q=w(inner, shape.hidden),
        k=w(inner, shape.hidden),
        v=w(inner, shape.hidden),
        forget=low_rank(),
        beta=w(shape.heads, shape.hidden),
        gate=low_rank() if low_rank_gate else w(inner, shape.hidden),
        output=w(shape.hidden, inner),
        conv=torch.randn(3 * inner, shape.kernel) * 0.5,
        a_log=torch.randn(shape.heads) * 0.5,
        dt_bias=torch.randn(inner),
        o_norm=torch.randn(shape.dim),
        gate_lower_bound=bound,
        norm_eps=1e-5,
    )


def poisoned_view(tables: Tables, shape: Shape, dtype: torch.dtype = torch.float32) -> KdaView:
    inner = shape.heads * shape.dim
    return KdaView(
        state=torch.full((tables.num_slots, shape.heads, shape.dim, shape.dim), torch.nan),
        conv=torch.full((tables.num_slots, shape.kernel - 1, 3 * inner), torch.nan, dtype=dtype),
    )


def assert_near(got: Tensor, want: Tensor, tolerance: float) -> None:
    """Equal up to `tolerance` of the scale of `want`; NaN where `want` has it."""
    largest = float(want.float().nan_to_num().abs().max()) if want.numel() else 0.0
    scale = 2.0 ** math.floor(math.log2(largest)) if largest else 0.0
    torch.testing.assert_close(got.float(), want.float(), rtol=0, atol=tolerance * scale, equal_nan=True)


def rows_of(shape: Shape, tokens: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(tokens, shape.hidden).to(dtype)


LENGTHS = st.one_of(
    st.integers(0, RECURRENT_MAX_TOKENS + 1),
    st.sampled_from([15, 16, 17, 31, 33, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 3]),
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@settings(max_examples=40)
@given(data=st.data())
def test_ragged_steps_over_poisoned_slots_equal_the_reference(
    dtype: torch.dtype, data: st.DataObject
) -> None:
    shape = data.draw(st.sampled_from(SHAPES))
    bound = data.draw(st.sampled_from([-5.0, None]))
    torch.manual_seed(data.draw(st.integers(0, 9)))
    weights = make_weights(shape, dtype, bound, data.draw(st.booleans()))
    seqs = data.draw(st.integers(1, 4))
    tables = Tables(seqs, 3 * (2 * CHUNK + 3))
    want_view, view = poisoned_view(tables, shape, dtype), poisoned_view(tables, shape, dtype)
    done = [0] * seqs
    for _ in range(3):
        lengths = data.draw(st.lists(LENGTHS, min_size=seqs, max_size=seqs))
        batch = tables.batch(range(seqs), lengths, done)
        x = rows_of(shape, sum(lengths), dtype)
        want = kda(x, weights, want_view, batch)
        assert_near(native_kda(x, weights, view, batch), want, TOLERANCE[dtype])
        done = [d + n for d, n in zip(done, lengths, strict=True)]
    assert_near(view.state, want_view.state, TOLERANCE[dtype])
    assert_near(view.conv, want_view.conv, TOLERANCE[dtype])


@given(data=st.data())
@settings(max_examples=15)
def test_steps_of_any_size_equal_one_step_in_float32(data: st.DataObject) -> None:
    shape = data.draw(st.sampled_from(SHAPES))
    torch.manual_seed(0)
    weights = make_weights(shape)
    sizes = data.draw(st.lists(LENGTHS, min_size=1, max_size=4))
    x = rows_of(shape, sum(sizes))
    tables = Tables(1, max(sum(sizes), 1))
    whole, split = poisoned_view(tables, shape), poisoned_view(tables, shape)
    want = native_kda(x, weights, whole, tables.batch([0], [sum(sizes)], [0]))
    done, parts = 0, []
    for n in sizes:
        parts.append(native_kda(x[done : done + n], weights, split, tables.batch([0], [n], [done])))
        done += n
    assert_near(torch.cat(parts), want, 1e-5)
    assert_near(split.state, whole.state, 1e-5)
    assert torch.equal(split.conv.nan_to_num(), whole.conv.nan_to_num())


def run(
    weights: KdaWeights, shape: Shape, dtype: torch.dtype, rows: Sequence[Tensor], seqs: Sequence[int]
) -> tuple[list[Tensor], list[Tensor]]:
    """Two steps of the sequences `seqs` -> outputs of the second, and states with NaN as 0."""
    tables = Tables(len(rows), 1200)
    view = poisoned_view(tables, shape, dtype)
    lengths = [rows[s].shape[0] for s in seqs]
    out: Sequence[Tensor] = []
    for context in (0, 1):
        x = torch.cat([rows[s] for s in seqs])
        batch = tables.batch(seqs, lengths, [n * context for n in lengths])
        out = native_kda(x, weights, view, batch).split(lengths)
    return list(out), [view.state[tables.slots[s]].nan_to_num() for s in seqs]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_depend_neither_on_threads_nor_on_batch_mates(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    shape = Shape(3, 36)
    weights = make_weights(shape, dtype)
    rows = [rows_of(shape, n, dtype) for n in (1, 70, 0, 8, 600, 2)]
    want, want_state = run(weights, shape, dtype, rows, range(6))
    for threads in (2, 3, 7):
        extension().set_threads(threads)
        got, state = run(weights, shape, dtype, rows, range(6))
        assert all(torch.equal(a, b) for a, b in zip(got + state, want + want_state, strict=True))
        extension().set_threads(1)
    for s in (0, 1, 3, 4, 5):
        got, state = run(weights, shape, dtype, rows, [s])
        assert torch.equal(got[0], want[s])
        assert torch.equal(state[0], want_state[s])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])  # by token, in chunks
@pytest.mark.parametrize("tokens", [3, 100])
def test_strided_memory_is_updated_in_place_and_nothing_around_it(tokens: int, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    shape = Shape(3, 16)
    inner = shape.heads * shape.dim
    weights = make_weights(shape, dtype)
    tables = Tables(2, 2 * tokens)
    plain = poisoned_view(tables, shape, dtype)
    state = torch.full((tables.num_slots, 20, shape.heads, 24), 7.0)
    conv = torch.full((tables.num_slots, 5, 3 * inner + 2), 7.0, dtype=dtype)
    strided = KdaView(state[:, :16].transpose(1, 2)[..., :16], conv[:, : shape.kernel - 1, : 3 * inner])
    x = rows_of(shape, 2 * tokens, dtype)
    for context in (0, tokens):
        batch = tables.batch([1, 0], [tokens, tokens], [context, context])
        got, want = native_kda(x, weights, strided, batch), native_kda(x, weights, plain, batch)
        assert torch.equal(got, want)
    assert torch.equal(strided.state[tables.slots], plain.state[tables.slots])
    assert torch.equal(strided.conv[tables.slots], plain.conv[tables.slots])
    assert (state[:, 16:] == 7).all() and (state[..., 16:] == 7).all() and (conv[..., 3 * inner :] == 7).all()
    others = [slot for slot in range(tables.num_slots) if slot not in tables.slots.tolist()]
    assert (state[others] == 7).all() and (conv[others] == 7).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])  # by token, in chunks
@pytest.mark.parametrize("shape", [Shape(1, 1, kernel=2), Shape(3, 6), Shape(2, 16, kernel=1), Shape(2, 48)])
@pytest.mark.parametrize("turned", ["window", "state", "both"])
def test_memory_may_lie_the_other_way_round(turned: str, shape: Shape, dtype: torch.dtype) -> None:
    """Taps of a channel side by side, keys of a value side by side, and a gap after each slot and head."""
    torch.manual_seed(1)
    inner = shape.heads * shape.dim
    weights, tables = make_weights(shape, dtype), Tables(3, 120)
    plain = poisoned_view(tables, shape, dtype)
    state = torch.full((tables.num_slots, shape.heads, shape.dim + 1, shape.dim + 2), 7.0)
    conv = torch.full((tables.num_slots, 3 * inner + 1, shape.kernel + 1), 7.0, dtype=dtype)
    view = KdaView(
        plain.state.clone() if turned == "window" else state[:, :, :-1, :-2].mT,
        plain.conv.clone() if turned == "state" else conv[:, :-1, : shape.kernel - 1].mT,
    )
    done = [0, 0, 0]
    for lengths in ([40, 3, 1], [1, 0, 2], [33, 9, 1]):
        batch = tables.batch([2, 0, 1], lengths, done)
        x = rows_of(shape, sum(lengths), dtype)
        assert torch.equal(native_kda(x, weights, view, batch), native_kda(x, weights, plain, batch))
        done = [d + n for d, n in zip(done, lengths, strict=True)]
    assert torch.equal(view.state[tables.slots], plain.state[tables.slots])
    assert torch.equal(view.conv[tables.slots], plain.conv[tables.slots])
    assert (state[..., -2:] == 7).all() and (state[:, :, -1] == 7).all()
    assert (conv[:, -1] == 7).all() and (conv[..., shape.kernel - 1 :] == 7).all()


def test_a_state_with_neither_keys_nor_values_side_by_side_is_refused() -> None:
    shape, tables = Shape(1, 4), Tables(1, 8)
    view = poisoned_view(tables, shape)
    view = KdaView(torch.zeros(*view.state.shape, 2)[..., 0], view.conv)
    with pytest.raises(ValueError, match=r"strides \(32, 8, 2\) for head, key and value"):
        native_kda(rows_of(shape, 1), make_weights(shape), view, tables.batch([0], [1], [0]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])  # by token, in chunks
@pytest.mark.parametrize("bias", [-60.0, 0.0, 60.0])
@pytest.mark.parametrize("bound", [-5.0, None])
def test_no_decay_overflows_or_loses_precision(bound: float | None, bias: float, dtype: torch.dtype) -> None:
    """From no decay at all to forgetting everything at once, and back within a tile."""
    torch.manual_seed(2)
    shape = Shape(2, 20)
    weights = dataclasses.replace(make_weights(shape, dtype, bound=bound), dt_bias=torch.full((40,), bias))
    weights.forget.b.mul_(20.0)
    tables = Tables(1, 400)
    want_view, view = poisoned_view(tables, shape, dtype), poisoned_view(tables, shape, dtype)
    x = rows_of(shape, 200, dtype)
    for context in (0, 200):
        batch = tables.batch([0], [200], [context])
        want = kda(x, weights, want_view, batch)
        assert_near(native_kda(x, weights, view, batch), want, TOLERANCE[dtype])
    assert_near(view.state, want_view.state, TOLERANCE[dtype])


@pytest.mark.parametrize("seqs", [0, 2])
def test_no_rows_at_all_change_nothing(seqs: int) -> None:
    shape = Shape(2, 6)
    tables = Tables(2, 8)
    view = poisoned_view(tables, shape)
    batch = tables.batch(range(seqs), [0] * seqs, [5] * seqs)
    assert native_kda(rows_of(shape, 0), make_weights(shape), view, batch).shape == (0, shape.hidden)
    assert view.state.isnan().all() and view.conv.isnan().all()
