"""Native twins of apply_penalties and sample."""

from __future__ import annotations

import torch
from torch import Tensor

from longspan.ops.native.extension import extension
from longspan.ops.native.handles import contiguous
from longspan.ops.sampling import TokenCounts


def apply_penalties(
    logits: Tensor, counts: TokenCounts, presence: Tensor, frequency: Tensor, repetition: Tensor
) -> Tensor:
    logits = contiguous(logits)
    out = torch.empty_like(logits)
    # Named, so that they live through the call.
    places = [contiguous(part) for part in (counts.rows, counts.tokens, counts.output_counts)]
    penalties = [contiguous(part) for part in (presence, frequency, repetition)]
    extension().apply_penalties(
        *logits.shape,
        logits.data_ptr(),
        places[0].shape[0],
        *(part.data_ptr() for part in (*places, *penalties)),
        out.data_ptr(),
    )
    return out


def sample(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, uniforms: Tensor
) -> Tensor:
    given = [contiguous(part) for part in (logits, temperature, top_k, top_p, min_p, uniforms)]
    tokens = torch.empty(logits.shape[0], dtype=torch.int64)
    extension().sample(*logits.shape, *(part.data_ptr() for part in given), tokens.data_ptr())
    return tokens
