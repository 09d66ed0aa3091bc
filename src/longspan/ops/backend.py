"""The table of operators. The torch column always exists and is the truth; other columns must agree with it.

The contract of each field (maths, layout, edge cases) heads the file that defines its reference.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from longspan.errors import ConfigError
from longspan.ops.attention_residual import attention_residual
from longspan.ops.ffn import ffn
from longspan.ops.indexer import index_candidates, index_select, merge_candidates
from longspan.ops.kda import kda
from longspan.ops.linear import embed, lm_head
from longspan.ops.mla_prologue import MlaQueries, mla_epilogue, mla_prologue
from longspan.ops.moe import mix_experts, moe_output, route_experts, routed_experts
from longspan.ops.native.extension import choose
from longspan.ops.partials import merge_partial
from longspan.ops.sampling import apply_penalties, sample
from longspan.ops.sparse_attention import sparse_attention

logger = logging.getLogger(__name__)

BACKEND_VARIABLE = "LONGSPAN_BACKEND"


@dataclass(frozen=True)
class Operators:
    """One callable per operator, chosen once at start-up."""

    name: str
    use_threads: Callable[[int | None, Sequence[int]], None]
    embed: Callable[..., Tensor]
    attention_residual: Callable[..., tuple[Tensor, Tensor]]
    kda: Callable[..., Tensor]
    mla_prologue: Callable[..., MlaQueries]
    index_select: Callable[..., Tensor]
    index_candidates: Callable[..., Tensor]
    merge_candidates: Callable[..., Tensor]
    sparse_attention: Callable[..., tuple[Tensor, Tensor]]
    merge_partial: Callable[..., None]
    mla_epilogue: Callable[..., Tensor]
    ffn: Callable[..., Tensor]
    routed_experts: Callable[..., Tensor]
    route_experts: Callable[..., tuple[Tensor, Tensor, Tensor]]
    mix_experts: Callable[..., Tensor]
    moe_output: Callable[..., Tensor]
    lm_head: Callable[..., Tensor]
    apply_penalties: Callable[..., Tensor]
    sample: Callable[..., Tensor]


def _use_torch_threads(threads: int | None, cpus: Sequence[int]) -> None:
    """torch knows no affinity of its threads: of `cpus` only the number counts."""
    if threads or cpus:
        torch.set_num_threads(threads or len(cpus))


TORCH = Operators(
    name="torch",
    use_threads=_use_torch_threads,
    embed=embed,
    attention_residual=attention_residual,
    kda=kda,
    mla_prologue=mla_prologue,
    index_select=index_select,
    index_candidates=index_candidates,
    merge_candidates=merge_candidates,
    sparse_attention=sparse_attention,
    merge_partial=merge_partial,
    mla_epilogue=mla_epilogue,
    ffn=ffn,
    routed_experts=routed_experts,
    route_experts=route_experts,
    mix_experts=mix_experts,
    moe_output=moe_output,
    lm_head=lm_head,
    apply_penalties=apply_penalties,
    sample=sample,
)


@cache
def backends() -> dict[str, Operators]:
    """The tables there are, the best last. Says so, once, where only the reference can compute."""
    chosen = choose()
    if chosen.module is None:
        logger.warning("No native operators (%s): computing with torch, which is slow.", chosen.reason)
        return {"torch": TORCH}
    from longspan.ops.native.table import NATIVE

    return {"torch": TORCH, "native": NATIVE}


def select_backend(name: str | None = None) -> Operators:
    """The table `name`, else the one the environment names, else the best. ConfigError if unknown."""
    source = "backend"
    if name is None:
        name, source = os.environ.get(BACKEND_VARIABLE) or None, BACKEND_VARIABLE
    if name == "torch":
        return TORCH
    known = backends()
    if name is None:
        return list(known.values())[-1]
    if name not in known:
        raise ConfigError(
            f"{source} is {name!r}.", remedy=f"Legal backends here: {', '.join(map(repr, known))}."
        )
    return known[name]
