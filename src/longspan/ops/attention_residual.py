"""Attention over depth: mix the block residuals of a token, then normalise the mix (AttnRes).

Sources s_0 .. s_m of one token = the frozen block residuals in order, then the running prefix sum. In
float32:

    e_j = sum_i n_i w_i s_j,i * rsqrt(mean(s_j^2) + eps)       n, w: learned norm weight and score vector
    a   = softmax_j(e)                                          no temperature
    mix = round( sum_j a_j s_j )                                the raw sources, not the normalised ones
    out = rms_norm(mix; norm_weight, eps)                       the RMSNorm that always follows

With w = 0 the mix is the mean; one source is its own mix. Nothing is cached between tokens. T = 0 gives [0,
d].
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from longspan.ops.norm import rms_norm

ROW_BLOCK = 256  # tokens whose sources are widened at once


def attention_residual(
    sources: Sequence[Tensor], score_weight: Tensor, norm_weight: Tensor, eps: float
) -> Tensor:
    """sources [T, d] each, the prefix last; score_weight [d] float32 = n * w -> normalised mix [T, d]."""
    out = torch.empty_like(sources[-1])
    for begin in range(0, out.shape[0], ROW_BLOCK):
        rows = slice(begin, begin + ROW_BLOCK)
        wide = torch.stack([source[rows] for source in sources]).float()
        scores = (wide @ score_weight) * torch.rsqrt(wide.square().mean(-1) + eps)
        out[rows] = (torch.softmax(scores, dim=0)[..., None] * wide).sum(0).to(out.dtype)
    return rms_norm(out, norm_weight, eps)
