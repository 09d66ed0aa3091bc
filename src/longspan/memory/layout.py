"""Allocates what `LayerView` describes: per layer either pages of latents and index keys, or KDA slots."""

from __future__ import annotations

import torch
from torch import Tensor

from longspan.config import ModelConfig
from longspan.ops.batch import KdaView, LayerView, MlaView


def allocate_views(
    config: ModelConfig,
    num_pages: int,
    page_size: int,
    num_slots: int,
    dtype: torch.dtype,
    fill: float | None = None,
) -> tuple[LayerView, ...]:
    """One view per layer. Latents, index keys and conv windows have `dtype`, recurrent states float32.

    Contents are whatever the allocator gave, or `fill` everywhere: the model reads only what it has written.
    """

    def new(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype) if fill is None else torch.full(shape, fill, dtype=dtype)

    def view(layer: int) -> LayerView:
        if config.is_full_attention(layer):
            mla, indexer = config.mla, config.indexer
            return MlaView(
                latent=new(num_pages, page_size, mla.kv_lora_rank + mla.qk_rope_head_dim),
                index_key=new(num_pages, page_size, indexer.head_dim) if indexer else None,
            )
        kda = config.kda
        return KdaView(
            state=new(num_slots, kda.num_heads, kda.head_dim, kda.head_dim, dtype=torch.float32),
            conv=new(num_slots, kda.conv_kernel_size - 1, 3 * kda.num_heads * kda.head_dim),
        )

    return tuple(view(layer) for layer in range(config.num_layers))
