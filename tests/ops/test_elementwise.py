"""Norms, the gated activation, linear products."""

from __future__ import annotations

import math

import pytest
import torch

from longspan.config import ActivationConfig
from longspan.ops import linear as linear_module
from longspan.ops.activation import gated_activation
from longspan.ops.linear import lm_head
from longspan.ops.norm import layer_norm, rms_norm

SITU = ActivationConfig("situ", beta=4.0, linear_beta=25.0)


def test_rms_norm_of_a_hand_computed_row() -> None:
    x, w = torch.tensor([[3.0, 4.0]]), torch.tensor([1.0, 2.0])
    rms = math.sqrt(12.5 + 1e-5)
    torch.testing.assert_close(rms_norm(x, w, 1e-5), torch.tensor([[3 / rms, 8 / rms]]))


def test_rms_norm_rounds_before_it_multiplies_by_the_weight() -> None:
    torch.manual_seed(0)
    x, w = torch.randn(64, 96).bfloat16(), torch.randn(96).bfloat16()
    wide = x.float()
    unit = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)).bfloat16()
    late = (unit.float() * w.float()).bfloat16()
    assert torch.equal(rms_norm(x, w, 1e-5), late)


def test_rms_norm_keeps_float32_statistics_of_large_bfloat16_rows() -> None:
    x = torch.full((1, 4096), 300.0).bfloat16()
    torch.testing.assert_close(rms_norm(x, torch.ones(4096).bfloat16(), 1e-5).float(), torch.ones(1, 4096))


def test_layer_norm_uses_the_biased_variance_weight_and_bias() -> None:
    x = torch.tensor([[1.0, 3.0]])
    out = layer_norm(x, torch.tensor([2.0, 2.0]), torch.tensor([0.5, 0.5]), 0.0)
    torch.testing.assert_close(out, torch.tensor([[-1.5, 2.5]]))


@pytest.mark.parametrize("norm", [rms_norm, lambda x, w, e: layer_norm(x, w, w, e)])
def test_norms_accept_no_rows(norm) -> None:
    assert norm(torch.empty(0, 8), torch.ones(8), 1e-5).shape == (0, 8)


def test_situ_squashes_both_branches_and_gates_by_the_unsquashed_sigmoid() -> None:
    g, u = -1.5, 40.0
    want = 4 * math.tanh(g / 4) / (1 + math.exp(-g)) * 25 * math.tanh(u / 25)
    got = gated_activation(torch.tensor([g]), torch.tensor([u]), SITU)
    torch.testing.assert_close(got, torch.tensor([want]))


def test_situ_without_a_linear_beta_leaves_the_up_branch_alone() -> None:
    g, u = torch.tensor([0.7]), torch.tensor([300.0])
    got = gated_activation(g, u, ActivationConfig("situ", beta=1.0))
    torch.testing.assert_close(got, torch.tanh(g) * torch.sigmoid(g) * u)


def test_silu_is_swiglu() -> None:
    g, u = torch.randn(5), torch.randn(5)
    got = gated_activation(g, u, ActivationConfig("silu"))
    torch.testing.assert_close(got, g * torch.sigmoid(g) * u)


@pytest.mark.parametrize("vocab", [1, 6, 7, 8, 15])
def test_lm_head_is_exact_in_float32_across_its_blocks(vocab: int, monkeypatch) -> None:
    monkeypatch.setattr(linear_module, "LM_HEAD_BLOCK", 7)
    torch.manual_seed(0)
    x, w = torch.randn(3, 16).bfloat16(), torch.randn(vocab, 16).bfloat16()
    got = lm_head(x, w)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, x.float() @ w.float().T)
    assert lm_head(x[:0], w).shape == (0, vocab)
