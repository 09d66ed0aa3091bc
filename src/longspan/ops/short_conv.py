"""Short causal convolution, one filter per channel, over ragged sequences with a carried window.

    y[t, c] = round( silu( sum_j w[c, j] * x[t - (n-1) + j, c] ) )      j = 0..n-1, float32 inside

Tap n-1 multiplies the current token. The n-1 inputs before the first row come from the slot, or are zeros
where the sequence has no context. Afterwards the slot holds the last n-1 inputs, whatever the split into
steps: also when the rows are fewer than n-1. A sequence of length 0 leaves its slot alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from longspan.ops.batch import StepBatch


def short_conv(x: Tensor, weight: Tensor, window: Tensor, batch: StepBatch) -> Tensor:
    """x [T, C], weight [C, n] float32, window [slots, n-1, C] (updated) -> [T, C] in the dtype of x."""
    kernel = weight.shape[1]
    history = kernel - 1
    fresh = (batch.context_lens == 0)[:, None, None]
    carried = torch.where(fresh, 0, window[batch.state_slots]).to(x.dtype)

    # One buffer: each sequence's history, then its rows. Row t of sequence s sits at t + (s + 1) * history.
    buffer = x.new_empty(batch.num_tokens + batch.num_seqs * history, x.shape[1])
    taps = torch.arange(history)
    starts = batch.query_starts[:-1] + torch.arange(batch.num_seqs) * history
    buffer[starts[:, None] + taps] = carried
    rows = torch.arange(batch.num_tokens) + batch.row_seqs * history
    buffer[rows + history] = x

    y = torch.zeros(x.shape)
    for j in range(kernel):
        y += weight[:, j] * buffer[rows + j]

    active = batch.lengths > 0
    ends = (starts + batch.lengths)[active]
    window[batch.state_slots[active]] = buffer[ends[:, None] + taps].to(window.dtype)
    return torch.nn.functional.silu(y).to(x.dtype)
