"""Native twins of index_select, index_candidates and merge_candidates.

Candidates carry the score without its factor 1 / sqrt(Di), as the kernels compute it: it changes no order,
and all ranks leave it out.
"""

from __future__ import annotations

import torch
from torch import Tensor

from longspan.ops.batch import MlaView, StepBatch
from longspan.ops.indexer import candidate_width
from longspan.ops.native.extension import extension
from longspan.ops.native.handles import contiguous, native_batch, native_dtype, native_shard, pages
from longspan.ops.shard import WHOLE, Shard


def index_select(query: Tensor, weight: Tensor, view: MlaView, batch: StepBatch, top_k: int) -> Tensor:
    if batch.shard != WHOLE:
        raise ValueError("index_select needs all keys; with a shard of them take index_candidates")
    return _index(query, weight, view, batch, top_k, packed=False, width=top_k)


def index_candidates(query: Tensor, weight: Tensor, view: MlaView, batch: StepBatch, top_k: int) -> Tensor:
    width = candidate_width(batch, top_k)
    return _index(query, weight, view, batch, top_k, packed=True, width=width)


def merge_candidates(candidates: Tensor, shard: Shard, top_k: int) -> Tensor:
    candidates = contiguous(candidates)
    _, rows, width = candidates.shape
    out = torch.empty_like(candidates[0])
    extension().merge_candidates(
        rows, width, native_shard(shard), top_k, candidates.data_ptr(), out.data_ptr()
    )
    return out


def _index(
    query: Tensor, weight: Tensor, view: MlaView, batch: StepBatch, top_k: int, packed: bool, width: int
) -> Tensor:
    """The choices of all rows, [T, width]."""
    keys = view.index_key
    if keys is None:
        raise ValueError("the indexer needs a view with index keys")
    query, weight = contiguous(query), contiguous(weight)
    rows, heads, dim = query.shape
    out = batch.query_starts.new_empty(rows, width)
    native = extension()
    asked = (native_dtype(query.dtype), native_batch(batch), heads, dim, top_k)
    data = (query.data_ptr(), weight.data_ptr())
    wanted = (packed, width, out.data_ptr())
    if isinstance(keys, Tensor):
        if keys.dtype != query.dtype:
            raise ValueError(f"index keys are {keys.dtype}, queries {query.dtype}: they must be the same")
        native.index_rows(*asked, *data, *pages(keys), *wanted)
        return out
    codes, scale = keys.codes, keys.scale
    assert codes.stride(3) == 1, "the four dimensions of a quad must be contiguous"
    scales = (scale.data_ptr(), *scale.stride(), scale.shape[1])
    native.index_codes(*asked, *data, codes.data_ptr(), *codes.stride()[:3], *scales, *wanted)
    return out
