"""The native merge of partial attention against the torch reference."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from longspan.ops import partials as reference
from longspan.ops.native.partials import merge_partial

from .conftest import THREADS


def some_parts(rows: int, heads: int, width: int, scale: float) -> tuple[Tensor, Tensor]:
    """out and lse, a third of them empty and a tenth not a number."""
    out, lse = torch.randn(rows, heads, width), scale * torch.randn(rows, heads)
    empty, broken = torch.rand(rows, heads) < 1 / 3, torch.rand(rows, heads) < 0.1
    out[empty], lse[empty] = 0, -torch.inf
    out[broken], lse[broken] = torch.nan, torch.nan
    return out, lse


@settings(max_examples=60)
@given(
    rows=st.integers(0, 5),
    heads=st.integers(1, 5),
    width=st.sampled_from([1, 15, 16, 17, 100]),
    scale=st.sampled_from([1.0, 30.0, 1000.0]),
    seed=st.integers(0, 99),
)
def test_merging_equals_the_reference(rows: int, heads: int, width: int, scale: float, seed: int) -> None:
    torch.manual_seed(seed)
    (out, lse), other = (some_parts(rows, heads, width, scale) for _ in range(2))
    part = reference.pack_partial(*other, 1)[0]
    want, want_lse = out.clone(), lse.clone()
    reference.merge_partial(want, want_lse, part)
    merge_partial(out, lse, part)
    torch.testing.assert_close(out, want, atol=1e-6, rtol=1e-6, equal_nan=True)
    torch.testing.assert_close(lse, want_lse, atol=1e-6, rtol=1e-6, equal_nan=True)


def test_threads_change_no_bit(with_threads) -> None:
    torch.manual_seed(0)
    whole = [torch.randn(70, 30, 300), torch.randn(70, 30)]
    part = torch.randn(70, 30, 301)
    results = []
    for threads in THREADS:
        with_threads(threads)
        out, lse = (x.clone() for x in whole)
        merge_partial(out, lse, part)
        results.append((out, lse))
    assert all(torch.equal(a, b) for r in results[1:] for a, b in zip(r, results[0], strict=True))


def test_an_empty_part_changes_no_bit() -> None:
    out, lse = torch.randn(3, 2, 21), torch.randn(3, 2)
    nothing = reference.pack_partial(torch.zeros(3, 2, 21), torch.full((3, 2), -torch.inf), 1)[0]
    got, got_lse = out.clone(), lse.clone()
    merge_partial(got, got_lse, nothing)
    assert torch.equal(got, out) and torch.equal(got_lse, lse)


def test_what_parts_are_merged_into_must_be_contiguous() -> None:
    with pytest.raises(ValueError, match="must be contiguous"):
        merge_partial(torch.zeros(2, 3, 8)[..., :4], torch.zeros(2, 3), torch.zeros(2, 3, 5))
