"""Muon for matrices (Jordan 2024; update scale of Moonlight, arXiv 2502.16982), AdamW for the rest."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor, nn

_A, _B, _C = 3.4445, -4.7750, 2.0315


def orthogonalize(g: Tensor, steps: int = 5) -> Tensor:
    """Newton-Schulz: [n,rows,cols] to about the nearest semi-orthogonal matrices, in bf16."""
    wide = g.shape[-2] <= g.shape[-1]
    x = (g if wide else g.mT).bfloat16()
    x = x / (x.float().norm(dim=(-2, -1), keepdim=True) + 1e-7).bfloat16()
    for _ in range(steps):
        a = x @ x.mT
        x = _A * x + (_B * a + _C * (a @ a)) @ x
    return (x if wide else x.mT).float()


class Muon(torch.optim.Optimizer):
    def __init__(
        self, params: Iterable[nn.Parameter], lr: float, momentum: float = 0.95, weight_decay: float = 0.05
    ):
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[nn.Parameter]] = defaultdict(list)
            for p in group["params"]:
                if p.grad is not None:
                    by_shape[p.shape].append(p)
            for shape, params in by_shape.items():
                grads = []
                for p in params:
                    state = self.state[p]
                    if "momentum" not in state:
                        state["momentum"] = torch.zeros_like(p)
                    state["momentum"].mul_(group["momentum"]).add_(p.grad)
                    grads.append(p.grad + group["momentum"] * state["momentum"])
                rows, cols = shape[-2:]
                update = orthogonalize(torch.stack(grads).reshape(-1, rows, cols)).reshape(-1, *shape)
                scale = group["lr"] * 0.2 * max(rows, cols) ** 0.5
                for p, u in zip(params, update, strict=True):
                    p.mul_(1 - group["lr"] * group["weight_decay"]).sub_(scale * u)


def optimizers(model: nn.Module, lr: float) -> list[torch.optim.Optimizer]:
    """Muon for the hidden matrices; AdamW for embedding, head, router, convolutions and vectors."""
    matrices, plain, vectors = [], [], []
    for name, p in model.named_parameters():
        if p.dim() >= 2 and min(p.shape[-2:]) > 8:
            (
                plain if any(s in name for s in ("embed_tokens", "lm_head", "gate.weight")) else matrices
            ).append(p)
        else:
            vectors.append(p)
    groups = [{"params": plain, "weight_decay": 0.01}, {"params": vectors, "weight_decay": 0.0}]
    return [Muon(matrices, lr), torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), eps=1e-10, foreach=True)]
