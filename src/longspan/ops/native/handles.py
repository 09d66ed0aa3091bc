"""What the native side makes of weights and batches, made once and kept with them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from longspan.config import ActivationConfig
from longspan.ops.batch import StepBatch
from longspan.ops.native.extension import extension
from longspan.ops.shard import Shard


def kept(owner: Any, build: Callable[[Any], Any]) -> Any:
    """build(owner), from the first call on the same object. It lives as long as `owner` does."""
    made = owner.__dict__.get("_native")
    if made is None:
        made = owner.__dict__["_native"] = build(owner)
    return made


def native_dtype(dtype: torch.dtype) -> Any:
    kinds = extension().Dtype
    return kinds.bfloat16 if dtype == torch.bfloat16 else kinds.float32


def native_batch(batch: StepBatch) -> Any:
    """The batch as all layers of a step share it."""
    return kept(batch, _build_batch)


def _build_batch(batch: StepBatch) -> Any:
    return extension().Batch(
        batch.num_tokens,
        batch.num_seqs,
        batch.query_starts.data_ptr(),
        batch.context_lens.data_ptr(),
        batch.block_tables.data_ptr(),
        batch.block_tables.stride(0),
        batch.slot_mapping.data_ptr(),
        batch.state_slots.data_ptr(),
        native_shard(batch.shard),
    )


@cache
def native_shard(shard: Shard) -> Any:
    return extension().Shard(shard.rank, shard.size, shard.interleave)


def native_activation(config: ActivationConfig) -> Any:
    return extension().Activation(config.kind != "silu", config.beta or 1.0, config.linear_beta or 0.0)


def pages(tensor: Tensor) -> tuple[int, int, int, int]:
    """Pages [pages, page_size, n] as the kernels take them: address, strides of page and row, page size."""
    assert tensor.stride(2) == 1 or tensor.shape[2] <= 1, "rows of a page must be contiguous"
    return tensor.data_ptr(), tensor.stride(0), tensor.stride(1), tensor.shape[1]


def contiguous(tensor: Tensor) -> Tensor:
    """The tensor with dense rows; nearly always itself."""
    return tensor if tensor.is_contiguous() else tensor.contiguous()
