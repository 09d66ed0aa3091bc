"""A rank's slices of a checkpoint, by canonical name.

    rows       views of the mapped file: q, k, v, gates, convolutions, A_log, dt_bias and beta by head; gate
               and up of a feed-forward; embedding and lm_head by token id
    columns    views too, strided: o_proj, down of a feed-forward, the way back from the experts' latent
    queries    q_b_proj (or q_proj) and kv_b_proj of all heads of the context group, which lie side by side
    whole      all else: norms, low-rank `a` projections, kv_a, indexer, router, the way into the latent;
               routed experts, of which a rank never asks for another's

So a rank touches only its share of the file's pages, apart from columns, whose rows share pages.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from longspan.model.weights import DecoderWeights, LayerWeights, TensorSource, build_weights
from longspan.ops.mla_prologue import MlaWeights
from longspan.parallel.layout import Layout, share

Cut = Callable[[Tensor], Tensor]

_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")


def local_weights(source: TensorSource, layout: Layout, dtype: torch.dtype) -> DecoderWeights:
    """What `build_weights` makes of this rank's slices of `source`, the whole model."""
    weights = build_weights(ShardedSource(source, layout), layout.local_config, dtype)

    def own(layer: LayerWeights) -> LayerWeights:
        """kv_b_proj came with all heads of the context group; only queries need them."""
        mla = layer.attention
        if not isinstance(mla, MlaWeights):
            return layer
        return replace(layer, attention=replace(mla, up_value=mla.up_value[layout.own_heads]))

    return replace(weights, layers=tuple(map(own, weights.layers)))


class ShardedSource:
    """A TensorSource of this rank's slices."""

    def __init__(self, source: TensorSource, layout: Layout) -> None:
        self._source = source
        self._layout = layout
        self._kda, self._mla, self._ffn = _kda_cuts(layout), _mla_cuts(layout), _ffn_cuts(layout)

    def __contains__(self, name: str) -> bool:
        return name in self._source

    def tensor(self, name: str) -> Tensor:
        tensor = self._source.tensor(name)
        cut = self._cut(name)
        return cut(tensor) if cut else tensor

    def _cut(self, name: str) -> Cut | None:
        if name in ("model.embed_tokens.weight", "lm_head.weight"):
            return _rows(self._layout.vocabulary)
        match = _LAYER.fullmatch(name)
        if match is None:
            return None
        layer, within = int(match[1]), match[2]
        block, _, tensor = within.partition(".")
        if block != "self_attn":
            return self._ffn.get(within)
        return (self._mla if self._layout.config.is_full_attention(layer) else self._kda).get(tensor)


def _rows(part: slice) -> Cut:
    return lambda tensor: tensor[part]


def _columns(part: slice) -> Cut:
    return lambda tensor: tensor[:, part]


def _of_heads(heads: slice, width: int) -> slice:
    return slice(heads.start * width, heads.stop * width)


def _kda_cuts(layout: Layout) -> dict[str, Cut]:
    """By name within `self_attn` of a KDA layer."""
    kda = layout.config.kda
    heads = share(kda.num_heads, layout.tensor)
    dims = _of_heads(heads, kda.head_dim)
    by_dim = [f"{x}_proj.weight" for x in ("q", "k", "v", "g", "f_b", "g_b")]
    by_dim += [f"{x}_conv1d.weight" for x in "qkv"] + ["dt_bias"]
    return {name: _rows(dims) for name in by_dim} | {
        "b_proj.weight": _rows(heads),
        "A_log": lambda tensor: tensor.reshape(-1)[heads],
        "o_proj.weight": _columns(dims),
    }


def _mla_cuts(layout: Layout) -> dict[str, Cut]:
    """By name within `self_attn` of a full-attention layer."""
    mla = layout.config.mla
    own = share(mla.num_heads, layout.tensor)
    first = own.start - layout.own_heads.start
    asking = slice(first, first + layout.context_heads)
    queries = _rows(_of_heads(asking, mla.qk_nope_head_dim + mla.qk_rope_head_dim))
    values = _of_heads(own, mla.v_head_dim)
    return {
        "q_proj.weight": queries,
        "q_b_proj.weight": queries,
        "kv_b_proj.weight": _rows(_of_heads(asking, mla.qk_nope_head_dim + mla.v_head_dim)),
        "g_proj.weight": _rows(values),
        "o_proj.weight": _columns(values),
    }


def _ffn_cuts(layout: Layout) -> dict[str, Cut]:
    """By name within a layer."""
    moe, group = layout.config.moe, layout.tensor
    cuts: dict[str, Cut] = {}
    for block, width in {
        "mlp": layout.config.intermediate_size,
        "block_sparse_moe.shared_experts": moe.num_shared_experts * moe.intermediate_size,
    }.items():
        part = share(width, group)
        cuts[f"{block}.gate_proj.weight"] = cuts[f"{block}.up_proj.weight"] = _rows(part)
        cuts[f"{block}.down_proj.weight"] = _columns(part)
    if moe.latent_size is not None:
        cuts["block_sparse_moe.routed_expert_up_proj.weight"] = _columns(share(moe.latent_size, group))
    return cuts
