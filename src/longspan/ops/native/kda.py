"""Native twin of kda."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from longspan.ops.batch import KdaView, StepBatch
from longspan.ops.kda import KdaWeights, LowRank
from longspan.ops.native.extension import extension
from longspan.ops.native.handles import contiguous, kept, native_batch


def kda(x: Tensor, weights: KdaWeights, view: KdaView, batch: StepBatch) -> Tensor:
    x = contiguous(x)
    out = x.new_empty(x.shape[0], weights.output.shape[0])
    extension().kda(
        kept(weights, _build_weights),
        kept(view, _build_memory),
        native_batch(batch),
        x.data_ptr(),
        out.data_ptr(),
    )
    return out


def _build_weights(weights: KdaWeights) -> Any:
    gate, gate_b = weights.gate, None
    if isinstance(gate, LowRank):
        gate, gate_b = gate.a, gate.b
    return extension().Kda(
        weights.q,
        weights.k,
        weights.v,
        weights.forget.a,
        weights.forget.b,
        weights.beta,
        gate,
        gate_b,
        weights.output,
        weights.conv,
        weights.a_log,
        weights.dt_bias,
        weights.o_norm,
        weights.gate_lower_bound,
        weights.norm_eps,
    )


def _build_memory(view: KdaView) -> Any:
    state, window = view.state, view.conv
    for tensor in (state, window):
        assert tensor.stride(-1) == 1 or tensor.shape[-1] <= 1, "values of a state must be contiguous"
    return extension().KdaMemory(
        state.data_ptr(), *state.stride()[:3], window.data_ptr(), *window.stride()[:2]
    )
