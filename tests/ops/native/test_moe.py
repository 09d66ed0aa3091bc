"""The native mixture of experts against the torch reference."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from longspan.config import ActivationConfig
from longspan.errors import CheckpointError
from longspan.formats.mx import quantize_mxfp4
from longspan.ops import moe as reference
from longspan.ops.ffn import FfnWeights
from longspan.ops.moe import ExpertWeights, LatentProjection, MoeWeights, MxfpWeight
from longspan.ops.native import moe as native
from longspan.ops.native.extension import extension
from longspan.ops.router import RouterWeights, route

SITU = ActivationConfig("situ", beta=4.0, linear_beta=25.0)
SILU = ActivationConfig("silu", beta=None, linear_beta=None)
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2.0**-6}
PACKED_SIZES = (32, 96, 128, 160, 416)
PLAIN_SIZES = (1, 10, 33, 64, 130)
dtypes = st.sampled_from([torch.float32, torch.bfloat16])


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    extension().set_threads(2)
    yield
    extension().set_threads(2)


def matrix(rows: int, cols: int, dtype: torch.dtype, packed: bool) -> MxfpWeight | Tensor:
    w = torch.randn(rows, cols) / cols**0.5
    return MxfpWeight(*quantize_mxfp4(w)) if packed else w.to(dtype)


def make_moe(
    dtype: torch.dtype,
    hidden: int = 48,
    latent: int | None = 96,
    width: int = 160,
    experts: int = 6,
    top_k: int = 3,
    packed: Sequence[bool] = (True,),  # of one matrix after the other
    norm: bool = True,
    shared: int | None = 40,
    activation: ActivationConfig = SITU,
    **router: object,
) -> MoeWeights:
    size = latent or hidden
    kinds = [packed[i % len(packed)] for i in range(3 * experts)]
    bank = [
        ExpertWeights(
            matrix(width, size, dtype, kinds[3 * e]),
            matrix(width, size, dtype, kinds[3 * e + 1]),
            matrix(size, width, dtype, kinds[3 * e + 2]),
        )
        for e in range(experts)
    ]
    rule = RouterWeights(
        gate=(torch.randn(experts, hidden) / hidden**0.5).to(dtype),
        bias=torch.randn(experts) * 0.1,
        top_k=top_k,
        num_groups=1,
        top_k_groups=1,
        renormalize=True,
        scaling_factor=2.446,
    )

    def dense(rows: int, cols: int) -> Tensor:
        return (torch.randn(rows, cols) / cols**0.5).to(dtype)

    return MoeWeights(
        router=dataclasses.replace(rule, **router),  # pyright: ignore
        latent=LatentProjection(
            down=dense(latent, hidden),
            norm=torch.rand(latent).to(dtype) + 0.5 if norm else None,
            up=dense(hidden, latent),
        )
        if latent
        else None,
        bank=bank,
        shared=FfnWeights(dense(shared, hidden), dense(shared, hidden), dense(hidden, shared), activation)
        if shared
        else None,
        activation=activation,
        norm_eps=1e-5,
    )


def assert_close(got: Tensor, want: Tensor) -> None:
    assert got.shape == want.shape and got.dtype == want.dtype
    if got.numel():
        scale = float(want.abs().amax())
        torch.testing.assert_close(got, want, atol=TOLERANCE[want.dtype] * scale, rtol=TOLERANCE[want.dtype])


def assume_clear_choices(x: Tensor, router: RouterWeights) -> None:
    """No choice that rounding could turn: the logits come from sums in another order."""
    choices = {tuple(route(x + noise, router)[0].flatten().tolist()) for noise in (0, 1e-5, -1e-5)}
    wide = dataclasses.replace(router, gate=router.gate.double().float() * (1 + 1e-6))
    assume(len(choices | {tuple(route(x, wide)[0].flatten().tolist())}) == 1)


@settings(max_examples=60)
@given(
    dtype=dtypes,
    tokens=st.sampled_from([0, 1, 2, 3, 5, 7, 20]),
    hidden=st.sampled_from([32, 64, 96]),
    latent=st.sampled_from([None, *PACKED_SIZES]),
    width=st.sampled_from(PACKED_SIZES),
    top_k=st.integers(1, 5),
    packed=st.lists(st.booleans(), min_size=1, max_size=4),
    activation=st.sampled_from([SITU, SILU]),
    renormalize=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_routed_experts_equal_the_reference(
    dtype: torch.dtype,
    tokens: int,
    hidden: int,
    latent: int | None,
    width: int,
    top_k: int,
    packed: list[bool],
    activation: ActivationConfig,
    renormalize: bool,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    weights = make_moe(
        dtype, hidden, latent, width, 7, top_k, packed, activation=activation, renormalize=renormalize
    )
    x = torch.randn(tokens, hidden).to(dtype)
    assume_clear_choices(x, weights.router)
    assert_close(native.routed_experts(x, weights), reference.routed_experts(x, weights))


@settings(max_examples=40)
@given(
    dtype=dtypes,
    tokens=st.sampled_from([0, 1, 2, 9]),
    latent=st.sampled_from([None, 96]),
    packed=st.lists(st.booleans(), min_size=1, max_size=2),
    chance=st.sampled_from([0.0, 0.5, 1.0]),
    choices=st.integers(1, 5),
    seed=st.integers(0, 1000),
)
def test_routing_and_mixing_equal_the_reference_with_experts_left_out(
    dtype: torch.dtype,
    tokens: int,
    latent: int | None,
    packed: list[bool],
    chance: float,
    choices: int,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    weights = make_moe(dtype, 64, latent, experts=6, packed=packed)
    x = torch.randn(tokens, 64).to(dtype)
    assume_clear_choices(x, weights.router)
    z, experts, shares = native.route_experts(x, weights)
    want_z, want_experts, want_shares = reference.route_experts(x, weights)
    assert_close(z, want_z)
    assert torch.equal(experts, want_experts)
    torch.testing.assert_close(shares, want_shares, atol=1e-5, rtol=1e-5)
    # What a rank of others is given: as many choices as it likes, ascending, some of them none.
    experts = torch.rand(tokens, 6).argsort(-1)[:, :choices].sort(-1).values
    experts[torch.rand(tokens, choices) >= chance] = -1
    shares = torch.rand(tokens, choices)
    got, want = (mix(z, experts, shares, weights) for mix in (native.mix_experts, reference.mix_experts))
    assert got.dtype == torch.float32 and (got[(experts < 0).all(-1)] == 0).all()
    if got.numel():
        tolerance = TOLERANCE[dtype]
        torch.testing.assert_close(got, want, atol=tolerance * float(want.abs().amax()), rtol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("packed", [[True], [False]], ids=["mxfp4", "plain"])
def test_routed_experts_are_routed_mixed_and_rounded(dtype: torch.dtype, packed: list[bool]) -> None:
    torch.manual_seed(0)
    weights = make_moe(dtype, packed=packed)
    x = torch.randn(23, 48).to(dtype)
    z, experts, shares = native.route_experts(x, weights)
    mixed = native.mix_experts(z, experts, shares, weights)
    assert torch.equal(mixed.to(dtype), native.routed_experts(x, weights))
    # Rows on their way to owners of experts meet other mates and leave some choices behind.
    experts[:, 1] = -1
    whole = native.mix_experts(z, experts, shares, weights)
    rows = torch.tensor([22, 3, 3, 17])
    for threads in (1, 2, 3, 7):
        extension().set_threads(threads)
        assert torch.equal(native.mix_experts(z, experts, shares, weights), whole)
        assert torch.equal(native.mix_experts(z[rows], experts[rows], shares[rows], weights), whole[rows])


@settings(max_examples=30)
@given(
    dtype=dtypes,
    tokens=st.sampled_from([1, 2, 6]),
    hidden=st.sampled_from(PLAIN_SIZES),
    latent=st.sampled_from([None, *PLAIN_SIZES]),
    width=st.sampled_from(PLAIN_SIZES),
    seed=st.integers(0, 1000),
)
def test_plain_experts_have_any_size(
    dtype: torch.dtype, tokens: int, hidden: int, latent: int | None, width: int, seed: int
) -> None:
    torch.manual_seed(seed)
    weights = make_moe(dtype, hidden, latent, width, 5, 2, packed=[False])
    x = torch.randn(tokens, hidden).to(dtype)
    assume_clear_choices(x, weights.router)
    assert_close(native.routed_experts(x, weights), reference.routed_experts(x, weights))


@settings(max_examples=30)
@given(
    groups=st.sampled_from([(2, 1), (4, 2), (8, 4), (8, 8)]),
    top_k=st.integers(1, 5),  # more than a group holds: dropped experts come last, the lower first
    tied=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_groups_and_ties_choose_as_the_reference_does(
    groups: tuple[int, int], top_k: int, tied: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    weights = make_moe(torch.float32, experts=8, top_k=top_k, num_groups=groups[0], top_k_groups=groups[1])
    x = torch.randn(4, 48)
    if tied:
        levels = torch.tensor([-torch.inf, 0.0, 0.25])[torch.randint(0, 3, (8,))]
        weights = dataclasses.replace(
            weights, router=dataclasses.replace(weights.router, gate=torch.zeros(8, 48), bias=levels)
        )
    else:
        assume_clear_choices(x, weights.router)
    assert_close(native.routed_experts(x, weights), reference.routed_experts(x, weights))


@settings(max_examples=40)
@given(
    dtype=dtypes,
    tokens=st.sampled_from([0, 1, 2, 7, 40]),
    hidden=st.sampled_from(PLAIN_SIZES),
    latent=st.sampled_from([None, 24, 64]),
    norm=st.booleans(),
    shared=st.sampled_from([None, 1, 40]),
    seed=st.integers(0, 1000),
)
def test_the_output_equals_the_reference(
    dtype: torch.dtype,
    tokens: int,
    hidden: int,
    latent: int | None,
    norm: bool,
    shared: int | None,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    weights = make_moe(dtype, hidden, latent, experts=1, top_k=1, packed=[False], norm=norm, shared=shared)
    x, r = torch.randn(tokens, hidden).to(dtype), torch.randn(tokens, latent or hidden).to(dtype)
    assert_close(native.moe_output(r, x, weights), reference.moe_output(r, x, weights))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("packed", [[True], [False], [True, False]], ids=["mxfp4", "plain", "mixed"])
def test_threads_and_batch_mates_change_no_bit(dtype: torch.dtype, packed: list[bool]) -> None:
    torch.manual_seed(0)
    weights = make_moe(dtype, packed=packed)
    x = torch.randn(61, 48).to(dtype)
    r = native.routed_experts(x, weights)
    out = native.moe_output(r, x, weights)
    for threads in (1, 2, 3, 7):
        extension().set_threads(threads)
        assert torch.equal(native.routed_experts(x, weights), r)
        assert torch.equal(native.moe_output(r, x, weights), out)
    for begin, end in ((0, 1), (1, 3), (3, 8), (8, 20), (20, 61)):
        part = x[begin:end]
        assert torch.equal(native.routed_experts(part, weights), r[begin:end])
        assert torch.equal(native.moe_output(r[begin:end], part, weights), out[begin:end])


def test_more_pairs_than_a_round_holds_change_no_bit() -> None:
    torch.manual_seed(1)
    weights = make_moe(torch.float32, hidden=32, latent=4096, width=32, experts=3, top_k=2, packed=[True])
    x = torch.randn(4200, 32)  # 8400 pairs; 64 MiB hold 4032
    whole = native.routed_experts(x, weights)
    assert torch.equal(native.mix_experts(*native.route_experts(x, weights), weights), whole)
    for begin in range(0, 4200, 1400):
        part = native.routed_experts(x[begin : begin + 1400], weights)
        assert torch.equal(whole[begin : begin + 1400], part)


def test_only_the_experts_that_are_hit_are_touched_and_only_once() -> None:
    torch.manual_seed(2)
    weights = make_moe(torch.bfloat16, experts=12, top_k=2)
    touched: list[int] = []

    class Watched(list):
        def __getitem__(self, expert):
            touched.append(expert)
            return super().__getitem__(expert)

    watched = dataclasses.replace(weights, bank=Watched(weights.bank))
    x = torch.randn(3, 48).bfloat16()
    hit = sorted(set(route(x, weights.router)[0].flatten().tolist()))
    first = native.routed_experts(x, watched)
    assert touched == hit
    assert torch.equal(native.routed_experts(x, watched), first) and touched == hit


def test_experts_of_another_dtype_are_converted() -> None:
    torch.manual_seed(3)
    weights = make_moe(torch.float32, packed=[False], latent=None)
    halves = [ExpertWeights(e.gate.half(), e.up.bfloat16(), e.down.double()) for e in weights.bank]  # pyright: ignore
    weights = dataclasses.replace(weights, bank=halves)
    x = torch.randn(5, 48)
    assert_close(native.routed_experts(x, weights), reference.routed_experts(x, weights))


@pytest.mark.parametrize("broken", ["gate", "up", "down"])
def test_a_corrupt_matrix_is_lost_only_to_tokens_that_hit_it(broken: str) -> None:
    torch.manual_seed(4)
    weights = make_moe(torch.bfloat16)
    shape = (96, 160) if broken == "down" else (160, 96)
    bank = list(weights.bank)
    bank[2] = dataclasses.replace(bank[2], **{broken: torch.tensor(torch.nan).expand(shape)})
    corrupt = dataclasses.replace(weights, bank=bank)
    x = torch.randn(20, 48).bfloat16()
    lost = (route(x, weights.router)[0] == 2).any(-1)
    assert lost.any() and not lost.all()
    out = native.routed_experts(x, corrupt)
    assert out[lost].isnan().all()
    assert torch.equal(out[~lost], native.routed_experts(x, weights)[~lost])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_row_that_is_not_finite_stays_alone(dtype: torch.dtype, value: float) -> None:
    torch.manual_seed(5)
    weights = make_moe(dtype, num_groups=3, top_k_groups=2)
    x = torch.randn(9, 48).to(dtype)
    whole = native.routed_experts(x, weights)
    x[4, 7] = value
    out = native.routed_experts(x, weights)
    rest = torch.arange(9) != 4
    assert not out[4].isfinite().any()
    assert torch.equal(out[rest], whole[rest])
    assert not native.moe_output(out, x, weights)[4].isfinite().any()


def test_the_smallest_and_the_largest_scales_are_exact() -> None:
    torch.manual_seed(6)
    weights = make_moe(torch.float32, hidden=128, latent=None, width=128, experts=1, top_k=1)
    expert = weights.bank[0]
    for matrix_, byte in ((expert.gate, 0), (expert.up, 0), (expert.down, 251)):
        assert isinstance(matrix_, MxfpWeight)
        matrix_.scale.fill_(byte)
    # 2^-127 times 2^110 and more; as large as that, the scores are 0 or 1 and the output is in range.
    x = torch.randn(3, 128) * 2.0**110
    want = reference.routed_experts(x, weights)
    assert want.isfinite().all() and want.abs().amax() > 1e9
    assert_close(native.routed_experts(x, weights), want)


@pytest.mark.parametrize("exponent", [32, 127, 252, 253, 254])
def test_any_exponent_that_bfloat16_holds_is_exact(exponent: int) -> None:
    torch.manual_seed(7)
    weights = make_moe(torch.bfloat16, hidden=128, latent=None, width=128, experts=1, top_k=1)
    down = weights.bank[0].down
    assert isinstance(down, MxfpWeight)
    down.packed.bitwise_and_(0x99)  # 0 and 1/2, of both signs
    down.scale.fill_(exponent)
    x = (torch.randn(3, 128) * 2.0**-8).bfloat16()
    want = reference.routed_experts(x.float(), weights).bfloat16()
    assert want.isfinite().all() and want.count_nonzero()
    assert_close(native.routed_experts(x, weights), want)


def test_a_nan_exponent_is_an_error() -> None:
    weights = make_moe(torch.bfloat16, experts=1, top_k=1)
    gate = weights.bank[0].gate
    assert isinstance(gate, MxfpWeight)
    gate.scale[3, 0] = 255
    with pytest.raises(CheckpointError, match="255"):
        native.routed_experts(torch.randn(1, 48).bfloat16(), weights)
