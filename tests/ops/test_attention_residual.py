"""The mix over depth."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from longspan.ops.attention_residual import attention_residual
from longspan.ops.norm import rms_norm

EPS = 1e-5


@given(sources=st.integers(1, 9), tokens=st.integers(0, 4), width=st.integers(1, 7))
def test_mix_equals_a_softmax_over_normalised_sources(sources: int, tokens: int, width: int) -> None:
    torch.manual_seed(sources * 100 + tokens * 10 + width)
    s = torch.randn(sources, tokens, width, dtype=torch.float64)
    norm, score, after = torch.randn(3, width, dtype=torch.float64)
    keys = s / (s.square().mean(-1, keepdim=True) + EPS).sqrt() * norm
    mix = ((keys @ score).softmax(0)[..., None] * s).sum(0)
    want = mix / (mix.square().mean(-1, keepdim=True) + EPS).sqrt() * after
    got = attention_residual(list(s.float()), (norm * score).float(), after.float(), EPS)
    torch.testing.assert_close(got, want.float(), atol=2e-5, rtol=1e-4)


def test_without_scores_the_mix_is_the_mean() -> None:
    s = torch.randn(4, 3, 8)
    got = attention_residual(list(s), torch.zeros(8), torch.ones(8), EPS)
    torch.testing.assert_close(got, rms_norm(s.mean(0), torch.ones(8), EPS))


@pytest.mark.parametrize("tokens", [255, 256, 257])
def test_rows_do_not_depend_on_the_block_they_fall_in(tokens: int) -> None:
    torch.manual_seed(tokens)
    s, score = torch.randn(3, tokens, 8), torch.randn(8)
    whole = attention_residual(list(s), score, torch.ones(8), EPS)
    for row in (0, tokens - 1):
        lone = attention_residual(list(s[:, row : row + 1]), score, torch.ones(8), EPS)
        torch.testing.assert_close(whole[row], lone[0])


def test_one_source_is_its_own_mix() -> None:
    p = torch.randn(3, 8).bfloat16()
    w = torch.randn(8).bfloat16()
    assert torch.equal(attention_residual([p], torch.randn(8), w, EPS), rms_norm(p, w, EPS))


def test_the_mix_is_rounded_once_before_the_norm() -> None:
    torch.manual_seed(0)
    s = torch.randn(3, 16, 32).bfloat16()
    w = torch.ones(32).bfloat16()
    want = rms_norm(s.float().mean(0).bfloat16(), w, EPS)
    torch.testing.assert_close(attention_residual(list(s), torch.zeros(32), w, EPS), want, atol=0.02, rtol=0)
    assert attention_residual(list(s), torch.zeros(32), w, EPS).dtype == torch.bfloat16


def test_a_nan_row_stays_alone() -> None:
    s = torch.randn(2, 3, 4)
    s[0, 1] = torch.nan
    out = attention_residual(list(s), torch.randn(4), torch.ones(4), EPS)
    assert out[1].isnan().all() and out[[0, 2]].isfinite().all()
