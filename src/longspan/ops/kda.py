"""Kimi Delta Attention: projections, convolution, norms, gates, recurrence, gated output norm, projection.

From the normalised hidden x of each row, in the model's dtype:

    conv_q | conv_k | conv_v = short_conv(W_q x | W_k x | W_v x)        b = W_beta x
    forget = B_f A_f x        gate = W_g x, or B_g A_g x        out = W_o y

Per head, with state S [K, V] in float32 (zero at sequence start) and everything below in float32:

    q = conv_q * rsqrt(sum conv_q^2 + 1e-6) / sqrt(K)       k = conv_k * rsqrt(sum conv_k^2 + 1e-6)
    beta = sigmoid(b)         z = forget + dt_bias
    g = bound * sigmoid(exp(A_log) z)      with a gate_lower_bound        log decay per channel, g <= 0
      = -exp(A_log) * softplus(z)          without
    S' = diag(e^g) S;   S = S' + k (beta (v - S'^T k))^T;   o = S^T q
    y = round( o_norm * o rsqrt(mean(o^2) + eps) * sigmoid(gate) )

Two forms of one recurrence. `recurrent_kda` walks token by token, all sequences at once. `chunked_kda` takes
CHUNK tokens at a time: with G the running sum of g inside a chunk and T the inverse of a unit lower triangle,

    A_rs = beta_r sum_i k_ri k_si e^(G_ri - G_si), s < r       P_rs = sum_i q_ri k_si e^(G_ri - G_si), s <= r
    D = T (beta v) - T (beta k e^G) S                          o = (q e^G) S + P D
    S <- diag(e^G_C) S + (k e^(G_C - G))^T D

Every exponent is a difference G_r - G_s <= 0: taken directly inside tiles of TILE rows, and split at the
first row of the tile (both parts <= 0) between tiles. So nothing overflows, neither at the bound for ever
nor without a bound. G is kept in float64, so that a small difference of large sums keeps its digits, and so
are the triangle's solution and S inside a segment, because the solution amplifies rounding.

Padding rows are identity: g = 0 and beta = 0. A sequence of length 0 leaves its slot alone; one without
context starts from zeros whatever its slot holds.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from longspan.ops.batch import KdaView, StepBatch
from longspan.ops.linear import linear
from longspan.ops.short_conv import short_conv

RECURRENT_MAX_TOKENS = 8  # sequences with at most this many rows go token by token
CHUNK = 64
TILE = 8
SEGMENT = 512  # tokens whose intra-chunk matrices are held at once
L2_EPS = 1e-6


@dataclass(frozen=True, eq=False)
class LowRank:
    """b @ a @ x."""

    a: Tensor  # [rank, in]
    b: Tensor  # [out, rank]


@dataclass(frozen=True, eq=False)
class KdaWeights:
    """One KDA layer: projections in the model's dtype, the rest float32. P = heads * head_dim."""

    q: Tensor  # [P, hidden]
    k: Tensor  # [P, hidden]
    v: Tensor  # [P, hidden]
    forget: LowRank
    beta: Tensor  # [heads, hidden]
    gate: Tensor | LowRank  # [P, hidden], or of low rank (Kimi-Linear)
    output: Tensor  # [hidden, P]
    conv: Tensor  # [3 * P, kernel], q | k | v
    a_log: Tensor  # [heads]
    dt_bias: Tensor  # [P]
    o_norm: Tensor  # [head_dim], shared by the heads
    gate_lower_bound: float | None
    norm_eps: float

    @property
    def num_heads(self) -> int:
        return self.a_log.shape[0]


@dataclass(frozen=True, eq=False)
class KdaSnapshot:
    """What one layer remembers of one sequence, apart from the slot that it came from."""

    state: Tensor  # [heads, head_dim (key), head_dim (value)] float32
    conv: Tensor  # [kernel - 1, 3 * P]


def take_snapshot(view: KdaView, slot: int) -> KdaSnapshot:
    return KdaSnapshot(
        view.state[slot].clone(memory_format=torch.contiguous_format),
        view.conv[slot].clone(memory_format=torch.contiguous_format),
    )


def restore_snapshot(snapshot: KdaSnapshot, view: KdaView, slot: int) -> None:
    """The sequence in `slot` goes on from there; its context length must be the one of the snapshot."""
    view.state[slot] = snapshot.state
    view.conv[slot] = snapshot.conv


def kda(x: Tensor, weights: KdaWeights, view: KdaView, batch: StepBatch) -> Tensor:
    """x [T, hidden] -> [T, hidden]. Updates `view`."""
    qkv = torch.cat([linear(x, weights.q), linear(x, weights.k), linear(x, weights.v)], -1)
    forget, gate = _project(x, weights.forget), _project(x, weights.gate)
    y = kda_core(qkv, forget, linear(x, weights.beta), gate, weights, view, batch)
    return linear(y, weights.output)


def _project(x: Tensor, weight: Tensor | LowRank) -> Tensor:
    if isinstance(weight, LowRank):
        return linear(linear(x, weight.a), weight.b)
    return linear(x, weight)


def kda_core(
    qkv: Tensor,
    forget: Tensor,
    beta: Tensor,
    gate: Tensor,
    weights: KdaWeights,
    view: KdaView,
    batch: StepBatch,
) -> Tensor:
    """Between the projections, whose results have the model's dtype -> y [T, P], same dtype. Updates `view`.

    qkv [T, 3P] raw q | k | v; forget [T, P]; beta [T, heads]; gate [T, P].
    """
    mixed = short_conv(qkv, weights.conv, view.conv, batch).float().unflatten(1, (3, weights.num_heads, -1))
    q, k, v = mixed.unbind(1)
    q = _l2_normalise(q) * q.shape[-1] ** -0.5
    k = _l2_normalise(k)
    g = log_decay(forget, weights)
    b = torch.sigmoid(beta.float())

    o = torch.empty(v.shape)
    short = ((batch.lengths > 0) & (batch.lengths <= RECURRENT_MAX_TOKENS)).nonzero()[:, 0]
    if short.numel():
        _recurrent_sequences(o, q, k, v, g, b, view.state, batch, short)
    for s, (begin, end, context) in enumerate(batch.sequences):
        if end - begin > RECURRENT_MAX_TOKENS:
            slot = batch.state_slots[s]
            state = view.state[slot] if context else torch.zeros(view.state.shape[1:])
            rows = slice(begin, end)
            o[rows], view.state[slot] = chunked_kda(q[rows], k[rows], v[rows], g[rows], b[rows], state)

    o = o.to(qkv.dtype).float()
    y = o * torch.rsqrt(o.square().mean(-1, keepdim=True) + weights.norm_eps) * weights.o_norm
    return (y * torch.sigmoid(gate.float()).view(y.shape)).to(qkv.dtype).flatten(1)


def log_decay(forget: Tensor, weights: KdaWeights) -> Tensor:
    """forget [T, P] -> g [T, heads, head_dim] float32, never positive."""
    z = (forget.float() + weights.dt_bias).unflatten(1, (weights.num_heads, -1))
    rate = weights.a_log.exp()[:, None]
    if weights.gate_lower_bound is None:
        return -rate * torch.nn.functional.softplus(z, threshold=20.0)
    return weights.gate_lower_bound * torch.sigmoid(rate * z)


def _l2_normalise(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_EPS)


def _recurrent_sequences(
    o: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    b: Tensor,
    states: Tensor,
    batch: StepBatch,
    seqs: Tensor,
) -> None:
    """Runs the sequences `seqs` side by side, one token of each at a time."""
    slots, lengths, starts = batch.state_slots[seqs], batch.lengths[seqs], batch.query_starts[seqs]
    fresh = (batch.context_lens[seqs] == 0)[:, None, None, None]
    state = torch.where(fresh, 0.0, states[slots])
    for i in range(int(lengths.max())):
        live = (lengths > i).nonzero()[:, 0]
        rows = starts[live] + i
        o[rows], state[live] = recurrent_kda(q[rows], k[rows], v[rows], g[rows], b[rows], state[live])
    states[slots] = state


def recurrent_kda(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """One token of each of n sequences: q, k, g [n, H, K], v [n, H, V], beta [n, H], state [n, H, K, V].

    Returns o [n, H, V] and the new state, all float32.
    """
    state = state * g.exp()[..., None]
    expected = (k[..., None, :] @ state)[..., 0, :]
    delta = beta[..., None] * (v - expected)
    state = state + k[..., :, None] * delta[..., None, :]
    return (q[..., None, :] @ state)[..., 0, :], state


def chunked_kda(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """All L tokens of one sequence: q, k, g [L, H, K], v [L, H, V], beta [L, H], state [H, K, V].

    Returns o [L, H, V] and the new state, all float32. Working memory does not grow with L.
    """
    o = torch.empty(v.shape)
    for begin in range(0, q.shape[0], SEGMENT):
        rows = slice(begin, begin + SEGMENT)
        o[rows], state = _segment(q[rows], k[rows], v[rows], g[rows], beta[rows], state)
    return o, state


def _segment(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    length = q.shape[0]
    chunk = min(CHUNK, -(-length // TILE) * TILE)
    q, k, v, g, beta = (_to_chunks(x, chunk) for x in (q, k, v, g, beta[..., None]))
    total = g.double().cumsum(2)  # G
    grow = total.exp()

    beta_k = beta * k
    A, P = (x.double() for x in _decayed_products(beta_k, q, k, total))
    solved = torch.linalg.solve_triangular(
        A, torch.cat([beta * v, beta_k * grow], -1), upper=False, unitriangular=True
    )
    U, W = solved.split([v.shape[-1], k.shape[-1]], -1)
    q_in = q * grow
    k_out = (k * (total[:, :, -1:] - total).exp()).transpose(-1, -2)
    decay = grow[:, :, -1, :, None]

    o = torch.empty(v.shape)
    state = state.double()
    for c in range(q.shape[0]):
        delta = U[c] - W[c] @ state
        o[c] = q_in[c] @ state + P[c] @ delta
        state = decay[c] * state + k_out[c] @ delta
    return o.transpose(1, 2).flatten(0, 1)[:length], state.float()


def _to_chunks(x: Tensor, chunk: int) -> Tensor:
    """[L, H, n] -> [chunks, H, chunk, n], zero rows at the end."""
    padding = -x.shape[0] % chunk
    x = torch.nn.functional.pad(x, (0, 0, 0, 0, 0, padding))
    return x.unflatten(0, (-1, chunk)).transpose(1, 2)


def _decayed_products(beta_k: Tensor, q: Tensor, k: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
    """A (strictly lower) and P (lower) of every chunk, each [chunks, H, C, C]."""
    lefts = torch.stack([beta_k, q], 2)  # [n, H, 2, C, K]
    size = k.shape[2]
    products = k.new_zeros(*k.shape[:2], 2, size, size)
    for first in range(TILE, size, TILE):
        tile = slice(first, first + TILE)
        anchor = total[:, :, first : first + 1]
        left = lefts[..., tile, :] * (total[:, :, tile] - anchor).exp().float()[:, :, None]
        right = k[:, :, :first] * (anchor - total[:, :, :first]).exp().float()
        products[..., tile, :first] = left @ right[:, :, None].transpose(-1, -2)

    inside = total.unflatten(2, (-1, TILE))
    gap = (inside[..., :, None, :] - inside[..., None, :, :]).clamp(max=0.0).float()  # s > r is masked below
    right = gap.exp() * k.unflatten(2, (-1, TILE))[..., None, :, :]  # [n, H, tiles, r, s, K]
    left = lefts.unflatten(3, (-1, TILE)).movedim(2, -1)  # [n, H, tiles, r, K, 2]
    diagonal = (right @ left).movedim(-1, 2)  # [n, H, 2, tiles, r, s]
    tiles = products.unflatten(4, (-1, TILE)).unflatten(3, (-1, TILE))  # [n, H, 2, tile, r, tile, s]
    tiles.diagonal(dim1=3, dim2=5).copy_(diagonal.movedim(3, -1))
    return products[:, :, 0].tril(-1), products[:, :, 1].tril()
