"""The residual stream: add the last update to it, mix it with the frozen blocks, normalise the mix (AttnRes).

    prefix' = round( prefix + update )                          or the one of the two that is there
    s_0 .. s_m = the frozen block residuals of the token in order, then prefix'; in float32:

    e_j = sum_i n_i w_i s_j,i * rsqrt(mean(s_j^2) + eps)       n, w: learned norm weight and score vector
    a   = softmax_j(e)                                          no temperature
    mix = round( sum_j a_j s_j )                                the raw sources, not the normalised ones
    x   = rms_norm(mix; norm_weight, eps)                       the RMSNorm that always follows

Without blocks prefix' is its own mix and no score is read: plain residuals, and layer 0 of a model with
blocks. With w = 0 the mix is the mean. Nothing is cached between tokens. T = 0 gives [0, d].
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from longspan.ops.norm import rms_norm

ROW_BLOCK = 256  # tokens whose sources are widened at once


def attention_residual(
    blocks: Sequence[Tensor],
    prefix: Tensor | None,
    update: Tensor | None,
    score_weight: Tensor | None,
    norm_weight: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """blocks, prefix and update [T, d] -> x [T, d] and the new prefix [T, d].

    score_weight [d] float32 = n * w. Of prefix and update one may be None; the new prefix may be the other
    one itself. Raises ValueError if both are, or if there are blocks to mix and no scores.
    """
    if prefix is None or update is None:
        prefix = update if prefix is None else prefix
    else:
        prefix = prefix + update
    if prefix is None:
        raise ValueError("attention_residual needs a prefix or an update")
    if not blocks:
        return rms_norm(prefix, norm_weight, eps), prefix
    if score_weight is None:
        raise ValueError("attention_residual needs a score_weight to mix blocks")
    sources = [*blocks, prefix]
    mix = torch.empty_like(prefix)
    for begin in range(0, mix.shape[0], ROW_BLOCK):
        rows = slice(begin, begin + ROW_BLOCK)
        wide = torch.stack([source[rows] for source in sources]).float()
        scores = (wide @ score_weight) * torch.rsqrt(wide.square().mean(-1) + eps)
        mix[rows] = (torch.softmax(scores, dim=0)[..., None] * wide).sum(0).to(mix.dtype)
    return rms_norm(mix, norm_weight, eps), prefix
