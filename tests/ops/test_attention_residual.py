"""The residual stream and its mix over depth."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from longspan.ops.attention_residual import attention_residual
from longspan.ops.norm import rms_norm

EPS = 1e-5


def mixed(sources: list[torch.Tensor], score: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
    """The last source is the prefix."""
    return attention_residual(sources[:-1], sources[-1], None, score, norm, EPS)[0]


@given(sources=st.integers(1, 9), tokens=st.integers(0, 4), width=st.integers(1, 7))
def test_mix_equals_a_softmax_over_normalised_sources(sources: int, tokens: int, width: int) -> None:
    torch.manual_seed(sources * 100 + tokens * 10 + width)
    s = torch.randn(sources, tokens, width, dtype=torch.float64)
    norm, score, after = torch.randn(3, width, dtype=torch.float64)
    keys = s / (s.square().mean(-1, keepdim=True) + EPS).sqrt() * norm
    mix = ((keys @ score).softmax(0)[..., None] * s).sum(0)
    want = mix / (mix.square().mean(-1, keepdim=True) + EPS).sqrt() * after
    got = mixed(list(s.float()), (norm * score).float(), after.float())
    torch.testing.assert_close(got, want.float(), atol=2e-5, rtol=1e-4)


def test_without_scores_the_mix_is_the_mean() -> None:
    s = torch.randn(4, 3, 8)
    got = mixed(list(s), torch.zeros(8), torch.ones(8))
    torch.testing.assert_close(got, rms_norm(s.mean(0), torch.ones(8), EPS))


@pytest.mark.parametrize("tokens", [255, 256, 257])
def test_rows_do_not_depend_on_the_block_they_fall_in(tokens: int) -> None:
    torch.manual_seed(tokens)
    s, score = torch.randn(3, tokens, 8), torch.randn(8)
    whole = mixed(list(s), score, torch.ones(8))
    for row in (0, tokens - 1):
        lone = mixed(list(s[:, row : row + 1]), score, torch.ones(8))
        torch.testing.assert_close(whole[row], lone[0])


def test_one_source_is_its_own_mix() -> None:
    p = torch.randn(3, 8).bfloat16()
    w = torch.randn(8).bfloat16()
    assert torch.equal(mixed([p], torch.randn(8), w), rms_norm(p, w, EPS))


def test_the_mix_is_rounded_once_before_the_norm() -> None:
    torch.manual_seed(0)
    s = torch.randn(3, 16, 32).bfloat16()
    w = torch.ones(32).bfloat16()
    want = rms_norm(s.float().mean(0).bfloat16(), w, EPS)
    torch.testing.assert_close(mixed(list(s), torch.zeros(32), w), want, atol=0.02, rtol=0)
    assert mixed(list(s), torch.zeros(32), w).dtype == torch.bfloat16


def test_a_nan_row_stays_alone() -> None:
    s = torch.randn(2, 3, 4)
    s[0, 1] = torch.nan
    out = mixed(list(s), torch.randn(4), torch.ones(4))
    assert out[1].isnan().all() and out[[0, 2]].isfinite().all()


@given(blocks=st.integers(0, 3), tokens=st.integers(0, 4), bfloat16=st.booleans())
def test_the_update_is_added_first_and_the_sum_rounded(blocks: int, tokens: int, bfloat16: bool) -> None:
    torch.manual_seed(blocks * 10 + tokens)
    s = torch.randn(blocks + 2, tokens, 8).to(torch.bfloat16 if bfloat16 else torch.float32)
    frozen, prefix, update = list(s[:-2]), s[-2], s[-1]
    score, norm = torch.randn(8), torch.ones(8, dtype=s.dtype)
    total = (prefix.float() + update.float()).to(s.dtype)
    x, new_prefix = attention_residual(frozen, prefix, update, score, norm, EPS)
    assert torch.equal(new_prefix, total)
    assert torch.equal(x, attention_residual(frozen, total, None, score, norm, EPS)[0])
    lone, new_prefix = attention_residual(frozen, None, update, score, norm, EPS)
    assert torch.equal(new_prefix, update)
    assert torch.equal(lone, attention_residual(frozen, update, None, score, norm, EPS)[0])


def test_without_blocks_no_score_is_read() -> None:
    prefix, update, norm = torch.randn(3, 8), torch.randn(3, 8), torch.randn(8)
    for score in (None, torch.full((8,), torch.nan)):
        x, total = attention_residual([], prefix, update, score, norm, EPS)
        assert torch.equal(total, prefix + update) and torch.equal(x, rms_norm(total, norm, EPS))


def test_what_cannot_be_mixed_is_refused() -> None:
    p = torch.randn(1, 4)
    with pytest.raises(ValueError, match="prefix or an update"):
        attention_residual([p], None, None, torch.ones(4), torch.ones(4), EPS)
    with pytest.raises(ValueError, match="score_weight"):
        attention_residual([p], p, None, None, torch.ones(4), EPS)
