"""MX number formats, bit by bit."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longspan.errors import CheckpointError
from longspan.formats import mx

GRID = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
finite = st.floats(allow_nan=False, allow_infinity=False, width=32)


def slow_e2m1(x: float) -> int:
    """Nearest grid point by exhaustive search in exact arithmetic, ties to the even code."""
    best = min(range(8), key=lambda c: (abs(GRID[c] - min(abs(x), 6.0)), c % 2))
    return best | (8 if math.copysign(1, x) < 0 else 0)


def slow_e4m3(code: int) -> float:
    exponent, mantissa = code >> 3 & 0xF, code & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    magnitude = (mantissa / 8) * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return -magnitude if code & 0x80 else magnitude


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])


def test_known_nibbles_and_exponents_decode_bit_exactly():
    """G32: 2 x 96 with exponents 126, 127, 128 and 0, 1, 254 (small codes only, so nothing overflows)."""
    codes = torch.arange(96, dtype=torch.uint8).remainder(16).repeat(2, 1)
    codes[1, 64:] = torch.tensor([0, 1, 2, 3, 8, 9, 10, 11], dtype=torch.uint8).repeat(4)
    scale = torch.tensor([[126, 127, 128], [0, 1, 254]], dtype=torch.uint8)
    expected = torch.zeros(2, 96, dtype=torch.float64)
    for row in range(2):
        for column in range(96):
            code = int(codes[row, column])
            value = GRID[code & 7] * 2.0 ** (int(scale[row, column // 32]) - 127)
            expected[row, column] = math.copysign(value, -1 if code & 8 else 1)
    packed = torch.zeros(2, 48, dtype=torch.uint8)
    for column in range(96):
        packed[:, column // 2] += codes[:, column] * (16 if column % 2 else 1)
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        out = mx.dequantize_mxfp4(packed, scale, dtype)
        assert out.dtype == dtype
        assert torch.equal(bits(out.double()), bits(expected))


def test_exponent_255_is_refused_with_its_position():
    scale = torch.full((3, 2), 127, dtype=torch.uint8)
    scale[2, 1] = 255
    with pytest.raises(
        CheckpointError, match=r"1 of 6 MX scale bytes are 255 \(NaN\), the first at \[2, 1\]"
    ):
        mx.dequantize_mxfp4(torch.zeros(3, 32, dtype=torch.uint8), scale)


def test_exponent_0_is_two_to_the_minus_127():
    assert mx.decode_e8m0(torch.tensor([0], dtype=torch.uint8)).item() == 2.0**-127


def test_every_exponent_decodes_to_its_power_of_two_in_every_dtype():
    scale = torch.arange(255, dtype=torch.uint8)
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        assert mx.decode_e8m0(scale, dtype).double().tolist() == [2.0 ** (e - 127) for e in range(255)]


def test_a_scale_that_overflows_the_dtype_is_refused_not_turned_into_infinity():
    packed = torch.full((1, 16), 0x77, dtype=torch.uint8)
    with pytest.raises(CheckpointError, match="beyond the range"):
        mx.dequantize_mxfp4(packed, torch.tensor([[253]], dtype=torch.uint8))
    assert (
        mx.dequantize_mxfp4(packed, torch.tensor([[253]], dtype=torch.uint8), torch.float64).max()
        == 6 * 2.0**126
    )


@given(
    st.lists(finite | st.sampled_from([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -0.25, -5.0, -0.0]), min_size=1)
)
def test_e2m1_rounds_to_nearest_even_code_and_saturates(xs):
    assert mx.encode_e2m1(torch.tensor(xs)).tolist() == [slow_e2m1(x) for x in xs]


def test_e2m1_neighbours_of_every_tie_round_to_their_own_side():
    for low in range(7):
        tie = torch.tensor((GRID[low] + GRID[low + 1]) / 2)
        below, above = torch.nextafter(tie, torch.tensor(0.0)), torch.nextafter(tie, torch.tensor(9.0))
        even = low + low % 2
        assert mx.encode_e2m1(torch.stack([below, tie, above])).tolist() == [low, even, low + 1]


def test_e2m1_refuses_nan_and_saturates_infinity():
    with pytest.raises(CheckpointError, match="NaN"):
        mx.encode_e2m1(torch.tensor([1.0, float("nan")]))
    assert mx.encode_e2m1(torch.tensor([float("inf"), -float("inf")])).tolist() == [7, 15]


def test_all_codes_survive_encode_after_decode():
    codes = torch.arange(16, dtype=torch.uint8)
    assert torch.equal(mx.encode_e2m1(mx.decode_e2m1(codes)), codes)


@given(st.integers(0, 4), st.integers(0, 40), st.integers(0, 2**32))
def test_unpack_undoes_pack(rows, pairs, seed):
    codes = torch.randint(
        0, 16, (rows, 2 * pairs), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8
    )
    packed = mx.pack_nibbles(codes)
    assert packed.shape == (rows, pairs)
    assert torch.equal(mx.unpack_nibbles(packed), codes)


def test_low_nibble_is_the_even_column():
    assert mx.unpack_nibbles(torch.tensor([0xA3], dtype=torch.uint8)).tolist() == [0x3, 0xA]


def test_an_odd_number_of_nibbles_is_refused():
    with pytest.raises(CheckpointError, match="even"):
        mx.pack_nibbles(torch.zeros(3, dtype=torch.uint8))


def test_e4m3_decodes_all_256_codes_as_the_standard_says():
    decoded = mx.decode_e4m3(torch.arange(256, dtype=torch.uint8)).tolist()
    for code, value in enumerate(decoded):
        expected = slow_e4m3(code)
        assert math.isnan(value) if math.isnan(expected) else value == expected
        assert math.copysign(1, value) == math.copysign(1, expected) or math.isnan(value)


@given(st.lists(finite | st.floats(-500, 500, width=32), min_size=1))
def test_e4m3_rounds_to_the_nearest_even_code_and_saturates(xs):
    codes = mx.encode_e4m3(torch.tensor(xs)).tolist()
    for x, code in zip(xs, codes, strict=True):
        clamped = min(abs(x), 448.0)
        best = min(range(0x7F), key=lambda c: (abs(slow_e4m3(c) - clamped), c % 2))
        assert code == best | (0x80 if math.copysign(1, x) < 0 else 0)


def test_e4m3_agrees_with_the_torch_cast_on_every_bfloat16_in_range():
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    every = every[every.abs() <= 448]
    assert torch.equal(mx.encode_e4m3(every), every.to(torch.float8_e4m3fn).view(torch.uint8))


def test_e4m3_keeps_nan():
    assert torch.isnan(mx.decode_e4m3(mx.encode_e4m3(torch.tensor([float("nan")])))).all()


@given(st.floats(min_value=0, allow_infinity=False, allow_nan=False, width=32), st.sampled_from([0, 2, 8]))
def test_e8m0_is_the_floor_of_the_exponent(amax, emax):
    expected = 0 if amax == 0 else max(0, math.frexp(amax)[1] - 1 - emax + 127)
    assert mx.encode_e8m0(torch.tensor([amax]), emax).item() == expected


@settings(max_examples=50)
@given(st.integers(1, 3), st.integers(1, 4), st.integers(0, 252), st.integers(0, 2**32))
def test_values_that_are_mxfp4_survive_requantisation_exactly(rows, groups, exponent, seed):
    g = torch.Generator().manual_seed(seed)
    packed = torch.randint(0, 256, (rows, groups * 16), generator=g, dtype=torch.uint8)
    scale = torch.randint(max(0, exponent - 2), exponent + 1, (rows, groups), generator=g, dtype=torch.uint8)
    values = mx.dequantize_mxfp4(packed, scale)
    again = mx.dequantize_mxfp4(*mx.quantize_mxfp4(values))
    assert torch.equal(bits(again), bits(values))


@settings(max_examples=50)
@given(st.integers(1, 3), st.integers(1, 4), st.floats(-30, 30), st.integers(0, 2**32))
def test_quantisation_error_is_at_most_the_grid_spacing(rows, groups, log_size, seed):
    w = torch.randn(rows, groups * 32, generator=torch.Generator().manual_seed(seed)) * 2.0**log_size
    amax = w.unflatten(-1, (groups, 32)).abs().amax(-1, keepdim=True)
    for quantize, dequantize, relative in (
        (mx.quantize_mxfp4, mx.dequantize_mxfp4, 2 / 8),  # 7.99 saturates to 6
        (mx.quantize_mxfp8, mx.dequantize_mxfp8, 64 / 512),  # 511 saturates to 448
    ):
        elements, scale = quantize(w)
        error = (dequantize(elements, scale) - w).unflatten(-1, (groups, 32)).abs()
        assert (error <= amax * relative).all()


def test_leading_dimensions_are_kept_and_slices_equal_the_whole():
    w = torch.randn(3, 5, 96, generator=torch.Generator().manual_seed(0))
    for quantize, dequantize in (
        (mx.quantize_mxfp4, mx.dequantize_mxfp4),
        (mx.quantize_mxfp8, mx.dequantize_mxfp8),
    ):
        elements, scale = quantize(w)
        assert scale.shape == (3, 5, 3)
        whole = dequantize(elements, scale)
        assert whole.shape == w.shape
        for i in range(3):
            assert torch.equal(dequantize(*quantize(w[i])), whole[i])


def test_zero_groups_give_zero_scale_and_zero_values():
    packed, scale = mx.quantize_mxfp4(torch.zeros(2, 64))
    assert scale.tolist() == [[0, 0], [0, 0]]
    assert not mx.dequantize_mxfp4(packed, scale).any()


@pytest.mark.parametrize(("width", "legal"), [(48, "32 or 64"), (31, "32"), (97, "96 or 128"), (0, "32")])
def test_a_width_that_is_not_whole_groups_is_refused_with_the_legal_sizes(width, legal):
    """G34."""
    for quantize in (mx.quantize_mxfp4, mx.quantize_mxfp8):
        with pytest.raises(CheckpointError, match=f"multiple of 32; the nearest legal size is {legal}"):
            quantize(torch.zeros(2, width))


def test_an_odd_number_of_groups_works():
    """G34: 96 columns are three groups."""
    w = torch.linspace(-6, 6, 192).reshape(2, 96)
    packed, scale = mx.quantize_mxfp4(w)
    assert packed.shape == (2, 48)
    assert scale.shape == (2, 3)


def test_scales_of_the_wrong_shape_or_dtype_are_refused():
    packed = torch.zeros(4, 32, dtype=torch.uint8)
    with pytest.raises(CheckpointError, match=r"need scales of shape \[4, 2\]"):
        mx.dequantize_mxfp4(packed, torch.zeros(4, 3, dtype=torch.uint8))
    with pytest.raises(CheckpointError, match="expected uint8"):
        mx.dequantize_mxfp4(packed, torch.zeros(4, 2))
    with pytest.raises(CheckpointError, match="expected uint8"):
        mx.dequantize_mxfp4(packed.to(torch.bfloat16), torch.zeros(4, 2, dtype=torch.uint8))
    with pytest.raises(CheckpointError, match=r"not exact in torch\.float16"):
        mx.dequantize_mxfp4(packed, torch.zeros(4, 2, dtype=torch.uint8), torch.float16)


def test_non_finite_and_integer_weights_are_refused():
    for bad in (float("nan"), float("inf")):
        with pytest.raises(CheckpointError, match="NaN or infinity"):
            mx.quantize_mxfp4(torch.full((1, 32), bad))
    with pytest.raises(CheckpointError, match="floating-point"):
        mx.quantize_mxfp4(torch.zeros(1, 32, dtype=torch.int8))
