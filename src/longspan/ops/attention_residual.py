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


def attention_residual(
    sources: Sequence[Tensor], score_weight: Tensor, norm_weight: Tensor, eps: float
) -> Tensor:
    """sources [T, d] each, the prefix last; score_weight [d] float32 = n * w -> normalised mix [T, d]."""
    scores = []
    for source in sources:
        wide = source.float()
        scores.append((wide @ score_weight) * torch.rsqrt(wide.square().mean(-1) + eps))
    weights = torch.softmax(torch.stack(scores, dim=-1), dim=-1)
    mix = torch.zeros(sources[-1].shape)
    for j, source in enumerate(sources):
        mix += weights[:, j, None] * source.float()
    return rms_norm(mix.to(sources[-1].dtype), norm_weight, eps)
