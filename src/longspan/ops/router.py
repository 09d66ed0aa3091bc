"""Which experts a token goes to, and with what weight. All in float32, from the full-width hidden state.

    s = sigmoid( f32(W) f32(x) )          choice = s + bias            the bias only chooses
    groups (if fewer are kept than there are): score = sum of the two largest choices; others' choices = -inf
    I = top-k of choice                   w = s_I;  w = w / (sum w + 1e-20) if renormalised;  w = w * scaling

Ties go to the lower expert. Experts of a token are listed ascending. T = 0 gives [0, k].
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from longspan.ops.top_k import top_k_indices


@dataclass(frozen=True, eq=False)
class RouterWeights:
    """Gate and selection rule of one MoE layer."""

    gate: Tensor  # [experts, hidden]
    bias: Tensor  # [experts] float32
    top_k: int
    num_groups: int
    top_k_groups: int
    renormalize: bool
    scaling_factor: float


def route(x: Tensor, weights: RouterWeights) -> tuple[Tensor, Tensor]:
    """x [T, hidden] -> experts [T, k] int64 ascending and their weights [T, k] float32."""
    scores = torch.sigmoid(torch.nn.functional.linear(x.float(), weights.gate.float()))
    choice = scores + weights.bias
    if weights.num_groups > weights.top_k_groups:
        grouped = choice.unflatten(1, (weights.num_groups, -1))
        best_two = grouped.topk(min(2, grouped.shape[-1]), dim=-1).values.sum(-1)
        kept = torch.zeros(best_two.shape, dtype=torch.bool)
        kept.scatter_(1, top_k_indices(best_two, weights.top_k_groups), True)
        choice = torch.where(kept[..., None], grouped, -torch.inf).flatten(1)
    experts = top_k_indices(choice, weights.top_k)
    picked = scores.gather(1, experts)
    if weights.renormalize and weights.top_k > 1:
        picked = picked / (picked.sum(-1, keepdim=True) + 1e-20)
    return experts, picked * weights.scaling_factor
