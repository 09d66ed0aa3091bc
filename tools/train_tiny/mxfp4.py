"""Straight-through MXFP4: E2M1 values in groups of 32 with one power-of-two scale (OCP Microscaling v1.0)."""

from __future__ import annotations

import torch
from torch import Tensor

GROUP = 32


class FakeQuantize(torch.autograd.Function):
    @staticmethod
    def forward(ctx, w: Tensor) -> Tensor:
        return round_mxfp4(w)

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        return grad


def fake_quantize(w: Tensor) -> Tensor:
    """w rounded to MXFP4 with the gradient of the identity."""
    return FakeQuantize.apply(w)


def scale_exponent(groups: Tensor) -> Tensor:
    """Exponent of each group's power-of-two scale, [..., 32] -> [..., 1]: the largest value comes below 8."""
    amax = groups.abs().amax(-1, keepdim=True).clamp_min(2.0**-100)
    return torch.floor(torch.log2(amax)) - 2


def round_mxfp4(w: Tensor) -> Tensor:
    """Nearest E2M1 (0, .5, 1, 1.5, 2, 3, 4, 6) times the group's scale; values in (6, 8) saturate."""
    groups = w.detach().float().reshape(*w.shape[:-1], -1, GROUP)
    scale = torch.exp2(scale_exponent(groups))
    x = groups / scale
    a = x.abs()
    step = torch.where(a < 2, 0.5, torch.where(a < 4, 1.0, 2.0))
    q = (torch.round(a / step) * step).clamp_max(6.0)
    return (torch.copysign(q, x) * scale).reshape(w.shape).to(w.dtype)
