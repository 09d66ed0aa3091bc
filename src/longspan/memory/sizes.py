"""How many bytes memory takes, from the config alone (no torch: `longspan inspect` answers at once)."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from longspan.config import ModelConfig

STATE_BYTES = 4  # recurrent states are float32
INDEX_KEY_DTYPES = ("auto", "int8")  # auto: the model's dtype


@dataclass(frozen=True)
class TokenBytes:
    """Bytes one token of context takes in all layers together."""

    latent: int
    index_key: int

    @property
    def total(self) -> int:
        return self.latent + self.index_key


@dataclass(frozen=True)
class SequenceBytes:
    """Bytes one sequence takes in all layers together, whatever its length."""

    recurrent: int
    conv: int

    @property
    def total(self) -> int:
        return self.recurrent + self.conv


def bytes_per_token(config: ModelConfig, element_bytes: int = 2, index_key_dtype: str = "auto") -> TokenBytes:
    """Latent (kv_lora_rank + qk_rope_head_dim values) and index key of every full-attention layer.

    An int8 key is whole quads of dimensions and a float32 scale.
    """
    layers = len(config.full_attention_layers)
    width = config.mla.kv_lora_rank + config.mla.qk_rope_head_dim
    key_bytes = 0
    if config.indexer:
        dim = config.indexer.head_dim
        key_bytes = dim * element_bytes if index_key_dtype == "auto" else ceil(dim / 4) * 4 + 4
    return TokenBytes(latent=layers * width * element_bytes, index_key=layers * key_bytes)


def bytes_per_sequence(config: ModelConfig, element_bytes: int = 2) -> SequenceBytes:
    """KDA state [heads, head_dim, head_dim] float32 and the kernel - 1 last q|k|v rows of every KDA layer."""
    layers = config.num_layers - len(config.full_attention_layers)
    kda = config.kda
    conv_values = (kda.conv_kernel_size - 1) * 3 * kda.num_heads * kda.head_dim
    return SequenceBytes(
        recurrent=layers * kda.num_heads * kda.head_dim**2 * STATE_BYTES,
        conv=layers * conv_values * element_bytes,
    )
