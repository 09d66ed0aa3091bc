"""Allocates what `LayerView` describes: per layer either pages of latents and index keys, or KDA slots."""

from __future__ import annotations

from math import ceil

import torch
from torch import Tensor

from longspan import large_pages
from longspan.config import ModelConfig
from longspan.ops.batch import QUAD, ZERO_CODE, KdaView, LayerView, MlaView, QuantizedKeys


def allocate_views(
    config: ModelConfig,
    num_pages: int,
    page_size: int,
    num_slots: int,
    dtype: torch.dtype,
    index_key_dtype: str = "auto",
    fill: float | None = None,
) -> tuple[LayerView, ...]:
    """One view per layer. Latents, index keys and conv windows have `dtype`, recurrent states float32.

    With `index_key_dtype` "int8" index keys are `QuantizedKeys`. Contents are whatever the allocator gave, or
    `fill` everywhere (codes of keys: zero, for the scale tells): the model reads only what it has written.
    """

    def new(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        if fill is None:
            return large_pages.empty(shape, dtype)
        return torch.full(shape, ZERO_CODE if dtype == torch.uint8 else fill, dtype=dtype)

    def index_keys(dim: int) -> Tensor | QuantizedKeys:
        if index_key_dtype == "auto":
            return new(num_pages, page_size, dim)
        return QuantizedKeys(
            codes=new(num_pages, ceil(dim / QUAD), page_size, QUAD, dtype=torch.uint8),
            scale=new(num_pages, page_size, dtype=torch.float32),
        )

    def view(layer: int) -> LayerView:
        if config.is_full_attention(layer):
            mla, indexer = config.mla, config.indexer
            return MlaView(
                latent=new(num_pages, page_size, mla.kv_lora_rank + mla.qk_rope_head_dim),
                index_key=index_keys(indexer.head_dim) if indexer else None,
            )
        kda = config.kda
        return KdaView(
            state=new(num_slots, kda.num_heads, kda.head_dim, kda.head_dim, dtype=torch.float32),
            conv=new(num_slots, kda.conv_kernel_size - 1, 3 * kda.num_heads * kda.head_dim),
        )

    return tuple(view(layer) for layer in range(config.num_layers))
