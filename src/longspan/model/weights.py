"""Weight names -> what the decoder computes with. The quirks of checkpoints end here.

A tensor whose dtype on disk is the model's is used where it lies, memory-mapped. Others are converted one at
a time. Routed experts are looked up when first hit and never unpacked, so start-up does not touch them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from longspan.config import ModelConfig
from longspan.errors import CheckpointError
from longspan.formats.mx import dequantize_mxfp4
from longspan.formats.progress import track
from longspan.formats.safetensors import Checkpoint
from longspan.ops.ffn import FfnWeights
from longspan.ops.kda import KdaWeights, LowRank
from longspan.ops.mla_prologue import IndexerWeights, MlaWeights, QueryLora
from longspan.ops.moe import ExpertWeights, LatentProjection, MoeWeights, MxfpWeight
from longspan.ops.router import RouterWeights

logger = logging.getLogger(__name__)

LARGEST_SAFE_SCALE = 252  # 6, the largest FP4 value, times 2**125; float32 and bfloat16 end below 2**128


@dataclass(frozen=True, eq=False)
class LayerWeights:
    """One layer. The residuals are norm weight times score vector, [hidden] float32; None when plain."""

    attention_norm: Tensor  # [hidden]
    ffn_norm: Tensor  # [hidden]
    attention_residual: Tensor | None
    ffn_residual: Tensor | None
    attention: KdaWeights | MlaWeights
    ffn: FfnWeights | MoeWeights


@dataclass(frozen=True, eq=False)
class DecoderWeights:
    """The whole text model."""

    embed: Tensor  # [vocab, hidden]
    layers: tuple[LayerWeights, ...]
    output_residual: Tensor | None  # [hidden] float32
    norm: Tensor  # [hidden]
    lm_head: Tensor  # [vocab, hidden]


class TensorSource(Protocol):
    """Tensors by their canonical (published K3) name, whatever the file calls them."""

    def __contains__(self, name: str) -> bool: ...

    def tensor(self, name: str) -> Tensor: ...


class RenamedCheckpoint:
    """A checkpoint read by canonical names."""

    def __init__(self, checkpoint: Checkpoint, names: dict[str, str]) -> None:
        self._checkpoint = checkpoint
        self._names = names  # canonical -> name in the file

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def tensor(self, name: str) -> Tensor:
        return self._checkpoint.tensor(self._names[name])


def build_weights(source: TensorSource, config: ModelConfig, dtype: torch.dtype) -> DecoderWeights:
    """All weights but the routed experts, in `dtype`. Names and shapes must have been checked."""
    reader = _Reader(source, config, dtype)
    layers = tuple(
        reader.layer(layer) for layer in track(range(config.num_layers), "Loading weights", config.num_layers)
    )
    embed = reader.weight("model.embed_tokens.weight")
    residual = config.attn_res_block_size is not None
    return DecoderWeights(
        embed=embed,
        layers=layers,
        output_residual=reader.residual("model.output_attn_res") if residual else None,
        norm=reader.weight("model.norm.weight"),
        lm_head=embed if config.tie_word_embeddings else reader.weight("lm_head.weight"),
    )


class _Reader:
    def __init__(self, source: TensorSource, config: ModelConfig, dtype: torch.dtype) -> None:
        self._source = source
        self._config = config
        self._dtype = dtype

    def weight(self, name: str) -> Tensor:
        return self._source.tensor(name).to(self._dtype)

    def wide(self, name: str) -> Tensor:
        return self._source.tensor(name).float()

    def residual(self, prefix: str) -> Tensor:
        """Norm weight times score vector in float32; the latter is stored as [1, hidden]."""
        return self.wide(f"{prefix}_norm.weight") * self.wide(f"{prefix}_proj.weight").view(-1)

    def layer(self, layer: int) -> LayerWeights:
        prefix = f"model.layers.{layer}"
        residual = self._config.attn_res_block_size is not None
        attention = self._mla if self._config.is_full_attention(layer) else self._kda
        return LayerWeights(
            attention_norm=self.weight(f"{prefix}.input_layernorm.weight"),
            ffn_norm=self.weight(f"{prefix}.post_attention_layernorm.weight"),
            attention_residual=self.residual(f"{prefix}.self_attention_res") if residual else None,
            ffn_residual=self.residual(f"{prefix}.mlp_res") if residual else None,
            attention=attention(f"{prefix}.self_attn"),
            ffn=self._moe(f"{prefix}.block_sparse_moe")
            if self._config.is_moe(layer)
            else self._dense(f"{prefix}.mlp"),
        )

    def _kda(self, prefix: str) -> KdaWeights:
        kda = self._config.kda
        # Conv weights are [P, 1, kernel], in some exports [P, kernel].
        conv = [
            self.wide(f"{prefix}.{x}_conv1d.weight").reshape(-1, kda.conv_kernel_size)
            for x in ("q", "k", "v")
        ]
        return KdaWeights(
            q=self.weight(f"{prefix}.q_proj.weight"),
            k=self.weight(f"{prefix}.k_proj.weight"),
            v=self.weight(f"{prefix}.v_proj.weight"),
            forget=self._low_rank(f"{prefix}.f"),
            beta=self.weight(f"{prefix}.b_proj.weight"),
            gate=self.weight(f"{prefix}.g_proj.weight")
            if kda.full_rank_gate
            else self._low_rank(f"{prefix}.g"),
            output=self.weight(f"{prefix}.o_proj.weight"),
            conv=torch.cat(conv),
            # [1, 1, heads, 1] in Kimi-Linear; padded with zeros beyond the heads in K3.
            a_log=self.wide(f"{prefix}.A_log").reshape(-1)[: kda.num_heads],
            dt_bias=self.wide(f"{prefix}.dt_bias").reshape(-1),
            o_norm=self.wide(f"{prefix}.o_norm.weight"),
            gate_lower_bound=kda.gate_lower_bound,
            norm_eps=self._config.rms_norm_eps,
        )

    def _low_rank(self, prefix: str) -> LowRank:
        return LowRank(self.weight(f"{prefix}_a_proj.weight"), self.weight(f"{prefix}_b_proj.weight"))

    def _mla(self, prefix: str) -> MlaWeights:
        mla = self._config.mla
        if mla.q_lora_rank is None:
            query = self.weight(f"{prefix}.q_proj.weight")
        else:
            query = QueryLora(
                a=self.weight(f"{prefix}.q_a_proj.weight"),
                norm=self.weight(f"{prefix}.q_a_layernorm.weight"),
                b=self.weight(f"{prefix}.q_b_proj.weight"),
            )
        kv_b = self.weight(f"{prefix}.kv_b_proj.weight")
        # By head; a source that serves one rank of several may have more of them here than the config says.
        kv_b = kv_b.view(-1, mla.qk_nope_head_dim + mla.v_head_dim, mla.kv_lora_rank)
        return MlaWeights(
            query=query,
            kv_a=self.weight(f"{prefix}.kv_a_proj_with_mqa.weight"),
            kv_a_norm=self.weight(f"{prefix}.kv_a_layernorm.weight"),
            up_key=kv_b[:, : mla.qk_nope_head_dim],
            up_value=kv_b[:, mla.qk_nope_head_dim :],
            latent_norm_eps=mla.latent_norm_eps,
            indexer=self._indexer(f"{prefix}.indexer") if self._config.indexer else None,
            gate=self.weight(f"{prefix}.g_proj.weight") if mla.output_gate else None,
            output=self.weight(f"{prefix}.o_proj.weight"),
        )

    def _indexer(self, prefix: str) -> IndexerWeights:
        assert self._config.indexer
        return IndexerWeights(
            query=self.weight(f"{prefix}.wq_b.weight"),
            key=self.weight(f"{prefix}.wk.weight"),
            head_weight=self.weight(f"{prefix}.weights_proj.weight"),
            key_norm_weight=self.weight(f"{prefix}.k_norm.weight"),
            key_norm_bias=self.weight(f"{prefix}.k_norm.bias"),
            key_norm_eps=self._config.indexer.norm_eps,
        )

    def _dense(self, prefix: str) -> FfnWeights:
        return FfnWeights(
            gate=self.weight(f"{prefix}.gate_proj.weight"),
            up=self.weight(f"{prefix}.up_proj.weight"),
            down=self.weight(f"{prefix}.down_proj.weight"),
            activation=self._config.activation,
        )

    def _moe(self, prefix: str) -> MoeWeights:
        moe = self._config.moe
        router = RouterWeights(
            gate=self.weight(f"{prefix}.gate.weight"),
            bias=self.wide(f"{prefix}.gate.e_score_correction_bias"),
            top_k=moe.top_k,
            num_groups=moe.num_groups,
            top_k_groups=moe.top_k_groups,
            renormalize=moe.renormalize,
            scaling_factor=moe.scaling_factor,
        )
        latent = None
        if moe.latent_size is not None:
            latent = LatentProjection(
                down=self.weight(f"{prefix}.routed_expert_down_proj.weight"),
                norm=self.weight(f"{prefix}.routed_expert_norm.weight") if moe.latent_norm else None,
                up=self.weight(f"{prefix}.routed_expert_up_proj.weight"),
            )
        return MoeWeights(
            router=router,
            latent=latent,
            bank=LazyExperts(self._source, f"{prefix}.experts", moe.num_experts),
            shared=self._dense(f"{prefix}.shared_experts") if moe.num_shared_experts else None,
            activation=self._config.activation,
            norm_eps=self._config.rms_norm_eps,
        )


class LazyExperts(Sequence[ExpertWeights]):
    """The experts of one layer, looked up when first hit. Whether one is packed is what its file says.

    A packed matrix that is corrupt reads as NaN, so that only tokens that hit its expert are lost; the log
    names it, once.
    """

    def __init__(self, source: TensorSource, prefix: str, count: int) -> None:
        self._source = source
        self._prefix = prefix
        self._known: list[ExpertWeights | None] = [None] * count

    def __len__(self) -> int:
        return len(self._known)

    def __getitem__(self, expert: int) -> ExpertWeights:  # pyright: ignore[reportIncompatibleMethodOverride]
        known = self._known[expert]
        if known is None:
            prefix = f"{self._prefix}.{expert}"
            known = ExpertWeights(
                gate=self._matrix(f"{prefix}.w1"),
                up=self._matrix(f"{prefix}.w3"),
                down=self._matrix(f"{prefix}.w2"),
            )
            self._known[expert] = known
        return known

    def __iter__(self) -> Iterator[ExpertWeights]:
        return (self[expert] for expert in range(len(self)))

    def _matrix(self, name: str) -> MxfpWeight | Tensor:
        if f"{name}.weight" in self._source:
            return self._source.tensor(f"{name}.weight")
        packed = self._source.tensor(f"{name}.weight_packed")
        scale = self._source.tensor(f"{name}.weight_scale")
        if int(scale.max()) > LARGEST_SAFE_SCALE:
            try:
                dequantize_mxfp4(packed, scale)
            except CheckpointError as error:
                logger.error("%s.weight_scale: %s Requests that need it end with an error.", name, error)
                return torch.tensor(torch.nan).expand(packed.shape[0], 2 * packed.shape[1])
        return MxfpWeight(packed, scale)
