"""The text model of Kimi K3.1, K3 and Kimi-Linear, in reading order.

There are no positions anywhere: order comes from the KDA recurrence, the short convolutions and causality.
What differs between the three is decided by the weights each layer has:

    Kimi-Linear  plain residuals, SwiGLU, one q_proj, no output gate on MLA, experts in the hidden size
    K3           attention over depth for residuals, SiTU, q-LoRA, gated MLA, experts in a latent size
    K3.1         K3 with a sparse indexer on every full-attention layer
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from longspan.config import ModelConfig
from longspan.memory.layout import allocate_views
from longspan.model.weights import (
    DecoderWeights,
    DenseFfn,
    KdaAttention,
    LayerWeights,
    LowRank,
    MlaAttention,
    MoeFfn,
)
from longspan.ops.backend import Operators
from longspan.ops.batch import KdaView, LayerView, MlaView, StepBatch
from longspan.token_ids import to_token_ids

# Called with ("layer_output", layer, [T, hidden]) after each layer and, where the indexer chose,
# ("selected", layer, [T, top_k] int64).
Observer = Callable[[str, int, Tensor], None]

FORWARD_PAGE_SIZE = 64


class Decoder:
    """Weights and operators. It holds nothing about sequences: their memory comes in with every step."""

    def __init__(
        self, config: ModelConfig, weights: DecoderWeights, ops: Operators, dtype: torch.dtype
    ) -> None:
        self.config = config
        self.weights = weights
        self.ops = ops
        self.dtype = dtype

    @torch.no_grad()
    def forward(self, token_ids: Sequence[int] | Tensor, observe: Observer | None = None) -> Tensor:
        """Token ids of one sequence [T] -> logits [T, vocab] float32 of every position, in one uncached step.

        Raises RequestError for what is no list of ids of the vocabulary.
        """
        ids = to_token_ids(token_ids, self.config.vocab_size, "token_ids")
        tokens = len(ids)
        pages = -(-tokens // FORWARD_PAGE_SIZE)
        rows = torch.arange(tokens)
        batch = StepBatch(
            token_ids=torch.tensor(ids, dtype=torch.int64),
            query_starts=torch.tensor([0, tokens]),
            context_lens=torch.tensor([0]),
            block_tables=torch.arange(pages)[None],
            slot_mapping=rows,
            state_slots=torch.tensor([0]),
            logit_rows=rows,
        )
        return self.step(batch, allocate_views(self.config, pages, FORWARD_PAGE_SIZE, 1, self.dtype), observe)

    @torch.no_grad()
    def step(self, batch: StepBatch, views: Sequence[LayerView], observe: Observer | None = None) -> Tensor:
        """Computes `batch` and updates `views`, one per layer -> logits [R, vocab] float32 of logit_rows."""
        h = self.weights.embed[batch.token_ids]
        if self.config.attn_res_block_size is None:
            x = self._plain_layers(h, batch, views, observe)
        else:
            x = self._residual_attention_layers(h, batch, views, observe, self.config.attn_res_block_size)
        return self.ops.lm_head(x, self.weights.lm_head)

    def _plain_layers(
        self, h: Tensor, batch: StepBatch, views: Sequence[LayerView], observe: Observer | None
    ) -> Tensor:
        norm, eps = self.ops.rms_norm, self.config.rms_norm_eps
        for i, (layer, view) in enumerate(zip(self.weights.layers, views, strict=True)):
            h = h + self._attention(i, layer, norm(h, layer.attention_norm, eps), view, batch, observe)
            h = h + self._ffn(layer, norm(h, layer.ffn_norm, eps))
            if observe:
                observe("layer_output", i, h)
        return norm(h[batch.logit_rows], self.weights.norm, eps)

    def _residual_attention_layers(
        self,
        p: Tensor,
        batch: StepBatch,
        views: Sequence[LayerView],
        observe: Observer | None,
        block_size: int,
    ) -> Tensor:
        """p, the prefix sum, restarts every `block_size` layers; what it was is frozen into `blocks`."""
        mix, eps = self.ops.attention_residual, self.config.rms_norm_eps
        blocks: list[Tensor] = []
        for i, (layer, view) in enumerate(zip(self.weights.layers, views, strict=True)):
            if blocks:
                x = mix([*blocks, p], layer.attention_residual, layer.attention_norm, eps)
            else:  # nothing to attend over yet: the residual weights of layer 0 are unused
                x = self.ops.rms_norm(p, layer.attention_norm, eps)
            restart = i % block_size == 0
            if restart:
                blocks.append(p)
            a = self._attention(i, layer, x, view, batch, observe)
            p = a if restart else p + a
            p = p + self._ffn(layer, mix([*blocks, p], layer.ffn_residual, layer.ffn_norm, eps))
            if observe:
                observe("layer_output", i, p)
        sources = [source[batch.logit_rows] for source in (*blocks, p)]
        return mix(sources, self.weights.output_residual, self.weights.norm, eps)

    def _attention(
        self,
        i: int,
        layer: LayerWeights,
        x: Tensor,
        view: LayerView,
        batch: StepBatch,
        observe: Observer | None,
    ) -> Tensor:
        if isinstance(layer.attention, KdaAttention):
            assert isinstance(view, KdaView), f"layer {i} needs a KdaView"
            return self._kda(layer.attention, x, view, batch)
        assert isinstance(view, MlaView), f"layer {i} needs an MlaView"
        return self._mla(i, layer.attention, x, view, batch, observe)

    def _kda(self, w: KdaAttention, x: Tensor, view: KdaView, batch: StepBatch) -> Tensor:
        linear = self.ops.linear
        qkv = torch.cat([linear(x, w.q), linear(x, w.k), linear(x, w.v)], -1)
        forget = self._low_rank(x, w.forget)
        gate = self._low_rank(x, w.gate) if isinstance(w.gate, LowRank) else linear(x, w.gate)
        y = self.ops.kda(qkv, forget, linear(x, w.beta), gate, w.core, view, batch)
        return linear(y, w.output)

    def _mla(
        self, i: int, w: MlaAttention, x: Tensor, view: MlaView, batch: StepBatch, observe: Observer | None
    ) -> Tensor:
        mla, indexer = self.config.mla, self.config.indexer
        asked = self.ops.mla_prologue(x, w.core, view, batch.slot_mapping)
        selected = None
        # While nobody sees more than top_k tokens the choice is everything, which is what dense means.
        if indexer and batch.max_visible > indexer.top_k:
            selected = self.ops.index_select(
                asked.index_query, asked.index_weight, view, batch, indexer.top_k
            )
            if observe:
                observe("selected", i, selected)
        scale = (mla.qk_nope_head_dim + mla.qk_rope_head_dim) ** -0.5
        out, _ = self.ops.sparse_attention(asked.query, view, batch, selected, mla.kv_lora_rank, scale)
        gate = None if w.gate is None else self.ops.linear(x, w.gate)
        return self.ops.linear(self.ops.mla_epilogue(out, gate, w.core), w.output)

    def _ffn(self, layer: LayerWeights, x: Tensor) -> Tensor:
        if isinstance(layer.ffn, DenseFfn):
            return self._dense(layer.ffn, x)
        return self._moe(layer.ffn, x)

    def _dense(self, w: DenseFfn, x: Tensor) -> Tensor:
        linear = self.ops.linear
        hidden = self.ops.gated_activation(linear(x, w.gate), linear(x, w.up), self.config.activation)
        return linear(hidden, w.down)

    def _moe(self, w: MoeFfn, x: Tensor) -> Tensor:
        linear = self.ops.linear
        experts, weights = self.ops.route(x, w.router)  # the full-width x, also when experts are latent
        z = x if w.latent is None else linear(x, w.latent.down)
        y = self.ops.routed_experts(z, experts, weights, w.bank, self.config.activation)
        if w.latent is not None:
            if w.latent.norm is not None:
                y = self.ops.rms_norm(y, w.latent.norm, self.config.rms_norm_eps)
            y = linear(y, w.latent.up)
        return y if w.shared is None else y + self._dense(w.shared, x)

    def _low_rank(self, x: Tensor, w: LowRank) -> Tensor:
        return self.ops.linear(self.ops.linear(x, w.a), w.b)
