"""KDA against a float64 loop over tokens and heads, in every split, with both gates."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.batches import Tables
from torch import Tensor

from longspan.ops.batch import KdaView
from longspan.ops.kda import (
    CHUNK,
    RECURRENT_MAX_TOKENS,
    SEGMENT,
    TILE,
    KdaWeights,
    LowRank,
    chunked_kda,
    kda,
    kda_core,
    log_decay,
    recurrent_kda,
    restore_snapshot,
    take_snapshot,
)

HEADS, DIM, KERNEL = 3, 6, 4
P = HEADS * DIM
HIDDEN = 10


def make_weights(bound: float | None, low_rank_gate: bool = False) -> KdaWeights:
    def w(*shape: int) -> Tensor:
        return torch.randn(*shape) * shape[-1] ** -0.5

    return KdaWeights(
        q=w(P, HIDDEN),
        k=w(P, HIDDEN),
        v=w(P, HIDDEN),
        forget=LowRank(w(DIM, HIDDEN), w(P, DIM)),
        beta=w(HEADS, HIDDEN),
        gate=LowRank(w(DIM, HIDDEN), w(P, DIM)) if low_rank_gate else w(P, HIDDEN),
        output=w(HIDDEN, P),
        conv=torch.randn(3 * P, KERNEL) * 0.5,
        a_log=torch.randn(HEADS) * 0.5,
        dt_bias=torch.randn(P),
        o_norm=torch.randn(DIM),
        gate_lower_bound=bound,
        norm_eps=1e-5,
    )


def slow_recurrence(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """The recurrence as written in the header, float64, one head and token at a time."""
    q, k, v, g, beta, state = (x.double().clone() for x in (q, k, v, g, beta, state))
    out = torch.zeros(v.shape, dtype=torch.float64)
    for t in range(q.shape[0]):
        for h in range(q.shape[1]):
            decayed = torch.diag(g[t, h].exp()) @ state[h]
            delta = beta[t, h] * (v[t, h] - decayed.T @ k[t, h])
            state[h] = decayed + torch.outer(k[t, h], delta)
            out[t, h] = state[h].T @ q[t, h]
    return out, state


def slow_kda(qkv: Tensor, forget: Tensor, beta: Tensor, gate: Tensor, w: KdaWeights) -> tuple[Tensor, Tensor]:
    """One whole sequence from its first token, float64 -> y [T, P] and the final state."""
    tokens = qkv.shape[0]
    conv = torch.zeros(tokens, 3 * P, dtype=torch.float64)
    for t in range(tokens):
        for j in range(KERNEL):
            if t - (KERNEL - 1) + j >= 0:
                conv[t] += w.conv[:, j].double() * qkv[t - (KERNEL - 1) + j].double()
    q, k, v = torch.nn.functional.silu(conv).view(tokens, 3, HEADS, DIM).unbind(1)
    q = q / (q.square().sum(-1, keepdim=True) + 1e-6).sqrt() / math.sqrt(DIM)
    k = k / (k.square().sum(-1, keepdim=True) + 1e-6).sqrt()
    z = (forget.double() + w.dt_bias.double()).view(tokens, HEADS, DIM)
    rate = w.a_log.double().exp()[:, None]
    if w.gate_lower_bound is None:
        g = -rate * torch.log1p(z.exp())
    else:
        g = w.gate_lower_bound / (1 + (-rate * z).exp())
    o, state = slow_recurrence(q, k, v, g, beta.double().sigmoid(), torch.zeros(HEADS, DIM, DIM))
    y = o / (o.square().mean(-1, keepdim=True) + 1e-5).sqrt() * w.o_norm.double()
    return (y * gate.double().sigmoid().view(y.shape)).flatten(1).float(), state.float()


def make_rows(tokens: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return (
        torch.randn(tokens, 3 * P),
        torch.randn(tokens, P),
        torch.randn(tokens, HEADS),
        torch.randn(tokens, P),
    )


def poisoned_view(tables: Tables) -> KdaView:
    return KdaView(
        state=torch.full((tables.num_slots, HEADS, DIM, DIM), torch.nan),
        conv=torch.full((tables.num_slots, KERNEL - 1, 3 * P), torch.nan),
    )


@pytest.mark.parametrize("bound", [-5.0, None])
@settings(max_examples=40)
@given(data=st.data())
def test_ragged_steps_over_poisoned_slots_equal_the_slow_twin(
    bound: float | None, data: st.DataObject
) -> None:
    torch.manual_seed(data.draw(st.integers(0, 9)))
    weights = make_weights(bound)
    lengths = data.draw(st.lists(st.integers(0, 40), min_size=1, max_size=4))
    rows = [make_rows(n) for n in lengths]
    tables = Tables(len(lengths), 64)
    view = poisoned_view(tables)
    done = [0] * len(lengths)
    outputs: list[list[Tensor]] = [[torch.empty(0, P)] for _ in lengths]
    while done != lengths:
        sizes = data.draw(st.lists(st.integers(0, 20), min_size=len(lengths), max_size=len(lengths)))
        if not any(sizes):
            sizes = [20] * len(lengths)
        take = [min(size, n - d) for size, n, d in zip(sizes, lengths, done, strict=True)]
        inputs = [
            torch.cat([r[i][d : d + t] for r, d, t in zip(rows, done, take, strict=True)]) for i in range(4)
        ]
        y = kda_core(*inputs, weights, view, tables.batch(range(len(lengths)), take, done))
        for s, part in enumerate(y.split(take)):
            outputs[s].append(part)
            done[s] += take[s]
    for s, n in enumerate(lengths):
        want, state = slow_kda(*rows[s], weights)
        torch.testing.assert_close(torch.cat(outputs[s]), want, atol=2e-5, rtol=1e-4)
        if n:
            torch.testing.assert_close(view.state[tables.slots[s]], state, atol=2e-5, rtol=1e-4)
        else:
            assert view.state[tables.slots[s]].isnan().all()


EDGES = sorted(
    {
        1,
        2,
        RECURRENT_MAX_TOKENS,
        RECURRENT_MAX_TOKENS + 1,
        TILE - 1,
        TILE,
        TILE + 1,
        CHUNK - 1,
        CHUNK,
        CHUNK + 1,
        2 * CHUNK + 3,
        SEGMENT,
        SEGMENT + 1,
    }
)


def random_recurrence(tokens: int, key: int, value: int, decay: float = 0.3) -> tuple[Tensor, ...]:
    q, k = torch.randn(2, tokens, HEADS, key)
    k = torch.nn.functional.normalize(k, dim=-1)
    g = -decay * torch.rand(tokens, HEADS, key)
    return q, k, torch.randn(tokens, HEADS, value), g, torch.rand(tokens, HEADS)


@pytest.mark.parametrize("tokens", EDGES)
def test_chunks_equal_the_recurrence_and_leave_the_same_non_square_state(tokens: int) -> None:
    torch.manual_seed(tokens)
    q, k, v, g, beta = random_recurrence(tokens, key=5, value=7)
    start = torch.randn(HEADS, 5, 7)
    o, state = chunked_kda(q, k, v, g, beta, start)
    want, want_state = slow_recurrence(q, k, v, g, beta, start)
    torch.testing.assert_close(o, want.float(), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(state, want_state.float(), atol=1e-4, rtol=1e-4)

    walked = start[None]
    for t in range(tokens):
        _, walked = recurrent_kda(
            q[t : t + 1], k[t : t + 1], v[t : t + 1], g[t : t + 1], beta[t : t + 1], walked
        )
    torch.testing.assert_close(state, walked[0], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("decay", [0.0, 5.0, 90.0, 1e4])
def test_chunks_neither_overflow_nor_lose_precision_at_any_decay(decay: float) -> None:
    """Tokens at the bound of -5 by the thousand, and far beyond it, as the unbounded gate allows."""
    torch.manual_seed(1)
    tokens = 3000 if decay == 5.0 else 200
    q, k, v, g, beta = random_recurrence(tokens, key=4, value=4)
    g = torch.full_like(g, -decay)
    g[::7] = -0.01  # weak decay right after a strong one: the small difference of large sums
    start = torch.randn(HEADS, 4, 4)
    o, state = chunked_kda(q, k, v, g, beta, start)
    rows = slice(tokens - 200, tokens)
    if decay == 5.0:
        # Every g of a 7-token window together forgets e^-30; the last 200 tokens don't know the first 2800.
        want, want_state = slow_recurrence(*(x[rows] for x in (q, k, v, g, beta)), torch.zeros_like(start))
        torch.testing.assert_close(o[rows][20:], want[20:].float(), atol=1e-4, rtol=1e-4)
    else:
        want, want_state = slow_recurrence(q, k, v, g, beta, start)
        torch.testing.assert_close(o, want.float(), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(state, want_state.float(), atol=1e-4, rtol=1e-4)


def test_without_beta_the_state_only_decays() -> None:
    q, k, v, g, _ = random_recurrence(20, 4, 4)
    start = torch.randn(HEADS, 4, 4)
    _, state = chunked_kda(q, k, v, g, torch.zeros(20, HEADS), start)
    torch.testing.assert_close(state, start * g.sum(0).exp()[..., None])


def test_without_decay_and_with_full_beta_a_unit_key_reads_back_its_value() -> None:
    q, k, v, g, _ = random_recurrence(1, 4, 6)
    _, state = recurrent_kda(q, k, v, torch.zeros_like(g), torch.ones(1, HEADS), torch.randn(1, HEADS, 4, 6))
    torch.testing.assert_close((state.transpose(-1, -2) @ k[..., None])[..., 0], v, atol=1e-5, rtol=1e-5)


def test_log_decay_stays_within_the_bound_and_softplus_is_linear_for_large_inputs() -> None:
    torch.manual_seed(0)
    forget = torch.randn(50, P) * 30
    bounded = log_decay(forget, make_weights(-5.0))
    assert bounded.min() >= -5.0
    assert bounded.max() <= 0.0
    weights = dataclasses.replace(make_weights(None), a_log=torch.zeros(HEADS), dt_bias=torch.zeros(P))
    got = log_decay(torch.full((1, P), 50.0), weights)
    torch.testing.assert_close(got, torch.full((1, HEADS, DIM), -50.0))


def test_a_sequence_gives_the_same_alone_and_among_batch_mates() -> None:
    torch.manual_seed(3)
    weights = make_weights(-5.0)
    lengths = [1, 9, 30, 0, 2]
    rows = [make_rows(n) for n in lengths]
    tables = Tables(len(lengths), 64)
    together = poisoned_view(tables)
    inputs = [torch.cat([r[i] for r in rows]) for i in range(4)]
    y = kda_core(*inputs, weights, together, tables.batch(range(5), lengths, [0] * 5)).split(lengths)
    for s, n in enumerate(lengths):
        alone = poisoned_view(tables)
        lone = kda_core(*rows[s], weights, alone, tables.batch([s], [n], [0]))
        torch.testing.assert_close(y[s], lone, atol=1e-6, rtol=1e-5)
        slot = tables.slots[s]
        torch.testing.assert_close(
            together.state[slot], alone.state[slot], atol=1e-6, rtol=1e-5, equal_nan=True
        )


def test_strided_state_and_window_are_updated_in_place() -> None:
    torch.manual_seed(4)
    weights = make_weights(-5.0)
    tables = Tables(1, 32)
    plain = poisoned_view(tables)
    state = torch.full((tables.num_slots, DIM, HEADS, DIM + 3), torch.nan).transpose(1, 2)[..., :DIM]
    conv = torch.full((tables.num_slots, 3 * P, KERNEL - 1), torch.nan).transpose(1, 2)
    strided = KdaView(state, conv)
    rows, context = make_rows(24), 0
    for n in (1, 20, 3):
        part = [r[context : context + n] for r in rows]
        batch = tables.batch([0], [n], [context])
        torch.testing.assert_close(
            kda_core(*part, weights, strided, batch), kda_core(*part, weights, plain, batch)
        )
        context += n
    torch.testing.assert_close(strided.state[tables.slots[0]], plain.state[tables.slots[0]])


def test_bfloat16_rows_keep_a_float32_state() -> None:
    torch.manual_seed(5)
    weights = make_weights(-5.0)
    tables = Tables(1, 32)
    rows = [r.bfloat16() for r in make_rows(20)]
    view = KdaView(
        torch.full((tables.num_slots, HEADS, DIM, DIM), torch.nan),
        torch.full((tables.num_slots, KERNEL - 1, 3 * P), torch.nan, dtype=torch.bfloat16),
    )
    y = kda_core(*rows, weights, view, tables.batch([0], [20], [0]))
    assert y.dtype == torch.bfloat16
    want, state = slow_kda(*rows, weights)
    torch.testing.assert_close(y.float(), want, atol=0.05, rtol=0.05)
    torch.testing.assert_close(view.state[tables.slots[0]], state, atol=0.02, rtol=0.02)


@pytest.mark.parametrize("low_rank_gate", [False, True])
@pytest.mark.parametrize("lengths", [[], [0], [1], [20], [9, 0, 3]])
def test_the_layer_is_the_core_between_its_projections(low_rank_gate: bool, lengths: list[int]) -> None:
    torch.manual_seed(6)
    w = make_weights(-5.0, low_rank_gate)
    tables = Tables(max(len(lengths), 1), 32)
    xs = [torch.randn(n, HIDDEN) for n in lengths]
    batch = tables.batch(range(len(lengths)), lengths, [0] * len(lengths))
    got = kda(torch.cat([torch.empty(0, HIDDEN), *xs]), w, poisoned_view(tables), batch)
    assert got.shape == (sum(lengths), HIDDEN)
    for x, part in zip(xs, got.split(lengths), strict=True):
        gate = w.gate.b @ w.gate.a if isinstance(w.gate, LowRank) else w.gate
        qkv = x @ torch.cat([w.q, w.k, w.v]).T
        y, _ = slow_kda(qkv, x @ (w.forget.b @ w.forget.a).T, x @ w.beta.T, x @ gate.T, w)
        torch.testing.assert_close(part, y @ w.output.T, atol=5e-5, rtol=1e-4)


def test_a_sequence_goes_on_from_a_snapshot_in_another_slot() -> None:
    torch.manual_seed(6)
    weights = make_weights(-5.0)
    tables = Tables(2, 32)
    view = poisoned_view(tables)
    x = torch.randn(24, HIDDEN)
    kda(x[:12], weights, view, tables.batch([0], [12], [0]))
    snapshot = take_snapshot(view, int(tables.slots[0]))
    assert snapshot.state.is_contiguous()
    want = kda(x[12:], weights, view, tables.batch([0], [12], [12]))
    restore_snapshot(snapshot, view, int(tables.slots[1]))
    got = kda(x[12:], weights, view, tables.batch([1], [12], [12]))
    assert torch.equal(got, want)
    assert torch.equal(view.state[tables.slots[1]], view.state[tables.slots[0]])
