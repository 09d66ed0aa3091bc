"""Partial attention merges to the whole, whichever way it was cut."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from longspan.ops.partials import merge_partial, pack_partial


def attention(scores: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """scores [T, H, S], values [S, C] -> out [T, H, C] and lse [T, H]; of an empty set 0 and -inf."""
    if scores.shape[2] == 0:
        return torch.zeros(*scores.shape[:2], values.shape[1]), torch.full(scores.shape[:2], -torch.inf)
    return scores.softmax(-1) @ values, scores.logsumexp(-1)


@settings(deadline=None)
@given(
    owners=st.lists(st.integers(0, 3), max_size=40),
    order=st.permutations(range(4)),
    rows=st.integers(0, 3),
    heads=st.integers(1, 3),
    width=st.integers(1, 5),
    scale=st.sampled_from([1.0, 30.0, 1000.0]),
    seed=st.integers(0, 99),
)
def test_any_partition_of_the_tokens_merges_to_the_whole(
    owners: list[int], order: list[int], rows: int, heads: int, width: int, scale: float, seed: int
) -> None:
    noise = torch.Generator().manual_seed(seed)
    owner = torch.tensor(owners, dtype=torch.int64)
    scores = scale * torch.randn(rows, heads, len(owners), generator=noise)
    values = torch.randn(len(owners), width, generator=noise)
    parts = [attention(scores[..., owner == r], values[owner == r]) for r in order]
    out, lse = parts[0]
    for part in parts[1:]:
        merge_partial(out, lse, pack_partial(*part, 1)[0])
    want, want_lse = attention(scores, values)
    torch.testing.assert_close(out, want, atol=1e-5, rtol=0)
    torch.testing.assert_close(lse, want_lse, atol=1e-5, rtol=1e-6)


def test_an_empty_part_changes_no_bit() -> None:
    out, lse = torch.randn(3, 2, 5), torch.randn(3, 2)
    empty = torch.zeros(3, 2, 6)
    empty[..., 5] = -torch.inf
    got, got_lse = out.clone(), lse.clone()
    merge_partial(got, got_lse, empty)
    assert torch.equal(got, out) and torch.equal(got_lse, lse)
    got, got_lse = empty[..., :5].clone(), empty[..., 5].clone()
    merge_partial(got, got_lse, pack_partial(out, lse, 1)[0])
    assert torch.equal(got, out) and torch.equal(got_lse, lse)


def test_nothing_merged_into_nothing_stays_nothing() -> None:
    out, lse = torch.zeros(2, 3, 4), torch.full((2, 3), -torch.inf)
    merge_partial(out, lse, pack_partial(out, lse, 1)[0])
    assert (out == 0).all() and (lse == -torch.inf).all()


@pytest.mark.parametrize("side", ["whole", "part"])
@pytest.mark.parametrize("other", [0.0, -torch.inf])
def test_nan_of_either_side_stays_in_its_row_and_head(side: str, other: float) -> None:
    out, lse = torch.zeros(2, 2, 3), torch.full((2, 2), other)
    part, part_lse = out.clone(), lse.clone()
    broken = (out, lse) if side == "whole" else (part, part_lse)
    for tensor in broken:
        tensor[1, 0] = torch.nan
    merge_partial(out, lse, pack_partial(part, part_lse, 1)[0])
    nan = torch.zeros(2, 2, dtype=torch.bool)
    nan[1, 0] = True
    assert torch.equal(lse.isnan(), nan)
    assert torch.equal(out.isnan(), nan[..., None].expand(2, 2, 3))


def test_packing_puts_neighbouring_heads_together_with_their_lse() -> None:
    out, lse = torch.arange(24.0).view(1, 6, 4), -torch.arange(6.0).view(1, 6)
    packed = pack_partial(out, lse, 3)
    assert packed.shape == (3, 1, 2, 5) and packed.is_contiguous()
    assert torch.equal(packed[1, 0, :, :4], out[0, 2:4]) and torch.equal(packed[1, 0, :, 4], lse[0, 2:4])
