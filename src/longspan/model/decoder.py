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
from longspan.model.weights import DecoderWeights
from longspan.ops.backend import Operators
from longspan.ops.batch import KdaView, LayerView, MlaView, StepBatch
from longspan.ops.ffn import FfnWeights
from longspan.ops.kda import KdaWeights
from longspan.ops.mla_prologue import MlaWeights
from longspan.ops.moe import MoeWeights
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
        return self.logits(self.hidden([batch] * len(views), views, batch.logit_rows, observe))

    @torch.no_grad()
    def hidden(
        self,
        batches: Sequence[StepBatch],
        views: Sequence[LayerView],
        rows: Tensor,
        observe: Observer | None = None,
    ) -> Tensor:
        """One batch and one view per layer; updates the views -> what `logits` takes, [R, hidden] of `rows`.

        The batches say the same of tokens and lengths, but a host may keep layers in groups of memory with
        block tables or slots of their own.

        The residual stream is `prefix`, to which the last `update` is yet to be added. Where it attends over
        depth it restarts every `block_size` layers, and what it was is frozen into `blocks`.
        """
        residual, eps = self.ops.attention_residual, self.config.rms_norm_eps
        block_size = self.config.attn_res_block_size
        blocks: list[Tensor] = []
        prefix: Tensor | None = None
        update = self.ops.embed(batches[0].token_ids, self.weights.embed)
        for i, (layer, view, batch) in enumerate(zip(self.weights.layers, views, batches, strict=True)):
            x, prefix = residual(blocks, prefix, update, layer.attention_residual, layer.attention_norm, eps)
            if block_size is not None and i % block_size == 0:
                blocks.append(prefix)
                prefix = None
            update = self._attention(i, layer.attention, x, view, batch, observe)
            x, prefix = residual(blocks, prefix, update, layer.ffn_residual, layer.ffn_norm, eps)
            update = self._ffn(layer.ffn, x)
            if observe:
                observe("layer_output", i, prefix + update)
        assert prefix is not None, "a model has layers"
        sources = [block[rows] for block in blocks]
        x, _ = residual(
            sources, prefix[rows], update[rows], self.weights.output_residual, self.weights.norm, eps
        )
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """What `hidden` returned [R, hidden] -> logits [R, vocab] float32."""
        return self.ops.lm_head(hidden, self.weights.lm_head)

    def _attention(
        self,
        i: int,
        w: KdaWeights | MlaWeights,
        x: Tensor,
        view: LayerView,
        batch: StepBatch,
        observe: Observer | None,
    ) -> Tensor:
        if isinstance(w, KdaWeights):
            assert isinstance(view, KdaView), f"layer {i} needs a KdaView"
            return self.ops.kda(x, w, view, batch)
        assert isinstance(view, MlaView), f"layer {i} needs an MlaView"
        return self._mla(i, w, x, view, batch, observe)

    def _mla(
        self, i: int, w: MlaWeights, x: Tensor, view: MlaView, batch: StepBatch, observe: Observer | None
    ) -> Tensor:
        mla, indexer = self.config.mla, self.config.indexer
        asked = self.ops.mla_prologue(x, w, view, batch.slot_mapping)
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
        return self.ops.mla_epilogue(out, x, w)

    def _ffn(self, w: FfnWeights | MoeWeights, x: Tensor) -> Tensor:
        if isinstance(w, FfnWeights):
            return self.ops.ffn(x, w)
        return self.ops.moe_output(self.ops.routed_experts(x, w), x, w)
