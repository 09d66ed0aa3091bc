"""The native column of the table of operators."""

from __future__ import annotations

from dataclasses import replace

from longspan.ops.backend import TORCH, Operators
from longspan.ops.native import dense
from longspan.ops.native.threads import use_threads

NATIVE: Operators = replace(
    TORCH,
    name="native",
    use_threads=use_threads,
    attention_residual=dense.attention_residual,
    ffn=dense.ffn,
    lm_head=dense.lm_head,
)
