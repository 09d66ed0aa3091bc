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
    slot, head, key, value = state.stride()
    if state.shape[-1] > 1 and 1 not in (key, value):
        raise ValueError(
            f"the state of a slot has strides {state.stride()[1:]} for head, key and value: "
            "keys or values must lie side by side"
        )
    strides = (slot, head, key, value) if state.shape[-1] > 1 else (slot, head, 1, 1)
    return extension().KdaMemory(state.data_ptr(), *strides, window.data_ptr(), *window.stride())
