"""The native column of the table of operators."""

from __future__ import annotations

from longspan.ops.backend import Operators
from longspan.ops.linear import embed
from longspan.ops.native.dense import attention_residual, ffn, lm_head
from longspan.ops.native.indexer import index_candidates, index_select, merge_candidates
from longspan.ops.native.kda import kda
from longspan.ops.native.mla import mla_epilogue, mla_prologue
from longspan.ops.native.moe import mix_experts, moe_output, route_experts, routed_experts
from longspan.ops.native.partials import merge_partial
from longspan.ops.native.sampling import apply_penalties, sample
from longspan.ops.native.sparse_attention import sparse_attention
from longspan.ops.native.threads import use_threads

NATIVE = Operators(
    name="native",
    use_threads=use_threads,
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
