"""How many bytes memory takes, from the config alone (no torch: `longspan inspect` answers at once)."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from longspan.config import ModelConfig

STATE_BYTES = 4  # recurrent states are float32
ALIGNMENT = 64  # bytes, of each layer's part of a page and of a slot
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


@dataclass(frozen=True)
class Layout:
    """Where each part of a page, and of a slot, begins: bytes from its start, by (layer, name)."""

    offsets: dict[tuple[int, str], int]
    num_bytes: int


def page_layout(
    config: ModelConfig, page_size: int, element_bytes: int = 2, index_key_dtype: str = "auto"
) -> Layout:
    """A page: "latent" of every full-attention layer, and "key", or "codes" and "scale" of int8 keys."""
    width = config.mla.kv_lora_rank + config.mla.qk_rope_head_dim
    parts = {"latent": width * element_bytes}
    if config.indexer and index_key_dtype == "auto":
        parts["key"] = config.indexer.head_dim * element_bytes
    elif config.indexer:
        parts |= {"codes": ceil(config.indexer.head_dim / 4) * 4, "scale": 4}
    layers = config.full_attention_layers
    return _lay_out({(layer, name): page_size * size for layer in layers for name, size in parts.items()})


def slot_layout(config: ModelConfig, element_bytes: int = 2) -> Layout:
    """A slot: "state" and "conv" of every KDA layer."""
    kda = config.kda
    parts = {
        "state": kda.num_heads * kda.head_dim**2 * STATE_BYTES,
        "conv": (kda.conv_kernel_size - 1) * 3 * kda.num_heads * kda.head_dim * element_bytes,
    }
    layers = [layer for layer in range(config.num_layers) if not config.is_full_attention(layer)]
    return _lay_out({(layer, name): size for layer in layers for name, size in parts.items()})


def _lay_out(sizes: dict[tuple[int, str], int]) -> Layout:
    offsets, end = {}, 0
    for part, size in sizes.items():
        offsets[part] = end
        end += ceil(size / ALIGNMENT) * ALIGNMENT
    return Layout(offsets, max(end, ALIGNMENT))


def pages_per_slab(page_bytes: int, slot_bytes: int) -> int:
    """Pages that fit where a slot does, which wastes less than a page of it."""
    return max(1, ceil(slot_bytes / page_bytes))


def page_stride(page_bytes: int, slot_bytes: int, pages_per_slab: int) -> int:
    """Bytes from page to page, so that a slab is as long as its pages and holds a slot."""
    return max(page_bytes, ceil(slot_bytes / pages_per_slab / ALIGNMENT) * ALIGNMENT)
