"""Router, experts and what surrounds them against loops over tokens."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from longspan.config import ActivationConfig
from longspan.errors import CheckpointError
from longspan.formats.mx import dequantize_mxfp4, quantize_mxfp4
from longspan.ops.activation import gated_activation
from longspan.ops.ffn import FfnWeights, ffn
from longspan.ops.moe import (
    ExpertWeights,
    LatentProjection,
    MoeWeights,
    MxfpWeight,
    mix_experts,
    moe_output,
    route_experts,
    routed_experts,
)
from longspan.ops.router import RouterWeights, route

HIDDEN, WIDTH = 32, 64
SITU = ActivationConfig("situ", beta=4.0, linear_beta=25.0)


def make_router(experts: int = 8, top_k: int = 2, **changes: object) -> RouterWeights:
    router = RouterWeights(
        gate=torch.randn(experts, HIDDEN),
        bias=torch.randn(experts) * 0.1,
        top_k=top_k,
        num_groups=1,
        top_k_groups=1,
        renormalize=True,
        scaling_factor=2.446,
    )
    return dataclasses.replace(router, **changes)  # pyright: ignore


def slow_route(x: Tensor, w: RouterWeights) -> tuple[list[int], list[float]]:
    """One token, by the definition."""
    s = torch.sigmoid(w.gate.double() @ x.double()).tolist()
    choice = [a + b for a, b in zip(s, w.bias.tolist(), strict=True)]
    if w.num_groups > w.top_k_groups:
        size = len(s) // w.num_groups
        groups = [choice[g * size : (g + 1) * size] for g in range(w.num_groups)]
        ranked = sorted(range(w.num_groups), key=lambda g: (-sum(sorted(groups[g])[-2:]), g))
        for g in ranked[w.top_k_groups :]:
            choice[g * size : (g + 1) * size] = [float("-inf")] * size
    chosen = sorted(sorted(range(len(s)), key=lambda i: (-choice[i], i))[: w.top_k])
    weights = [s[i] for i in chosen]
    if w.renormalize and w.top_k > 1:
        weights = [a / (sum(weights) + 1e-20) for a in weights]
    return chosen, [a * w.scaling_factor for a in weights]


@given(
    tokens=st.integers(0, 5),
    top_k=st.sampled_from([1, 2, 3, 4]),
    groups=st.sampled_from([(1, 1), (2, 1), (4, 2), (8, 4)]),
    renormalize=st.booleans(),
    seed=st.integers(0, 50),
)
def test_router_equals_the_definition(
    tokens: int, top_k: int, groups: tuple[int, int], renormalize: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    w = make_router(8, top_k, num_groups=groups[0], top_k_groups=groups[1], renormalize=renormalize)
    x = torch.randn(tokens, HIDDEN)
    experts, weights = route(x, w)
    assert experts.shape == weights.shape == (tokens, top_k)
    for row in range(tokens):
        chosen, want = slow_route(x[row], w)
        assert experts[row].tolist() == chosen
        torch.testing.assert_close(weights[row], torch.tensor(want), atol=1e-6, rtol=1e-5)


def test_the_bias_chooses_but_does_not_weigh_and_a_constant_bias_changes_nothing() -> None:
    torch.manual_seed(0)
    x, w = torch.randn(20, HIDDEN), make_router()
    shifted = dataclasses.replace(w, bias=w.bias + 3.0)
    for a, b in zip(route(x, w), route(x, shifted), strict=True):
        torch.testing.assert_close(a, b)
    forced = dataclasses.replace(w, bias=torch.tensor([9.0, 9.0, 0, 0, 0, 0, 0, 0]), renormalize=False)
    experts, weights = route(x, forced)
    assert (experts == torch.tensor([0, 1])).all()
    torch.testing.assert_close(weights, 2.446 * torch.sigmoid(x @ w.gate[:2].T))


def test_router_logits_are_float32_also_for_bfloat16_rows() -> None:
    torch.manual_seed(1)
    w = make_router()
    w = dataclasses.replace(w, gate=w.gate.bfloat16())
    x = torch.randn(50, HIDDEN).bfloat16()
    _, weights = route(x, w)
    wide = route(x.float(), dataclasses.replace(w, gate=w.gate.float()))
    assert torch.equal(weights, wide[1])


def test_equal_choices_go_to_the_lower_experts() -> None:
    w = make_router(gate=torch.zeros(8, HIDDEN), bias=torch.zeros(8), top_k=3)
    assert route(torch.randn(2, HIDDEN), w)[0].tolist() == [[0, 1, 2]] * 2


def make_bank(experts: int, packed: bool) -> tuple[list[ExpertWeights], list[list[Tensor]]]:
    """The bank, and gate, up and down of each expert as plain float32."""
    bank, plain = [], []
    for _ in range(experts):
        matrices = [torch.randn(WIDTH, HIDDEN), torch.randn(WIDTH, HIDDEN), torch.randn(HIDDEN, WIDTH)]
        matrices = [(m * 0.2).bfloat16() for m in matrices]
        if packed:
            pairs = [quantize_mxfp4(m) for m in matrices]
            bank.append(ExpertWeights(*(MxfpWeight(*pair) for pair in pairs)))
            plain.append([dequantize_mxfp4(*pair) for pair in pairs])
        else:
            bank.append(ExpertWeights(*matrices))
            plain.append([m.float() for m in matrices])
    return bank, plain


@pytest.mark.parametrize("packed", [True, False], ids=["mxfp4", "plain"])
@given(tokens=st.integers(0, 9), top_k=st.integers(1, 4), seed=st.integers(0, 20))
def test_routed_experts_equal_a_loop_over_tokens(packed: bool, tokens: int, top_k: int, seed: int) -> None:
    torch.manual_seed(seed)
    bank, plain = make_bank(5, packed)
    z = torch.randn(tokens, HIDDEN)
    experts = (
        torch.stack([torch.randperm(5)[:top_k].sort().values for _ in range(tokens)])
        if tokens
        else (torch.empty(0, top_k, dtype=torch.int64))
    )
    weights = torch.rand(tokens, top_k)
    want = torch.zeros(tokens, HIDDEN)
    for t in range(tokens):
        for j, e in enumerate(experts[t].tolist()):
            gate, up, down = plain[e]
            want[t] += weights[t, j] * (down @ gated_activation(gate @ z[t], up @ z[t], SITU))
    got = mix_experts(z, experts, weights, of_bank(bank))
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-4)


def of_bank(bank) -> MoeWeights:
    """The experts alone, all that `mix_experts` asks for."""
    return MoeWeights(make_router(), None, bank, None, SITU, 1e-5)


def test_only_the_experts_that_are_hit_are_touched() -> None:
    bank, _ = make_bank(3, packed=True)

    class Watched(list):
        touched: list[int] = []  # noqa: RUF012

        def __getitem__(self, i):
            self.touched.append(i)
            return super().__getitem__(i)

    watched = Watched(bank)
    experts = torch.tensor([[2], [0], [2], [0]])
    mix_experts(torch.randn(4, HIDDEN), experts, torch.ones(4, 1), of_bank(watched))
    assert watched.touched == [0, 2]


def test_expert_outputs_are_rounded_and_then_summed_in_float32() -> None:
    torch.manual_seed(2)
    bank, _ = make_bank(2, packed=False)
    z = torch.randn(6, HIDDEN).bfloat16()
    weights = torch.rand(6, 2)
    both = torch.tensor([[0, 1]]).expand(6, 2)
    one = [mix_experts(z, both[:, e : e + 1], torch.ones(6, 1), of_bank(bank)) for e in (0, 1)]
    want = weights[:, :1] * one[0] + weights[:, 1:] * one[1]
    assert torch.equal(mix_experts(z, both, weights, of_bank(bank)), want)


def test_a_nan_row_stays_alone() -> None:
    torch.manual_seed(3)
    bank, _ = make_bank(8, packed=True)
    x = torch.randn(3, HIDDEN)
    x[1] = torch.nan
    experts, weights = route(x, make_router())
    out = mix_experts(x, experts, weights, of_bank(bank))
    assert out[1].isnan().all() and out[[0, 2]].isfinite().all()


def test_a_nan_exponent_is_an_error() -> None:
    bank, _ = make_bank(1, packed=True)
    assert isinstance(bank[0].up, MxfpWeight)
    bank[0].up.scale[3, 0] = 255
    with pytest.raises(CheckpointError, match="255"):
        mix_experts(torch.randn(1, HIDDEN), torch.tensor([[0]]), torch.ones(1, 1), of_bank(bank))


LATENT = HIDDEN  # of the experts that `make_bank` makes
WIDE = 48  # hidden size of a model with latent experts


def make_moe(latent: bool, norm: bool, shared: bool) -> MoeWeights:
    hidden = WIDE if latent else HIDDEN
    bank, _ = make_bank(4, packed=True)
    return MoeWeights(
        router=make_router(4, 2, gate=torch.randn(4, hidden)),
        latent=LatentProjection(
            down=torch.randn(LATENT, hidden) * 0.2,
            norm=torch.rand(LATENT) if norm else None,
            up=torch.randn(hidden, LATENT) * 0.2,
        )
        if latent
        else None,
        bank=bank,
        shared=make_ffn(hidden) if shared else None,
        activation=SITU,
        norm_eps=1e-5,
    )


def make_ffn(hidden: int) -> FfnWeights:
    return FfnWeights(
        gate=torch.randn(WIDTH, hidden) * 0.2,
        up=torch.randn(WIDTH, hidden) * 0.2,
        down=torch.randn(hidden, WIDTH) * 0.2,
        activation=SITU,
    )


@given(
    tokens=st.integers(0, 5),
    kind=st.sampled_from([(False, False), (True, False), (True, True)]),
    shared=st.booleans(),
    seed=st.integers(0, 9),
)
def test_a_layer_is_router_experts_and_surroundings_in_order(
    tokens: int, kind: tuple[bool, bool], shared: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    w = make_moe(*kind, shared)
    x = torch.randn(tokens, WIDE if w.latent else HIDDEN)
    r = routed_experts(x, w)
    z = x @ w.latent.down.T if w.latent else x
    torch.testing.assert_close(r, mix_experts(z, *route(x, w.router), w))
    want = r
    if w.latent:
        if w.latent.norm is not None:
            want = want / (want.square().mean(-1, keepdim=True) + 1e-5).sqrt() * w.latent.norm
        want = want @ w.latent.up.T
    if w.shared:
        hidden = gated_activation(x @ w.shared.gate.T, x @ w.shared.up.T, SITU)
        want = want + hidden @ w.shared.down.T
    torch.testing.assert_close(moe_output(r, x, w), want, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("tokens", [0, 1, 6])
def test_sums_over_disjoint_experts_make_the_whole(tokens: int) -> None:
    """What ranks that hold a part of the experts each will add up; an expert below 0 is none."""
    torch.manual_seed(4)
    w, x = make_moe(True, True, True), torch.randn(tokens, WIDE)
    z, experts, weights = route_experts(x, w)
    parts = [mix_experts(z, torch.where(experts % 2 == rank, experts, -1), weights, w) for rank in (0, 1)]
    torch.testing.assert_close(parts[0] + parts[1], routed_experts(x, w))
    assert not mix_experts(z, torch.full_like(experts, -1), weights, w).any()


@pytest.mark.parametrize("tokens", [0, 1, 3])
def test_a_gated_mlp_is_the_definition(tokens: int) -> None:
    torch.manual_seed(5)
    w, x = make_ffn(HIDDEN), torch.randn(tokens, HIDDEN)
    want = [w.down @ gated_activation(w.gate @ row, w.up @ row, SITU) for row in x]
    torch.testing.assert_close(ffn(x, w), torch.stack(want) if want else x)
