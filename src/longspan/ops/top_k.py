"""Top-k with one tie rule everywhere: higher score first, then lower index.

The k-th largest value is a threshold: all above it are in, and of those equal to it the first few. So a
choice depends only on the scores, never on how the work was split. NaN ranks last.
"""

from __future__ import annotations

import torch
from torch import Tensor


def top_k_indices(scores: Tensor, k: int) -> Tensor:
    """scores [rows, n] with k <= n -> [rows, k] int64, the chosen indices in ascending order."""
    rows, n = scores.shape
    if k == n:
        return torch.arange(n).expand(rows, n)
    scores = torch.where(scores.isnan(), -torch.inf, scores)
    threshold = scores.topk(k, dim=-1, sorted=False).values.amin(-1, keepdim=True) if k else torch.inf
    above, tied = scores > threshold, scores == threshold
    room = k - above.sum(-1, keepdim=True)
    chosen = above | (tied & (tied.cumsum(-1) <= room))
    return chosen.nonzero()[:, 1].view(rows, k)
