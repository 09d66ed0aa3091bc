"""Native twins of attention_residual, ffn and lm_head."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from longspan.ops.ffn import FfnWeights
from longspan.ops.native.extension import extension
from longspan.ops.native.handles import contiguous, kept, native_activation, native_dtype


def attention_residual(
    blocks: Sequence[Tensor],
    prefix: Tensor | None,
    update: Tensor | None,
    score_weight: Tensor | None,
    norm_weight: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor]:
    if prefix is None or update is None:
        total = contiguous(prefix if update is None else update)  # pyright: ignore[reportArgumentType]
        addends = (0, 0)
    else:
        prefix, update = contiguous(prefix), contiguous(update)
        total = torch.empty_like(prefix)
        addends = (prefix.data_ptr(), update.data_ptr())
    rows, width = total.shape
    out = torch.empty_like(total)
    extension().attention_residual(
        native_dtype(total.dtype),
        rows,
        width,
        [block.data_ptr() for block in blocks],
        [block.stride(0) for block in blocks],
        *addends,
        total.data_ptr(),
        score_weight.data_ptr() if blocks and score_weight is not None else 0,
        norm_weight.data_ptr(),
        eps,
        out.data_ptr(),
    )
    return out, total


def ffn_handle(weights: FfnWeights) -> Any:
    return kept(weights, _build_ffn)


def _build_ffn(weights: FfnWeights) -> Any:
    return extension().Ffn(weights.gate, weights.up, weights.down, native_activation(weights.activation))


def ffn(x: Tensor, weights: FfnWeights) -> Tensor:
    x = contiguous(x)
    out = x.new_empty(x.shape[0], weights.down.shape[0])
    extension().ffn(ffn_handle(weights), x.shape[0], x.data_ptr(), out.data_ptr())
    return out


def lm_head(x: Tensor, weight: Tensor) -> Tensor:
    x = contiguous(x)
    logits = torch.empty(x.shape[0], weight.shape[0])
    # An alias: the handle must not keep alive what keeps the handle.
    handle = kept(weight, lambda tensor: extension().Weight(tensor.detach()))
    extension().lm_head(handle, x.shape[0], x.data_ptr(), logits.data_ptr())
    return logits
