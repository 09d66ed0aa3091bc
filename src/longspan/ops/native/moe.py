"""Native twins of the operators of `ops/moe.py`. Experts are handed over when first hit."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from longspan.formats.mx import dequantize_mxfp4
from longspan.ops.moe import ExpertWeights, LatentProjection, MoeWeights, MxfpWeight
from longspan.ops.native.dense import ffn_handle
from longspan.ops.native.extension import extension
from longspan.ops.native.handles import contiguous, kept, native_activation

LARGEST_EXPONENT = 252  # of a packed matrix as the kernel takes it; only corrupt files go beyond


def routed_experts(x: Tensor, weights: MoeWeights) -> Tensor:
    x, handle = contiguous(x), kept(weights, _build)
    out = torch.empty_like(x) if weights.latent is None else _latents(x, weights.latent)
    run = extension().routed_experts
    while missing := run(handle, x.shape[0], x.data_ptr(), out.data_ptr()):
        _provide(handle, missing, weights, x.dtype)
    return out


def route_experts(x: Tensor, weights: MoeWeights) -> tuple[Tensor, Tensor, Tensor]:
    x, top_k = contiguous(x), weights.router.top_k
    z = x if weights.latent is None else _latents(x, weights.latent)
    experts = torch.empty((x.shape[0], top_k), dtype=torch.int64)
    shares = torch.empty(x.shape[0], top_k)
    asked = (x.data_ptr(), z.data_ptr(), experts.data_ptr(), shares.data_ptr())
    extension().route_experts(kept(weights, _build), x.shape[0], *asked)
    return z, experts, shares


def mix_experts(z: Tensor, experts: Tensor, expert_weights: Tensor, weights: MoeWeights) -> Tensor:
    z, experts, expert_weights = contiguous(z), contiguous(experts), contiguous(expert_weights)
    handle, run, out = kept(weights, _build), extension().mix_experts, torch.empty(z.shape)
    asked = (z.data_ptr(), experts.data_ptr(), expert_weights.data_ptr(), out.data_ptr())
    while missing := run(handle, *experts.shape, *asked):
        _provide(handle, missing, weights, z.dtype)
    return out


def _latents(x: Tensor, latent: LatentProjection) -> Tensor:
    return x.new_empty(x.shape[0], latent.down.shape[0])


def _provide(handle: Any, missing: list[int], weights: MoeWeights, dtype: torch.dtype) -> None:
    for expert in missing:
        handle.provide(expert, *_matrices(weights.bank[expert], dtype))


def moe_output(r: Tensor, x: Tensor, weights: MoeWeights) -> Tensor:
    if weights.latent is None and weights.shared is None:
        return r
    r, x = contiguous(r), contiguous(x)
    out = torch.empty_like(x)
    extension().moe_output(kept(weights, _build), x.shape[0], r.data_ptr(), x.data_ptr(), out.data_ptr())
    return out


def _build(weights: MoeWeights) -> Any:
    router, latent = weights.router, weights.latent
    native = extension()
    rule = native.Router(
        router.gate,
        router.bias,
        router.top_k,
        router.num_groups,
        router.top_k_groups,
        router.renormalize,
        router.scaling_factor,
    )
    projection = (None, None, None) if latent is None else (latent.down, latent.norm, latent.up)
    shared = None if weights.shared is None else ffn_handle(weights.shared)
    return native.Moe(rule, *projection, weights.norm_eps, shared, native_activation(weights.activation))


def _matrices(expert: ExpertWeights, dtype: torch.dtype) -> list[Any]:
    return [_matrix(weight, dtype) for weight in (expert.gate, expert.up, expert.down)]


def _matrix(weight: MxfpWeight | Tensor, dtype: torch.dtype) -> Any:
    if isinstance(weight, MxfpWeight) and int(weight.scale.max()) > LARGEST_EXPONENT:
        weight = dequantize_mxfp4(weight.packed, weight.scale, dtype)
    if isinstance(weight, MxfpWeight):
        return extension().ExpertMatrix(contiguous(weight.packed), contiguous(weight.scale))
    weight = weight.to(dtype)
    if weight.stride(0) == 0:  # one value, or one row, for all: a corrupt expert; it stays as small as that
        weight = weight[:1].contiguous().expand(weight.shape)
    return extension().ExpertMatrix(weight if weight.stride(1) == 1 else weight.contiguous())
