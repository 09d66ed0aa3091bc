"""Merging attention over disjoint sets of tokens.

    m = max(lse, lse')     out = (out e^(lse - m) + out' e^(lse' - m)) / (e^(lse - m) + e^(lse' - m))
    lse = m + log(e^(lse - m) + e^(lse' - m))

An empty set has out 0 and lse -inf: merged with it, nothing changes, and two of them make an empty set. NaN
in either side's lse makes both NaN. float32 throughout; element by element, so rows and heads don't mix.
"""

from __future__ import annotations

import torch
from torch import Tensor


def merge_partial(out: Tensor, lse: Tensor, part: Tensor) -> None:
    """Merges part [T, H, C + 1] = [out | lse] into out [T, H, C] and lse [T, H], in place."""
    other = part[..., -1]
    peak = torch.maximum(lse, other)
    anchor = torch.where(peak == -torch.inf, 0.0, peak)
    mine, theirs = (lse - anchor).exp(), (other - anchor).exp()
    total = mine + theirs
    # One of the two weighs 1, so only two empty sets have a total below 1: they stay 0 / 1.
    bounded = total.clamp(min=1.0)
    out.mul_((mine / bounded)[..., None]).addcmul_(part[..., :-1], (theirs / bounded)[..., None])
    torch.add(peak, total.log(), out=lse)


def pack_partial(out: Tensor, lse: Tensor, parts: int) -> Tensor:
    """out [T, H, C], lse [T, H] -> [parts, T, H / parts, C + 1]: neighbouring heads together, [out | lse]."""
    tokens, heads, width = out.shape
    packed = out.new_empty(parts, tokens, heads // parts, width + 1)
    packed[..., :width] = out.unflatten(1, (parts, -1)).transpose(0, 1)
    packed[..., width] = lse.unflatten(1, (parts, -1)).transpose(0, 1)
    return packed
