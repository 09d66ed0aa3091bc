"""The gated activation between the up and the down projection of every MLP and expert.

    situ(g, u) = round( [ b tanh(g/b) sigmoid(g) ] * [ c tanh(u/c) ] )     b = beta, c = linear_beta, float32
    silu(g, u) = silu(g) * u                                               in the dtype of g

The sigmoid of SiTU takes the unsquashed g; `linear_beta` None leaves u as it is.
"""

from __future__ import annotations

import torch
from torch import Tensor

from longspan.config import ActivationConfig


def gated_activation(gate: Tensor, up: Tensor, activation: ActivationConfig) -> Tensor:
    """gate and up [..., n] of one dtype -> [..., n] of that dtype."""
    if activation.kind == "silu":
        return torch.nn.functional.silu(gate) * up
    g, u, beta = gate.float(), up.float(), activation.beta
    squashed = beta * torch.tanh(g / beta) * torch.sigmoid(g)
    if activation.linear_beta is not None:
        u = activation.linear_beta * torch.tanh(u / activation.linear_beta)
    return (squashed * u).to(gate.dtype)
