"""What `LayerView` describes as windows on plain bytes: all layers of a page, or of a slot, side by side."""

from __future__ import annotations

from math import ceil, prod

import torch
from torch import Tensor

from longspan import large_pages
from longspan.config import ModelConfig
from longspan.memory.sizes import ALIGNMENT, page_layout, slot_layout
from longspan.ops.batch import QUAD, KdaView, LayerView, MlaView, QuantizedKeys


def make_views(
    config: ModelConfig,
    pages: Tensor,
    slots: Tensor,
    page_size: int,
    dtype: torch.dtype,
    index_key_dtype: str = "auto",
) -> tuple[LayerView, ...]:
    """Windows on pages [num_pages, bytes] and slots [num_slots, bytes], both uint8 with dense rows.

    Rows may be longer than `page_layout` and `slot_layout` say, and may be the same memory. Latents, index
    keys and conv windows have `dtype`, recurrent states float32; with `index_key_dtype` "int8" index keys are
    `QuantizedKeys`. The model reads only what it has written.
    """
    page = page_layout(config, page_size, dtype.itemsize, index_key_dtype).offsets
    slot = slot_layout(config, dtype.itemsize).offsets

    def window(rows: Tensor, offset: int, *shape: int, dtype: torch.dtype = dtype) -> Tensor:
        part = rows[:, offset : offset + prod(shape) * dtype.itemsize]
        return part.view(dtype).unflatten(1, shape)

    def index_keys(layer: int, dim: int) -> Tensor | QuantizedKeys:
        if index_key_dtype == "auto":
            return window(pages, page[layer, "key"], page_size, dim)
        shape = (ceil(dim / QUAD), page_size, QUAD)
        return QuantizedKeys(
            codes=window(pages, page[layer, "codes"], *shape, dtype=torch.uint8),
            scale=window(pages, page[layer, "scale"], page_size, dtype=torch.float32),
        )

    def view(layer: int) -> LayerView:
        if config.is_full_attention(layer):
            mla, indexer = config.mla, config.indexer
            width = mla.kv_lora_rank + mla.qk_rope_head_dim
            return MlaView(
                latent=window(pages, page[layer, "latent"], page_size, width),
                index_key=index_keys(layer, indexer.head_dim) if indexer else None,
            )
        kda = config.kda
        heads, dim = kda.num_heads, kda.head_dim
        return KdaView(
            state=window(slots, slot[layer, "state"], heads, dim, dim, dtype=torch.float32),
            conv=window(slots, slot[layer, "conv"], kda.conv_kernel_size - 1, 3 * heads * dim),
        )

    return tuple(view(layer) for layer in range(config.num_layers))


def allocate_views(
    config: ModelConfig,
    num_pages: int,
    page_size: int,
    num_slots: int,
    dtype: torch.dtype,
    index_key_dtype: str = "auto",
    poison: bool = False,
) -> tuple[LayerView, ...]:
    """Views on memory of their own. Contents are whatever the allocator gave, or NaN with `poison`."""
    page_bytes = page_layout(config, page_size, dtype.itemsize, index_key_dtype).num_bytes
    slot_bytes = slot_layout(config, dtype.itemsize).num_bytes
    pages, slots = allocate(num_pages, page_bytes), allocate(num_slots, slot_bytes)
    if poison:
        pages.fill_(POISON)
        slots.fill_(POISON)
    return make_views(config, pages, slots, page_size, dtype, index_key_dtype)


POISON = 0xFF
"""This in every byte is NaN in bfloat16 and float32; an int8 key is NaN by its scale."""


def allocate(rows: int, row_bytes: int) -> Tensor:
    """Undefined bytes [rows, row_bytes] that begin at a multiple of ALIGNMENT."""
    data = large_pages.empty((rows * row_bytes + ALIGNMENT,), torch.uint8)
    start = -data.data_ptr() % ALIGNMENT
    return data[start : start + rows * row_bytes].view(rows, row_bytes)
