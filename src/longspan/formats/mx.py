"""OCP Microscaling formats (MX v1.0): FP4 (E2M1) and FP8 (E4M3) elements under shared E8M0 scales.

Groups are 32 consecutive columns of the last axis; each value is `element * 2**(e - 127)`. Scale byte 0 means
2**-127; 255 means NaN and is refused on decode, for no weight is NaN on purpose. Decoding never rounds.
"""

from __future__ import annotations

from functools import cache
from itertools import pairwise

import torch
from torch import Tensor

from longspan.errors import CheckpointError

GROUP = 32
E8M0_BIAS = 127
E8M0_NAN = 255
E2M1_MAX_EXPONENT = 2  # 6 = 1.5 * 2**2
E4M3_MAX_EXPONENT = 8  # 448 = 1.75 * 2**8
E4M3_MAX = 448.0

E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_E2M1 = torch.tensor([*E2M1_MAGNITUDES, *(-m for m in E2M1_MAGNITUDES)], dtype=torch.float64)
# Row b holds the two values of byte b: the low nibble is the even column.
_E2M1_PAIRS = torch.stack([_E2M1.repeat(16), _E2M1.repeat_interleave(16)], dim=-1)
_E8M0 = torch.tensor([2.0 ** (e - E8M0_BIAS) for e in range(E8M0_NAN)] + [float("nan")], dtype=torch.float64)
# Exact dtypes, and a dtype twice as wide: one gather of a wide word fetches both values of a byte.
_WORDS = {torch.bfloat16: torch.int32, torch.float32: torch.int64, torch.float64: torch.complex128}
_EXACT_DTYPES = tuple(_WORDS)


@cache
def _pair_words(dtype: torch.dtype, device: torch.device) -> Tensor:
    """[256] words, each the two values of one byte in `dtype`."""
    return _E2M1_PAIRS.to(device, dtype).view(_WORDS[dtype]).view(256)


@cache
def _scale_values(dtype: torch.dtype, device: torch.device) -> Tensor:
    """[256] the multiplier of each E8M0 byte in `dtype`; the last is NaN."""
    return _E8M0.to(device, dtype)


def _midpoints() -> Tensor:
    """[7] float32 such that `bucketize` rounds to the nearest code and ties to the even code."""
    middles = [(a + b) / 2 for a, b in pairwise(E2M1_MAGNITUDES)]
    bounds = torch.tensor(middles, dtype=torch.float32)
    # A value on a boundary falls below it; where the upper code is the even one, the boundary drops one ulp.
    bounds[1::2] = torch.nextafter(bounds[1::2], torch.tensor(0.0))
    return bounds


_E2M1_BOUNDS = _midpoints()


def encode_e2m1(x: Tensor) -> Tensor:
    """[...] float -> [...] uint8 codes 0..15 (bit 3 the sign), nearest, ties to even, saturating at 6.

    Computed in float32. NaN has no code and raises CheckpointError; infinity saturates.
    """
    x = x.float()
    if torch.isnan(x).any():
        raise CheckpointError("NaN cannot be written as FP4 (E2M1).", remedy="Repair the source tensor.")
    magnitude = torch.bucketize(x.abs(), _E2M1_BOUNDS.to(x.device), out_int32=True).to(torch.uint8)
    return magnitude | (torch.signbit(x).to(torch.uint8) << 3)


def decode_e2m1(codes: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """[...] uint8 codes 0..15 -> [...] values; code 8 is -0."""
    return _E2M1.to(codes.device, dtype)[codes.int()]


def pack_nibbles(codes: Tensor) -> Tensor:
    """[..., n] uint8 codes 0..15, n even -> [..., n/2] uint8; the even column goes to the low nibble."""
    if codes.shape[-1] % 2:
        raise CheckpointError(
            f"{codes.shape[-1]} columns of 4 bits do not fill whole bytes.", remedy="Use an even number."
        )
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_nibbles(packed: Tensor) -> Tensor:
    """[..., n/2] uint8 -> [..., n] uint8 codes 0..15."""
    return torch.stack([packed & 0xF, packed >> 4], dim=-1).flatten(-2)


def encode_e4m3(x: Tensor) -> Tensor:
    """[...] float -> [...] uint8 E4M3 "fn" bytes, nearest even, saturating at 448; NaN stays NaN."""
    return x.float().clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)


def decode_e4m3(codes: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """[...] uint8 E4M3 "fn" bytes -> [...] values; 0x7f and 0xff are NaN, there is no infinity."""
    return codes.contiguous().view(torch.float8_e4m3fn).to(dtype)


def encode_e8m0(amax: Tensor, element_max_exponent: int = 0) -> Tensor:
    """[...] magnitudes >= 0 -> [...] uint8: the byte of 2**(floor(log2 amax) - element_max_exponent).

    The scale rule of MX v1.0 §6.3. Exponents outside 0..254 are clamped; amax 0 gives byte 0.
    """
    amax = amax.float()
    if not torch.isfinite(amax).all():
        raise CheckpointError(
            "A group holds NaN or infinity, for which no E8M0 scale exists.",
            remedy="Repair the source tensor.",
        )
    exponent = torch.frexp(amax).exponent - 1 - element_max_exponent + E8M0_BIAS
    exponent = torch.where(amax == 0, torch.zeros_like(exponent), exponent)
    return exponent.clamp(0, E8M0_NAN - 1).to(torch.uint8)


def decode_e8m0(scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """[...] uint8 -> [...] 2**(e - 127), exact. CheckpointError if a byte is 255 (NaN)."""
    if scale.numel() and int(scale.max()) == E8M0_NAN:
        bad = torch.nonzero(scale == E8M0_NAN)
        raise CheckpointError(
            f"{len(bad)} of {scale.numel()} MX scale bytes are 255 (NaN), the first at {bad[0].tolist()}; "
            "0..254 are legal.",
            remedy="The file is corrupt: download it again.",
        )
    return _scale_values(dtype, scale.device).index_select(0, scale.flatten().int()).view(scale.shape)


def quantize_mxfp4(w: Tensor) -> tuple[Tensor, Tensor]:
    """[..., n] float, n a multiple of 32 -> packed [..., n/2] uint8, scale [..., n/32] uint8."""
    groups, scale = _scaled_groups(w, E2M1_MAX_EXPONENT)
    return pack_nibbles(encode_e2m1(groups).flatten(-2)), scale


def dequantize_mxfp4(packed: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """packed [..., n/2] uint8, scale [..., n/32] uint8 -> [..., n], exact in bfloat16, float32 and float64.

    Raises CheckpointError on shapes or dtypes that do not fit, scale 255, values out of the range of `dtype`.
    """
    _check_pair(packed, scale, packed_columns=GROUP // 2, dtype=dtype)
    words = _pair_words(dtype, packed.device).index_select(0, packed.flatten().int())
    return _apply_scale(words.view(dtype).view(*packed.shape[:-1], 2 * packed.shape[-1]), scale, dtype)


def quantize_mxfp8(w: Tensor) -> tuple[Tensor, Tensor]:
    """[..., n] float, n a multiple of 32 -> E4M3 codes [..., n] uint8, scale [..., n/32] uint8."""
    groups, scale = _scaled_groups(w, E4M3_MAX_EXPONENT)
    return encode_e4m3(groups).flatten(-2), scale


def dequantize_mxfp8(codes: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """codes [..., n] uint8 (E4M3), scale [..., n/32] uint8 -> [..., n]. Raises as `dequantize_mxfp4`.

    Exact in float32 and float64, and in bfloat16 for scale bytes from 3.
    """
    _check_pair(codes, scale, packed_columns=GROUP, dtype=dtype)
    return _apply_scale(decode_e4m3(codes, dtype), scale, dtype)


def _scaled_groups(w: Tensor, element_max_exponent: int) -> tuple[Tensor, Tensor]:
    """[..., n] -> ([..., n/32, 32] float32 divided by its scale, [..., n/32] uint8 scale)."""
    n = w.shape[-1] if w.ndim else 0
    if n == 0 or n % GROUP:
        below, above = n // GROUP * GROUP, (n // GROUP + 1) * GROUP
        legal = f"{below} or {above}" if below else str(above)
        raise CheckpointError(
            f"A row of {n} values cannot be cut into MX groups of {GROUP}.",
            remedy=f"The last dimension must be a multiple of {GROUP}; the nearest legal size is {legal}.",
        )
    if not w.is_floating_point():
        raise CheckpointError(f"Cannot quantize a tensor of {w.dtype}; a floating-point dtype is needed.")
    groups = w.float().unflatten(-1, (n // GROUP, GROUP))
    scale = encode_e8m0(groups.abs().amax(-1), element_max_exponent)
    # Multiplying by the reciprocal is exact: encode_e8m0 gives at most 252, so 2**(127 - e) never underflows.
    return groups * decode_e8m0(2 * E8M0_BIAS - scale).unsqueeze(-1), scale


def _check_pair(packed: Tensor, scale: Tensor, packed_columns: int, dtype: torch.dtype) -> None:
    if packed.dtype != torch.uint8 or scale.dtype != torch.uint8:
        raise CheckpointError(
            f"MX elements and scales are {packed.dtype} and {scale.dtype}; expected uint8 for both."
        )
    if dtype not in _EXACT_DTYPES:
        legal = ", ".join(map(str, _EXACT_DTYPES))
        raise CheckpointError(f"MX values are not exact in {dtype}; use one of {legal}.")
    expected = (*packed.shape[:-1], packed.shape[-1] // packed_columns)
    if packed.shape[-1] % packed_columns or tuple(scale.shape) != expected:
        raise CheckpointError(
            f"MX elements of shape {list(packed.shape)} need scales of shape {list(expected)} "
            f"(one per {GROUP} values, {packed_columns} bytes); found {list(scale.shape)}."
        )


def _apply_scale(values: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    factor = decode_e8m0(scale, dtype).unsqueeze(-1)
    out = (values.unflatten(-1, (scale.shape[-1], GROUP)) * factor).flatten(-2)
    # Only a scale above 2**119 can carry an element (at most 448) out of range, and only in a corrupt file.
    if scale.numel() and scale.max() > E8M0_BIAS + 119 and torch.isinf(out).any():
        raise CheckpointError(
            f"MX scales up to 2**{int(scale.max()) - E8M0_BIAS} carry values beyond the range of {dtype}.",
            remedy="The file is corrupt: download it again.",
        )
    return out
