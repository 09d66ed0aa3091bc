"""Native twins of mla_prologue (always absorbed) and mla_epilogue."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from longspan.ops.batch import MlaView, QuantizedKeys
from longspan.ops.mla_prologue import IndexerWeights, MlaQueries, MlaWeights, QueryLora
from longspan.ops.native.extension import extension
from longspan.ops.native.handles import contiguous, kept, pages

NO_PAGES = (0, 0, 0)
PACKED_COLUMNS = 64


def mla_prologue(x: Tensor, weights: MlaWeights, view: MlaView, slot_mapping: Tensor) -> MlaQueries:
    x = contiguous(x)
    tokens, heads, indexer = x.shape[0], weights.num_query_heads, weights.indexer
    query = torch.empty((tokens, heads, weights.kv_a.shape[0]), dtype=x.dtype)
    index_query = index_weight = None
    if indexer is not None:
        if view.index_key is None:
            raise ValueError("a layer with a sparse indexer needs a view with index keys")
        index_heads, index_dim = indexer.head_weight.shape[0], indexer.key.shape[0]
        index_query = torch.empty((tokens, index_heads, index_dim), dtype=x.dtype)
        index_weight = torch.empty((tokens, index_heads))
    extension().mla_prologue(
        mla_handle(weights),
        kept(view, _build_pages),
        tokens,
        x.data_ptr(),
        slot_mapping.data_ptr(),
        query.data_ptr(),
        index_query.data_ptr() if index_query is not None else 0,
        index_weight.data_ptr() if index_weight is not None else 0,
    )
    return MlaQueries(query, index_query, index_weight)


def mla_epilogue(latent_out: Tensor, x: Tensor, weights: MlaWeights) -> Tensor:
    latent_out, x = contiguous(latent_out.float()), contiguous(x)
    out = torch.empty((x.shape[0], weights.output.shape[0]), dtype=x.dtype)
    extension().mla_epilogue(
        mla_handle(weights), x.shape[0], latent_out.data_ptr(), x.data_ptr(), out.data_ptr()
    )
    return out


def mla_handle(weights: MlaWeights) -> Any:
    return kept(weights, _build_mla)


def _build_mla(weights: MlaWeights) -> Any:
    lora = weights.query if isinstance(weights.query, QueryLora) else None
    return extension().Mla(
        query_a=lora.a if lora else None,
        query_norm=lora.norm if lora else None,
        query=lora.b if lora else weights.query,
        kv_a=weights.kv_a,
        kv_a_norm=weights.kv_a_norm,
        nope=weights.up_key.shape[1],
        up_key=_packed(weights.up_key),
        up_value=weights.up_value,
        norm_eps=weights.latent_norm_eps,
        indexer=_build_indexer(weights.indexer) if weights.indexer else None,
        gate=weights.gate,
        output=weights.output,
    )


def _packed(up_key: Tensor) -> Tensor:
    """[heads, nope, rank] -> the copy that native/mla.cpp describes, [heads, groups, elements of a group]."""
    step = 2 if up_key.dtype == torch.bfloat16 else 1
    _, nope, rank = up_key.shape
    padded = torch.nn.functional.pad(up_key, (0, -rank % PACKED_COLUMNS, 0, -nope % step))
    groups = padded.unflatten(2, (-1, PACKED_COLUMNS)).unflatten(1, (-1, step))
    return groups.permute(0, 3, 1, 4, 2).flatten(2).contiguous()


def _build_indexer(weights: IndexerWeights) -> Any:
    return extension().Indexer(
        weights.query,
        weights.key,
        weights.head_weight,
        weights.key_norm_weight.float(),
        weights.key_norm_bias.float(),
        weights.key_norm_eps,
    )


def _build_pages(view: MlaView) -> Any:
    *latent, page_size = pages(view.latent)
    keys = codes = scales = NO_PAGES
    quad_stride = 0
    if isinstance(view.index_key, QuantizedKeys):
        tensor, scale = view.index_key.codes, view.index_key.scale
        assert tensor.stride(3) == 1, "the codes of a quad must be contiguous"
        codes = tensor.data_ptr(), tensor.stride(0), tensor.stride(2)
        quad_stride = tensor.stride(1)
        scales = scale.data_ptr(), scale.stride(0), scale.stride(1)
    elif view.index_key is not None:
        keys = pages(view.index_key)[:3]
    return extension().MlaPages(page_size, latent, keys, codes, scales, quad_stride)
