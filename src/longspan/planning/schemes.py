"""How weights are held: bits of a routed expert's weight, scales included, and of every other matrix."""

from __future__ import annotations

from dataclasses import dataclass

from longspan.config import ModelConfig
from longspan.formats.inventory import MX_GROUP


@dataclass(frozen=True)
class Scheme:
    """`matrix_bits` of attention, dense, shared and latent matrices; the rest is bfloat16."""

    name: str
    expert_bits: float
    matrix_bits: int
    note: str


_MX_BITS = 4 + 8 / MX_GROUP

SCHEMES = {
    scheme.name: scheme
    for scheme in (
        Scheme(
            "mxfp4",
            _MX_BITS,
            16,
            "as published: MXFP4 experts with a scale byte for 32 weights, the rest bfloat16",
        ),
        Scheme("bf16", 16, 16, "experts unpacked, everything bfloat16"),
        Scheme(
            "w4a8",
            _MX_BITS,
            16,
            "4-bit experts, scales of a quarter bit a weight; the rest bfloat16 (an upper bound: published "
            "W4A8 weights may hold part of it in 8 bits)",
        ),
        Scheme(
            "w8a8",
            8 + 8 / MX_GROUP,
            8,
            "8-bit experts and matrices, a scale byte for 32 weights of an expert",
        ),
    )
}


def published_scheme(config: ModelConfig) -> Scheme:
    """How the model's own files hold its weights."""
    return SCHEMES["mxfp4" if config.experts_packed else "bf16"]
