"""The lightning indexer: which cached tokens each query may attend to.

    score[t, s] = sum_h w[t, h] * relu( qI[t, h] . kI[s] / sqrt(Di) )        float32, s <= position of t

Int8 keys (`index_keys`) meet queries quantised the same way, per row and head; the sum of the products of
whole numbers is exact, as it is in int32:

    score[t, s] = scale_s * sum_h (w[t, h] * scale_th) * relu( qI[t, h] . kI[s] / sqrt(Di) )

The causal bound is computed here from each row's position; there is no mask tensor. Row t takes the min(k,
visible) largest scores, ties to the lower position, and lists the positions ascending, padded with -1. A
row that sees no more than k tokens takes them all and is not scored.

Keys are scored INDEX_KEY_BLOCK at a time and merged into the best k so far, INDEX_QUERY_BLOCK queries at a
time: the workspace does not grow with the context. A row with a non-finite score gets no choice at all: its
first entry is NON_FINITE, which sparse attention turns into NaN for that row alone, so that the fault is
seen and not sampled from.
"""

from __future__ import annotations

import torch
from torch import Tensor

from longspan.ops.batch import MlaView, QuantizedKeys, StepBatch
from longspan.ops.index_keys import quantize_rows, read_quantized
from longspan.ops.pages import read_span
from longspan.ops.top_k import top_k_indices

INDEX_QUERY_BLOCK = 64
INDEX_KEY_BLOCK = 4096
NO_TOKEN = -1
NON_FINITE = -2


def index_select(query: Tensor, weight: Tensor, view: MlaView, batch: StepBatch, top_k: int) -> Tensor:
    """query [T, Hi, Di], weight [T, Hi] float32 -> [T, top_k] int64 positions in each row's own sequence."""
    if view.index_key is None:
        raise ValueError("index_select needs a view with index keys")
    everything = torch.arange(top_k)
    selected = torch.where(everything <= batch.row_positions[:, None], everything, NO_TOKEN)
    for s, (begin, end, context) in enumerate(batch.sequences):
        first = begin + max(0, top_k - context)  # the first row that sees more than top_k tokens
        for row in range(first, end, INDEX_QUERY_BLOCK):
            rows = slice(row, min(row + INDEX_QUERY_BLOCK, end))
            visible = torch.arange(rows.start, rows.stop) - begin + context + 1
            selected[rows] = _select_block(
                query[rows], weight[rows], view.index_key, batch.block_tables[s], visible, top_k
            )
    return selected


def _select_block(
    query: Tensor,
    weight: Tensor,
    keys: Tensor | QuantizedKeys,
    block_table: Tensor,
    visible: Tensor,
    top_k: int,
) -> Tensor:
    """Rows of one sequence, each seeing visible [Q] > top_k tokens -> [Q, top_k]."""
    rows, end = query.shape[0], int(visible[-1])
    best = torch.full((rows, top_k), -torch.inf)
    chosen = torch.full((rows, top_k), NO_TOKEN)
    broken = torch.zeros(rows, dtype=torch.bool)
    for begin in range(0, end, INDEX_KEY_BLOCK):
        positions = torch.arange(begin, min(begin + INDEX_KEY_BLOCK, end))
        scores = _span_scores(query, weight, keys, block_table, begin, begin + len(positions))
        seen = positions < visible[:, None]
        broken |= (seen & ~scores.isfinite()).any(-1)
        # Earlier winners come first and positions ascend: the tie rule of the merge is that of the whole.
        scores = torch.cat([best, torch.where(seen, scores, -torch.inf)], -1)
        candidates = torch.cat([chosen, positions.expand(rows, -1)], -1)
        winners = top_k_indices(scores, top_k)
        best, chosen = scores.gather(1, winners), candidates.gather(1, winners)
    chosen[broken] = NO_TOKEN
    chosen[broken, 0] = NON_FINITE
    return chosen


def _span_scores(
    query: Tensor,
    weight: Tensor,
    keys: Tensor | QuantizedKeys,
    block_table: Tensor,
    begin: int,
    end: int,
) -> Tensor:
    """Scores [Q, end - begin] of the tokens begin:end of one sequence."""
    if isinstance(keys, Tensor):
        return index_scores(query, weight, read_span(keys, block_table, begin, end))
    q, scale = read_quantized(keys, block_table, begin, end, query.shape[2])
    whole, query_scale = quantize_rows(query)
    return scale * index_scores(whole, weight * query_scale, q)


def index_scores(query: Tensor, weight: Tensor, keys: Tensor) -> Tensor:
    """query [Q, Hi, Di], weight [Q, Hi], keys [S, Di] -> [Q, S] float32, without any causal bound."""
    dots = torch.relu((query.float().flatten(0, 1) @ keys.float().T) * query.shape[-1] ** -0.5)
    return (weight[:, None] @ dots.unflatten(0, query.shape[:2]))[:, 0]
