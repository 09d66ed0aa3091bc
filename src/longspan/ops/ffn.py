"""The gated MLP: dense layers and shared experts.

    ffn(x) = W_down act(W_gate x, W_up x)        in the model's dtype; act: `activation`

T = 0 gives [0, hidden].
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from longspan.config import ActivationConfig
from longspan.ops.activation import gated_activation
from longspan.ops.linear import linear


@dataclass(frozen=True, eq=False)
class FfnWeights:
    """One gated MLP."""

    gate: Tensor  # [width, hidden]
    up: Tensor  # [width, hidden]
    down: Tensor  # [hidden, width]
    activation: ActivationConfig


def ffn(x: Tensor, weights: FfnWeights) -> Tensor:
    """x [T, hidden] -> [T, hidden]."""
    hidden = gated_activation(linear(x, weights.gate), linear(x, weights.up), weights.activation)
    return linear(hidden, weights.down)
