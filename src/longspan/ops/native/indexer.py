"""Native twin of index_select."""

from __future__ import annotations

from torch import Tensor

from longspan.ops.batch import MlaView, StepBatch
from longspan.ops.native.extension import extension
from longspan.ops.native.handles import contiguous, native_batch, native_dtype, pages


def index_select(query: Tensor, weight: Tensor, view: MlaView, batch: StepBatch, top_k: int) -> Tensor:
    keys = view.index_key
    if keys is None:
        raise ValueError("index_select needs a view with index keys")
    query, weight = contiguous(query), contiguous(weight)
    rows, heads, dim = query.shape
    out = batch.query_starts.new_empty(rows, top_k)
    native = extension()
    asked = (native_dtype(query.dtype), native_batch(batch), heads, dim, top_k)
    data = (query.data_ptr(), weight.data_ptr())
    if isinstance(keys, Tensor):
        if keys.dtype != query.dtype:
            raise ValueError(f"index keys are {keys.dtype}, queries {query.dtype}: they must be the same")
        native.index_select(*asked, *data, *pages(keys), out.data_ptr())
        return out
    codes, scale = keys.codes, keys.scale
    assert codes.stride(3) == 1, "the four dimensions of a quad must be contiguous"
    scales = (scale.data_ptr(), *scale.stride(), scale.shape[1])
    native.index_select_codes(*asked, *data, codes.data_ptr(), *codes.stride()[:3], *scales, out.data_ptr())
    return out
