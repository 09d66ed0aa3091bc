"""Native twin of sparse_attention."""

from __future__ import annotations

import torch
from torch import Tensor

from longspan.ops.batch import MlaView, StepBatch
from longspan.ops.native.extension import extension
from longspan.ops.native.handles import contiguous, native_batch, native_dtype, pages

DENSE = -1  # in place of top_k


def sparse_attention(
    query: Tensor, view: MlaView, batch: StepBatch, selected: Tensor | None, rank: int, scale: float
) -> tuple[Tensor, Tensor]:
    query = contiguous(query)
    rows, heads, width = query.shape
    selected = None if selected is None else contiguous(selected)
    out = torch.empty(rows, heads, rank)
    lse = torch.empty(rows, heads)
    extension().sparse_attention(
        native_dtype(query.dtype),
        native_batch(batch),
        *pages(view.latent),
        query.data_ptr(),
        heads,
        width,
        rank,
        scale,
        0 if selected is None else selected.data_ptr(),
        DENSE if selected is None else selected.shape[1],
        out.data_ptr(),
        lse.data_ptr(),
    )
    return out, lse
