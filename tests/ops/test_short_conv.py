"""The short convolution against a loop over single products."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.batches import Tables
from torch import Tensor

from longspan.ops.short_conv import short_conv

CHANNELS = 3


def slow_conv(x: Tensor, weight: Tensor) -> Tensor:
    """One whole sequence, tap by tap."""
    out = torch.zeros(x.shape, dtype=torch.float64)
    kernel = weight.shape[1]
    for t in range(x.shape[0]):
        for j in range(kernel):
            source = t - (kernel - 1) + j
            if source >= 0:
                out[t] += weight[:, j].double() * x[source].double()
    return torch.nn.functional.silu(out).float()


@given(st.data())
def test_any_split_of_ragged_sequences_equals_the_whole(data: st.DataObject) -> None:
    kernel = data.draw(st.sampled_from([2, 4]))
    lengths = data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=4))
    torch.manual_seed(0)
    weight = torch.randn(CHANNELS, kernel)
    inputs = [torch.randn(n, CHANNELS) for n in lengths]
    tables = Tables(len(lengths), 12)
    window = torch.full((tables.num_slots, kernel - 1, CHANNELS), torch.nan)

    done = [0] * len(lengths)
    outputs: list[list[Tensor]] = [[] for _ in lengths]
    while done != lengths:
        sizes = data.draw(st.lists(st.integers(0, 9), min_size=len(lengths), max_size=len(lengths)))
        if not any(sizes):
            sizes = [9] * len(lengths)
        take = [min(size, n - d) for size, n, d in zip(sizes, lengths, done, strict=True)]
        rows = torch.cat([x[d : d + t] for x, d, t in zip(inputs, done, take, strict=True)])
        y = short_conv(rows, weight, window, tables.batch(range(len(lengths)), take, done))
        for s, part in enumerate(y.split(take)):
            outputs[s].append(part)
            done[s] += take[s]
    for x, parts in zip(inputs, outputs, strict=True):
        if parts:
            torch.testing.assert_close(torch.cat(parts), slow_conv(x, weight), atol=1e-6, rtol=1e-5)


def test_window_holds_the_last_raw_inputs_and_zeros_before_the_start() -> None:
    tables = Tables(1, 8)
    window = torch.full((tables.num_slots, 3, CHANNELS), torch.nan)
    x = torch.randn(2, CHANNELS)
    short_conv(x, torch.randn(CHANNELS, 4), window, tables.batch([0], [2], [0]))
    torch.testing.assert_close(window[tables.slots[0]], torch.cat([torch.zeros(1, CHANNELS), x]))


def test_other_slots_and_sequences_of_length_zero_are_left_alone() -> None:
    tables = Tables(2, 8)
    window = torch.randn(tables.num_slots, 3, CHANNELS)
    before = window.clone()
    short_conv(
        torch.randn(1, CHANNELS), torch.randn(CHANNELS, 4), window, tables.batch([0, 1], [0, 1], [5, 5])
    )
    changed = (window != before).flatten(1).any(1)
    assert changed.nonzero()[:, 0].tolist() == [int(tables.slots[1])]


@pytest.mark.parametrize("seqs", [[], [0]])
def test_no_rows_at_all_is_fine(seqs: list[int]) -> None:
    tables = Tables(1, 8)
    window = torch.zeros(tables.num_slots, 3, CHANNELS)
    batch = tables.batch(seqs, [0] * len(seqs), [0] * len(seqs))
    assert short_conv(torch.empty(0, CHANNELS), torch.randn(CHANNELS, 4), window, batch).shape == (
        0,
        CHANNELS,
    )
