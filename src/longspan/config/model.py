"""What a config.json says, as frozen dataclasses. Names follow the field; layer numbers are 0-based here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Family = Literal["kimi-linear", "k3", "k3.1"]


@dataclass(frozen=True)
class KdaConfig:
    """Kimi Delta Attention. `gate_lower_bound` None = unbounded softplus gate (Kimi-Linear)."""

    num_heads: int
    head_dim: int
    conv_kernel_size: int
    full_rank_gate: bool
    gate_lower_bound: float | None


@dataclass(frozen=True)
class MlaConfig:
    """Gated multi-head latent attention. `q_lora_rank` None = one plain q_proj (Kimi-Linear)."""

    num_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    output_gate: bool
    latent_norm_eps: float  # of q_a_layernorm and kv_a_layernorm


@dataclass(frozen=True)
class IndexerConfig:
    """DSA lightning indexer, on every full-attention layer of K3.1."""

    num_heads: int
    head_dim: int
    top_k: int
    norm_eps: float


@dataclass(frozen=True)
class MoeConfig:
    """Routed experts. `latent_size` None = experts work in the hidden size (Kimi-Linear)."""

    num_experts: int
    top_k: int
    num_shared_experts: int
    intermediate_size: int
    latent_size: int | None
    latent_norm: bool
    num_groups: int
    top_k_groups: int
    renormalize: bool
    scaling_factor: float


@dataclass(frozen=True)
class ActivationConfig:
    """ "situ" with its two betas (linear_beta None = identity on the up branch), or "silu"."""

    kind: Literal["situ", "silu"]
    beta: float = 1.0
    linear_beta: float | None = None


@dataclass(frozen=True)
class VisionConfig:
    """MoonViT3d tower and projector."""

    patch_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    qkv_hidden_size: int
    intermediate_size: int
    pos_emb_height: int
    pos_emb_width: int
    pos_emb_time: int
    merge_size: int
    projector_hidden_size: int
    text_hidden_size: int
    projector_norm_eps: float


@dataclass(frozen=True)
class ModelConfig:
    """The text model of one checkpoint, and its vision tower if it has one."""

    family: Family
    vocab_size: int
    hidden_size: int
    intermediate_size: int  # of the dense layers
    num_layers: int
    max_position: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    activation: ActivationConfig
    full_attention_layers: tuple[int, ...]  # 0-based; every other layer is KDA
    moe_layers: tuple[int, ...]  # 0-based; every other layer is dense
    attn_res_block_size: int | None  # None = plain residuals
    kda: KdaConfig
    mla: MlaConfig
    indexer: IndexerConfig | None
    moe: MoeConfig
    vision: VisionConfig | None
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]  # generation stops on any of these
    pad_token_id: int | None
    media_placeholder_token_id: int | None
    experts_packed: bool = False  # MXFP4 experts announced; when loading, the file decides per tensor

    def is_full_attention(self, layer: int) -> bool:
        return layer in self.full_attention_layers

    def is_moe(self, layer: int) -> bool:
        return layer in self.moe_layers
