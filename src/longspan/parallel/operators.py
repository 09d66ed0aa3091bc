"""A table of operators over several ranks, made of one for a single rank. The model knows nothing of it.

Every rank has the same hidden rows x and, over its share of weights, computes what adds up or fits together:

    kda, mla_epilogue, ffn    local, then all_reduce
    moe_output                norm of r; its columns times those of the way back, plus the shared experts'
                              columns; one all_reduce of both
    routed_experts            `experts.py`
    index_select, sparse_attention          `context.py`
    embed                     rows of ids that are elsewhere are 0; all_reduce
    lm_head                   logits of this rank's ids; all_gather

A group of one changes nothing: its operators are those of the table that came in. What else a table has
computes the same on all ranks. All of this holds only while x has the same bits on all ranks, which is why
sums must be bit-equal on all of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from longspan.ops.backend import Operators
from longspan.ops.batch import KdaView, StepBatch
from longspan.ops.ffn import FfnWeights
from longspan.ops.kda import KdaWeights
from longspan.ops.mla_prologue import MlaWeights
from longspan.ops.moe import LatentProjection, MoeWeights
from longspan.ops.norm import rms_norm
from longspan.parallel.context import ContextParallel
from longspan.parallel.experts import ExpertParallel
from longspan.parallel.layout import Layout, share
from longspan.parallel.traffic import Kind


def parallel_operators(ops: Operators, layout: Layout) -> Operators:
    """`ops` with what this rank's weights lack fetched from the others of `layout`."""
    if layout.tensor.size > 1:
        tensor = TensorParallel(ops, layout)
        ops = replace(
            ops,
            embed=tensor.embed,
            kda=tensor.kda,
            mla_epilogue=tensor.mla_epilogue,
            ffn=tensor.ffn,
            moe_output=tensor.moe_output,
            lm_head=tensor.lm_head,
        )
    if layout.expert.size > 1:
        ops = replace(ops, routed_experts=ExpertParallel(ops, layout).routed_experts)
    if layout.context.size > 1:
        context = ContextParallel(ops, layout)
        ops = replace(ops, index_select=context.index_select, sparse_attention=context.sparse_attention)
    return ops


@dataclass(frozen=True)
class TensorParallel:
    """The operators of `ops` whose weights are cut by head, column or token id."""

    ops: Operators
    layout: Layout
    _moe: WeakKeyDictionary[MoeWeights, MoeWeights] = field(default_factory=WeakKeyDictionary)

    def embed(self, token_ids: Tensor, weight: Tensor) -> Tensor:
        own = self.layout.vocabulary
        here = (token_ids >= own.start) & (token_ids < own.stop)
        rows = self.ops.embed(torch.where(here, token_ids - own.start, 0), weight)
        return self._sum(rows.masked_fill(~here[:, None], 0), "embeddings")

    def kda(self, x: Tensor, weights: KdaWeights, view: KdaView, batch: StepBatch) -> Tensor:
        return self._sum(self.ops.kda(x, weights, view, batch))

    def mla_epilogue(self, latent_out: Tensor, x: Tensor, weights: MlaWeights) -> Tensor:
        return self._sum(self.ops.mla_epilogue(latent_out, x, weights))

    def ffn(self, x: Tensor, weights: FfnWeights) -> Tensor:
        return self._sum(self.ops.ffn(x, weights))

    def moe_output(self, r: Tensor, x: Tensor, weights: MoeWeights) -> Tensor:
        latent = weights.latent
        if latent is None:
            return r if weights.shared is None else r + self.ffn(x, weights.shared)
        if latent.norm is not None:
            r = rms_norm(r, latent.norm, weights.norm_eps)
        own = share(r.shape[1], self.layout.tensor)
        local = self._moe.get(weights)
        if local is None:
            # A latent of this rank's columns; as the norm is done, nothing else of the layer is asked for.
            columns = LatentProjection(down=latent.down[own], norm=None, up=latent.up)
            local = self._moe[weights] = replace(weights, latent=columns)
        return self._sum(self.ops.moe_output(r[:, own].contiguous(), x, local))

    def lm_head(self, x: Tensor, weight: Tensor) -> Tensor:
        size, vocabulary = self.layout.tensor.size, self.layout.config.vocab_size
        logits = self.ops.lm_head(x, weight)
        missing = -(-vocabulary // size) - logits.shape[1]
        if missing:
            logits = torch.nn.functional.pad(logits, (0, missing))
        self.layout.tensor.traffic.serve("logits", x.shape[0])
        everyone = self.layout.tensor.all_gather(logits, "logits")
        return everyone.transpose(0, 1).flatten(1)[:, :vocabulary].contiguous()

    def _sum(self, x: Tensor, kind: Kind = "sums") -> Tensor:
        self.layout.tensor.traffic.serve(kind, x.shape[0])
        return self.layout.tensor.all_reduce(x, kind)
