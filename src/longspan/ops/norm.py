"""RMSNorm and LayerNorm over the last dimension.

    rms_norm(x; w, eps)        = w * round( f32(x) * rsqrt(mean(f32(x)^2) + eps) )
    layer_norm(x; w, b, eps)   = round( (f32(x) - mean) * rsqrt(var + eps) * f32(w) + f32(b) )   biased var

Statistics are float32 whatever the dtype of x; `round` is to the dtype of x. RMSNorm rounds before it
multiplies by the weight, as the published model does. Any leading shape, empty included.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., n], weight [n] of the same dtype -> [..., n]."""
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * (wide * scale).to(x.dtype)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """x [..., n], weight and bias [n] -> [..., n] in the dtype of x."""
    wide = torch.nn.functional.layer_norm(x.float(), weight.shape, weight.float(), bias.float(), eps)
    return wide.to(x.dtype)
