"""Everything of multi-head latent attention before and after the attention itself.

Prologue, from the normalised hidden x of each row (H heads of N + R query dims, latent of C):

    q  = q_b rms_norm(q_a x)  or  q_proj x                 [H, N + R], per head [qn | qp]
    [c0 | kp] = kv_a x;   c = rms_norm(c0)                 kp is not normalised; there is no rotation anywhere
    pages[slot] = [c | kp]                                 the only copy of the latent
    absorbed query_h = [W_UK_h^T qn_h | qp_h]              [H, C + R]

and with a sparse indexer, from the same normalised q-latent (or from x, if wq_b has as many columns as x):

    qI = wq_b qr   [Hi, Di]        kI = layer_norm(wk x)   [Di], written to its page (`index_keys`)
    w  = f32(weights_proj x) / sqrt(Hi)                     the weights product in float32

Index keys are written for every row, also while the context is short enough to need no choice. With
`absorb=False` the query stays [H, N + R] for attention over expanded keys (`expand_latent`).

Epilogue, in the model's dtype:

    o_h = W_UV_h out_h        o = o * sigmoid(W_g x) elementwise, if the layer has an output gate        W_o o
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from longspan.ops.batch import MlaView
from longspan.ops.index_keys import write_index_keys
from longspan.ops.linear import linear
from longspan.ops.norm import layer_norm, rms_norm
from longspan.ops.pages import write_rows


@dataclass(frozen=True, eq=False)
class QueryLora:
    """Low-rank query projection."""

    a: Tensor  # [rank, hidden]
    norm: Tensor  # [rank]
    b: Tensor  # [heads * (nope + rope), rank]


@dataclass(frozen=True, eq=False)
class IndexerWeights:
    """Projections of the sparse indexer."""

    query: Tensor  # wq_b [index_heads * index_dim, q_lora_rank or hidden]
    key: Tensor  # wk [index_dim, hidden]
    head_weight: Tensor  # weights_proj [index_heads, hidden]
    key_norm_weight: Tensor  # [index_dim]
    key_norm_bias: Tensor  # [index_dim]
    key_norm_eps: float


@dataclass(frozen=True, eq=False)
class MlaWeights:
    """One full-attention layer."""

    query: QueryLora | Tensor  # or q_proj [heads * (nope + rope), hidden]
    kv_a: Tensor  # [kv_lora_rank + rope, hidden]
    kv_a_norm: Tensor  # [kv_lora_rank]
    # Head h of kv_b_proj is [W_UK_h; W_UV_h]. Under DCP a rank asks for more heads than it puts out.
    up_key: Tensor  # [query heads, nope, kv_lora_rank]
    up_value: Tensor  # [heads, value, kv_lora_rank]
    latent_norm_eps: float
    indexer: IndexerWeights | None
    gate: Tensor | None  # [heads * value, hidden]
    output: Tensor  # [hidden, heads * value]

    @property
    def num_query_heads(self) -> int:
        return self.up_key.shape[0]


@dataclass(frozen=True)
class MlaQueries:
    """What the rows ask of the pages."""

    query: Tensor  # [T, heads, kv_lora_rank + rope], or [T, heads, nope + rope] when not absorbed
    index_query: Tensor | None  # [T, index_heads, index_dim]
    index_weight: Tensor | None  # [T, index_heads] float32


def mla_prologue(
    x: Tensor, weights: MlaWeights, view: MlaView, slot_mapping: Tensor, absorb: bool = True
) -> MlaQueries:
    """x [T, hidden] -> queries; writes each row's latent and index key into its page."""
    eps = weights.latent_norm_eps
    if isinstance(weights.query, QueryLora):
        q_latent = rms_norm(linear(x, weights.query.a), weights.query.norm, eps)
        q = linear(q_latent, weights.query.b)
    else:
        q_latent = None
        q = linear(x, weights.query)
    q = q.unflatten(1, (weights.num_query_heads, -1))

    rank = weights.kv_a_norm.shape[0]
    compressed = linear(x, weights.kv_a)
    latent = rms_norm(compressed[:, :rank], weights.kv_a_norm, eps)
    write_rows(view.latent, slot_mapping, torch.cat([latent, compressed[:, rank:]], -1))

    query = absorb_query(q, weights) if absorb else q
    indexer = weights.indexer
    if indexer is None:
        return MlaQueries(query, None, None)

    if view.index_key is None:
        raise ValueError("a layer with a sparse indexer needs a view with index keys")
    key = layer_norm(
        linear(x, indexer.key), indexer.key_norm_weight, indexer.key_norm_bias, indexer.key_norm_eps
    )
    write_index_keys(view.index_key, slot_mapping, key)
    source = x
    if q_latent is not None and q_latent.shape[1] == indexer.query.shape[1]:
        source = q_latent
    index_query = linear(source, indexer.query)
    index_weight = linear(x.float(), indexer.head_weight.float()) * indexer.head_weight.shape[0] ** -0.5
    return MlaQueries(query, index_query.unflatten(1, (-1, key.shape[1])), index_weight)


def absorb_query(q: Tensor, weights: MlaWeights) -> Tensor:
    """q [T, heads, nope + rope] -> [T, heads, kv_lora_rank + rope], ready to meet the latents themselves."""
    nope_dim = weights.up_key.shape[1]
    nope, rope = q[..., :nope_dim], q[..., nope_dim:]
    absorbed = torch.bmm(nope.transpose(0, 1), weights.up_key).transpose(0, 1)
    return torch.cat([absorbed, rope], -1)


def expand_latent(rows: Tensor, weights: MlaWeights) -> tuple[Tensor, Tensor]:
    """Cached rows [S, kv_lora_rank + rope] -> keys [S, heads, nope + rope] and values [S, heads, value]."""
    heads, _, rank = weights.up_key.shape
    nope, value = (
        torch.einsum("sc,hdc->shd", rows[:, :rank], up) for up in (weights.up_key, weights.up_value)
    )
    rope = rows[:, None, rank:].expand(-1, heads, -1)
    return torch.cat([nope, rope], -1), value


def mla_epilogue(latent_out: Tensor, x: Tensor, weights: MlaWeights) -> Tensor:
    """latent_out [T, heads, kv_lora_rank], float32 or the model's dtype, and x [T, hidden] -> [T, hidden]."""
    up_value = weights.up_value
    out = torch.bmm(latent_out.to(up_value.dtype).transpose(0, 1), up_value.transpose(1, 2))
    out = out.transpose(0, 1).flatten(1)
    if weights.gate is not None:
        out = out * torch.sigmoid(linear(x, weights.gate))
    return linear(out, weights.output)
