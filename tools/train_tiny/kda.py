"""Chunked, differentiable Kimi Delta Attention for training on a CPU.

Maths: the recurrence S' = Diag(e^g) S, d = b (v - S'^T k), S = S' + k d^T, o = S^T q, in the chunked
(WY) form of "Kimi Linear" (arXiv 2510.26692). Per chunk of C tokens with G the running sum of g:

    A_rs = b_r sum_i k_ri k_si e^{G_ri - G_si}   (s < r)      T = (I + A)^-1
    U = T (b v)     W = T (b k e^G)     D = U - W S_0
    o_r = (q_r e^{G_r})^T S_0 + sum_{s<=r} P_rs D_s
    S_C = Diag(e^{G_C}) S_0 + sum_s (k_s e^{G_C - G_s}) D_s^T

Exponents are taken against the middle row of the chunk, so with g >= -5 and C = 32 they stay within 80
nats. Entries above the diagonal may overflow to inf; they are replaced (never multiplied) by zero.
The scan over chunks and the inverse are opaque operators with hand-written gradients: the first would
unroll into a huge graph, the second must be forward substitution (a Neumann series cancels badly when
the keys of a chunk are alike).
"""

from __future__ import annotations

import torch
from torch import Tensor

CHUNK = 32


def kda_recurrent(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """Token by token twin of `kda_chunked`. q, k, g [B,H,T,K]; v [B,H,T,V]; beta [B,H,T]; gives [B,H,T,V]."""
    state = q.new_zeros(*q.shape[:2], q.shape[-1], v.shape[-1])
    out = []
    for t in range(q.shape[2]):
        state = state * g[:, :, t, :, None].exp()
        delta = beta[:, :, t, None] * (v[:, :, t] - torch.einsum("bhkv,bhk->bhv", state, k[:, :, t]))
        state = state + k[:, :, t, :, None] * delta[:, :, None]
        out.append(torch.einsum("bhkv,bhk->bhv", state, q[:, :, t]))
    return torch.stack(out, 2)


def kda_chunked(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """Same result as `kda_recurrent`; T must be a multiple of CHUNK. All fp32."""
    b, h, t, _ = q.shape
    dv, n = v.shape[-1], t // CHUNK
    q, k, v, g = (x.reshape(b * h, n, CHUNK, -1) for x in (q, k, v, g))
    beta = beta.reshape(b * h, n, CHUNK, 1)
    total = g.cumsum(2)
    anchor = total[:, :, CHUNK // 2 - 1 : CHUNK // 2]
    up, down = (total - anchor).exp(), (anchor - total).exp()
    k_down = k * down
    rows = torch.arange(CHUNK, device=q.device)
    strict, causal = rows[:, None] > rows, rows[:, None] >= rows
    a = torch.where(strict, (beta * k * up) @ k_down.mT, 0.0)
    p = torch.where(causal, (q * up) @ k_down.mT, 0.0)
    inverse = unit_lower_inverse(a.reshape(-1, CHUNK, CHUNK)).reshape(a.shape)
    decay = total.exp()
    last = total[:, :, -1:]
    u = inverse @ (beta * v)
    w = inverse @ (beta * k * decay)
    k_last = k * (last - total).exp()
    states, delta = chunk_scan(u, w, k_last, last[:, :, 0].exp())
    out = (q * decay) @ states + p @ delta
    return out.reshape(b, h, t, dv)


# The inverse of I + A, A strictly lower triangular.


@torch.library.custom_op("train_tiny::unit_lower_inverse", mutates_args=())
def unit_lower_inverse(a: Tensor) -> Tensor:
    """a [N,C,C] strictly lower triangular, C a power of two; (I + a)^-1 by block forward substitution."""
    c = a.shape[-1]
    inverse = torch.eye(c, dtype=a.dtype, device=a.device).expand_as(a).clone()
    size = 1
    while size < c:
        blocks = c // (2 * size)
        view = inverse.view(-1, blocks, 2, size, blocks, 2, size)
        full = a.view(-1, blocks, 2, size, blocks, 2, size)
        index = torch.arange(blocks, device=a.device)
        top = view[:, index, 0, :, index, 0]  # [blocks, N, size, size]
        bottom = view[:, index, 1, :, index, 1]
        off = full[:, index, 1, :, index, 0]
        view[:, index, 1, :, index, 0] = -(bottom @ (off @ top))
        size *= 2
    return inverse


@unit_lower_inverse.register_fake
def _(a: Tensor) -> Tensor:
    return torch.empty_like(a)


def _inverse_backward(ctx, grad: Tensor) -> Tensor:
    (inverse,) = ctx.saved_tensors
    return -(inverse.mT @ grad @ inverse.mT)


unit_lower_inverse.register_autograd(
    _inverse_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output)
)


# The scan over chunks.


@torch.library.custom_op("train_tiny::chunk_scan", mutates_args=())
def chunk_scan(u: Tensor, w: Tensor, k: Tensor, decay: Tensor) -> tuple[Tensor, Tensor]:
    """u [N,n,C,V], w and k [N,n,C,K], decay [N,n,K]; states before chunks [N,n,K,V], D [N,n,C,V]."""
    states = u.new_zeros(*k.shape[:2], k.shape[-1], u.shape[-1])
    delta = torch.empty_like(u)
    state = states[:, 0]
    for i in range(u.shape[1]):
        states[:, i] = state
        delta[:, i] = torch.baddbmm(u[:, i], w[:, i], state, alpha=-1)
        state = torch.baddbmm(decay[:, i, :, None] * state, k[:, i].mT, delta[:, i])
    return states, delta


@chunk_scan.register_fake
def _(u: Tensor, w: Tensor, k: Tensor, decay: Tensor) -> tuple[Tensor, Tensor]:
    return u.new_empty(*k.shape[:2], k.shape[-1], u.shape[-1]), torch.empty_like(u)


@torch.library.custom_op("train_tiny::chunk_scan_backward", mutates_args=())
def chunk_scan_backward(
    w: Tensor, k: Tensor, decay: Tensor, g_states: Tensor, g_delta: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of the state after each chunk [N,n,K,V] and of D [N,n,C,V]."""
    after, total = torch.empty_like(g_states), torch.empty_like(g_delta)
    grad = torch.zeros_like(g_states[:, 0])
    for i in range(w.shape[1] - 1, -1, -1):
        after[:, i] = grad
        total[:, i] = torch.baddbmm(g_delta[:, i], k[:, i], grad)
        grad = torch.baddbmm(g_states[:, i] + decay[:, i, :, None] * grad, w[:, i].mT, total[:, i], alpha=-1)
    return after, total


@chunk_scan_backward.register_fake
def _(w: Tensor, k: Tensor, decay: Tensor, g_states: Tensor, g_delta: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(g_states), torch.empty_like(g_delta)


def _scan_setup(ctx, inputs, output) -> None:
    _, w, k, decay = inputs
    ctx.save_for_backward(w, k, decay, *output)


def _scan_backward(ctx, g_states: Tensor, g_delta: Tensor):
    w, k, decay, states, delta = ctx.saved_tensors
    after, total = chunk_scan_backward(w, k, decay, g_states.contiguous(), g_delta.contiguous())
    return total, -(total @ states.mT), delta @ after.mT, (after * states).sum(-1)


chunk_scan.register_autograd(_scan_backward, setup_context=_scan_setup)
