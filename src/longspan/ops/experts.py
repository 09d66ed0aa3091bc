"""Routed experts, grouped so that each expert that is hit is read once.

    e_i = w2_i act(w1_i z, w3_i z)                    in the model's dtype
    r   = round( sum_{i in I} w_i f32(e_i) )          float32 sum of the rounded outputs, ascending expert

MXFP4 weights stay packed as stored: 4-bit codes [out, in/2], low nibble first, and one E8M0 byte per 32
inputs. One matrix at a time is dequantised, which is exact in bfloat16. Plain weights are used as they are.
A row's result does not depend on its batch mates; rows whose experts nobody else hits cost one matrix each.
T = 0 reads no expert.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from longspan.config import ActivationConfig
from longspan.formats.mx import dequantize_mxfp4
from longspan.ops.activation import gated_activation
from longspan.ops.linear import linear


@dataclass(frozen=True)
class MxfpWeight:
    """One [out, in] matrix as it lies in the file."""

    packed: Tensor  # [out, in / 2] uint8
    scale: Tensor  # [out, in / 32] uint8


@dataclass(frozen=True)
class ExpertWeights:
    """The three matrices of one expert, packed or plain."""

    gate: MxfpWeight | Tensor  # w1 [width, in]
    up: MxfpWeight | Tensor  # w3 [width, in]
    down: MxfpWeight | Tensor  # w2 [in, width]


def routed_experts(
    z: Tensor,
    experts: Tensor,
    weights: Tensor,
    bank: Sequence[ExpertWeights],
    activation: ActivationConfig,
) -> Tensor:
    """z [T, in], experts and weights [T, k] from `route` -> [T, in]."""
    out = torch.zeros(z.shape)
    k = experts.shape[1]
    order = experts.flatten().argsort(stable=True)
    hit, counts = experts.flatten()[order].unique_consecutive(return_counts=True)
    for expert, pairs in zip(hit.tolist(), order.split(counts.tolist()), strict=True):
        w, rows = bank[expert], pairs // k
        x = z[rows]
        hidden = gated_activation(_product(x, w.gate), _product(x, w.up), activation)
        out[rows] += weights.flatten()[pairs, None] * _product(hidden, w.down).float()
    return out.to(z.dtype)


def _product(x: Tensor, weight: MxfpWeight | Tensor) -> Tensor:
    if isinstance(weight, MxfpWeight):
        return linear(x, dequantize_mxfp4(weight.packed, weight.scale, dtype=x.dtype))
    return linear(x, weight.to(x.dtype))
