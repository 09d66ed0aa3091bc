"""A mixture of experts in two operators, of which the first is `route_experts`, then `mix_experts`.

    I, w = route(x)                                   from the full-width x, also when experts are latent
    z    = W_down x  or  x                            into the latent size of the experts, if they have one
    e_i  = w2_i act(w1_i z, w3_i z)                   in the model's dtype
    r    = round( sum_{i in I} w_i f32(e_i) )         float32 sum of the rounded outputs, ascending expert
    out  = W_up rms_norm(r)  or  r,  + shared(x)      the norm only where the checkpoint has one

Experts are grouped so that each one that is hit is read once. MXFP4 weights stay packed as stored: 4-bit
codes [out, in/2], low nibble first, and one E8M0 byte per 32 inputs. One matrix at a time is dequantised,
which is exact in bfloat16. Plain weights are used as they are. A row's result does not depend on its batch
mates; rows whose experts nobody else hits cost one matrix each. T = 0 reads no expert.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from longspan.config import ActivationConfig
from longspan.formats.mx import dequantize_mxfp4
from longspan.ops.activation import gated_activation
from longspan.ops.ffn import FfnWeights, ffn
from longspan.ops.linear import linear
from longspan.ops.norm import rms_norm
from longspan.ops.router import RouterWeights, route


@dataclass(frozen=True, eq=False)
class MxfpWeight:
    """One [out, in] matrix as it lies in the file."""

    packed: Tensor  # [out, in / 2] uint8
    scale: Tensor  # [out, in / 32] uint8


@dataclass(frozen=True, eq=False)
class ExpertWeights:
    """The three matrices of one expert, packed or plain."""

    gate: MxfpWeight | Tensor  # w1 [width, in]
    up: MxfpWeight | Tensor  # w3 [width, in]
    down: MxfpWeight | Tensor  # w2 [in, width]


@dataclass(frozen=True, eq=False)
class LatentProjection:
    """Into the latent size of the experts and back."""

    down: Tensor  # [latent, hidden]
    norm: Tensor | None  # [latent]
    up: Tensor  # [hidden, latent]


@dataclass(frozen=True, eq=False)
class MoeWeights:
    """Router, routed experts and what surrounds them."""

    router: RouterWeights
    latent: LatentProjection | None
    bank: Sequence[ExpertWeights]
    shared: FfnWeights | None
    activation: ActivationConfig  # of the routed experts
    norm_eps: float


def routed_experts(x: Tensor, weights: MoeWeights) -> Tensor:
    """x [T, hidden] -> r [T, latent or hidden]."""
    z, experts, expert_weights = route_experts(x, weights)
    return mix_experts(z, experts, expert_weights, weights).to(x.dtype)


def route_experts(x: Tensor, weights: MoeWeights) -> tuple[Tensor, Tensor, Tensor]:
    """x [T, hidden] -> what the experts see [T, latent or hidden], experts and their weights [T, k]."""
    z = x if weights.latent is None else linear(x, weights.latent.down)
    return z, *route(x, weights.router)


def mix_experts(z: Tensor, experts: Tensor, expert_weights: Tensor, weights: MoeWeights) -> Tensor:
    """z [N, in], experts and their weights [N, k] -> the sum [N, in] float32. An expert below 0 is none."""
    out = torch.zeros(z.shape)
    k = experts.shape[1]
    order = experts.flatten().argsort(stable=True)[int((experts < 0).sum()) :]
    hit, counts = experts.flatten()[order].unique_consecutive(return_counts=True)
    for expert, pairs in zip(hit.tolist(), order.split(counts.tolist()), strict=True):
        w, rows = weights.bank[expert], pairs // k
        x = z[rows]
        hidden = gated_activation(_product(x, w.gate), _product(x, w.up), weights.activation)
        out[rows] += expert_weights.flatten()[pairs, None] * _product(hidden, w.down).float()
    return out


def moe_output(r: Tensor, x: Tensor, weights: MoeWeights) -> Tensor:
    """r [T, latent or hidden] of all experts, x [T, hidden] -> [T, hidden]."""
    if weights.latent is not None:
        if weights.latent.norm is not None:
            r = rms_norm(r, weights.latent.norm, weights.norm_eps)
        r = linear(r, weights.latent.up)
    return r if weights.shared is None else r + ffn(x, weights.shared)


def _product(x: Tensor, weight: MxfpWeight | Tensor) -> Tensor:
    if isinstance(weight, MxfpWeight):
        return linear(x, dequantize_mxfp4(weight.packed, weight.scale, dtype=x.dtype))
    return linear(x, weight.to(x.dtype))
