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

Where a sequence's keys are dealt to several ranks (`Shard`) each rank lists its best as candidates, and the
best of all ranks' candidates are what `index_select` chooses from the whole. A candidate is one int64 that
sorts as the tie rule says, whoever compares:

    order(score) << 32 | (2^32 - 1 - position)        order: the bits of a float, those of negatives flipped

All ranks use one backend, which may leave out the factor 1 / sqrt(Di). What follows BROKEN means nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from longspan.ops.batch import MlaView, QuantizedKeys, StepBatch
from longspan.ops.index_keys import quantize_rows, read_quantized
from longspan.ops.pages import read_span
from longspan.ops.shard import WHOLE, Shard
from longspan.ops.top_k import top_k_indices

INDEX_QUERY_BLOCK = 64
INDEX_KEY_BLOCK = 4096
NO_TOKEN = -1
NON_FINITE = -2
LAST_POSITION = 2**32 - 1
NO_CANDIDATE = -(2**63)
BROKEN = 2**63 - 1  # the first candidate of a row with a non-finite score


def index_select(query: Tensor, weight: Tensor, view: MlaView, batch: StepBatch, top_k: int) -> Tensor:
    """query [T, Hi, Di], weight [T, Hi] float32 -> [T, top_k] int64 positions in each row's own sequence."""
    if batch.shard != WHOLE:
        raise ValueError("index_select needs all keys; with a shard of them take index_candidates")
    everything = torch.arange(top_k)
    selected = torch.where(everything <= batch.row_positions[:, None], everything, NO_TOKEN)
    for rows, keys, block_table in _scored_blocks(view, batch, top_k):
        _, chosen, broken = _best(
            query[rows], weight[rows], keys, block_table, batch.row_visible[rows], top_k
        )
        chosen[broken] = NO_TOKEN
        chosen[broken, 0] = NON_FINITE
        selected[rows] = chosen
    return selected


def index_candidates(query: Tensor, weight: Tensor, view: MlaView, batch: StepBatch, top_k: int) -> Tensor:
    """As `index_select`, from the keys that are here -> candidates [T, w] int64, the best first.

    A row that sees no more than top_k tokens, on all ranks together, lists all that are here with score 0.
    """
    shard, width = batch.shard, candidate_width(batch, top_k)
    local = torch.arange(width)
    scores = torch.where(local < batch.row_visible[:, None], 0.0, -torch.inf)
    candidates = _pack(scores, shard.position(local).expand(scores.shape))
    for rows, keys, block_table in _scored_blocks(view, batch, top_k):
        scores, chosen, broken = _best(
            query[rows], weight[rows], keys, block_table, batch.row_visible[rows], width
        )
        candidates[rows] = _pack(scores, shard.position(chosen))
        candidates[rows.start : rows.stop][broken, 0] = BROKEN
    return candidates.sort(-1, descending=True).values


def candidate_width(batch: StepBatch, top_k: int) -> int:
    """w = min(top_k, the most tokens a rank can hold of one sequence), the same on all ranks."""
    shard = batch.shard
    return min(top_k, Shard(0, shard.size, shard.interleave).count(batch.max_visible))


def _pack(scores: Tensor, positions: Tensor) -> Tensor:
    """scores [..] float32, -inf where there is no candidate, and positions [..] -> candidates [..]."""
    bits = (scores + 0.0).view(torch.int32)  # -0.0 is 0.0
    order = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    return torch.where(scores > -torch.inf, (order << 32) | (LAST_POSITION - positions), NO_CANDIDATE)


def merge_candidates(candidates: Tensor, shard: Shard, top_k: int) -> Tensor:
    """candidates [ranks, T, w] of all ranks -> [T, w] int64: those of the best top_k that `shard` holds.

    Local indices, ascending, padded with -1; NON_FINITE first where any rank met a non-finite score.
    """
    width = candidates.shape[2]
    together = candidates.transpose(0, 1).flatten(1)
    best = together.sort(-1, descending=True).values[:, :top_k]
    positions = LAST_POSITION - (best & LAST_POSITION)
    mine = (best > NO_CANDIDATE) & (shard.owner(positions) == shard.rank)
    nowhere = torch.iinfo(torch.int64).max
    selected = torch.where(mine, shard.local(positions), nowhere).sort(-1).values[:, :width]
    selected[selected == nowhere] = NO_TOKEN
    broken = (together == BROKEN).any(-1)
    selected[broken] = NO_TOKEN
    selected[broken, :1] = NON_FINITE
    return selected


def _scored_blocks(
    view: MlaView, batch: StepBatch, top_k: int
) -> Iterator[tuple[slice, Tensor | QuantizedKeys, Tensor]]:
    """The rows that see more than top_k tokens, a block at a time, with their keys and block table."""
    if view.index_key is None:
        raise ValueError("the indexer needs a view with index keys")
    for s, (begin, end, context) in enumerate(batch.sequences):
        for row in range(begin + max(0, top_k - context), end, INDEX_QUERY_BLOCK):
            yield slice(row, min(row + INDEX_QUERY_BLOCK, end)), view.index_key, batch.block_tables[s]


def _best(
    query: Tensor,
    weight: Tensor,
    keys: Tensor | QuantizedKeys,
    block_table: Tensor,
    visible: Tensor,
    k: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of one sequence, each seeing its first visible [Q] tokens here.

    Returns scores and tokens [Q, k] of the best, tokens ascending, score -inf where there are fewer; and the
    rows [Q] with a non-finite score.
    """
    rows, end = query.shape[0], int(visible[-1])
    best = torch.full((rows, k), -torch.inf)
    chosen = torch.full((rows, k), NO_TOKEN)
    broken = torch.zeros(rows, dtype=torch.bool)
    for begin in range(0, end, INDEX_KEY_BLOCK):
        tokens = torch.arange(begin, min(begin + INDEX_KEY_BLOCK, end))
        scores = _span_scores(query, weight, keys, block_table, begin, begin + len(tokens))
        seen = tokens < visible[:, None]
        broken |= (seen & ~scores.isfinite()).any(-1)
        # Earlier winners come first and tokens ascend: the tie rule of the merge is that of the whole.
        scores = torch.cat([best, torch.where(seen, scores, -torch.inf)], -1)
        candidates = torch.cat([chosen, tokens.expand(rows, -1)], -1)
        winners = top_k_indices(scores, k)
        best, chosen = scores.gather(1, winners), candidates.gather(1, winners)
    return best, chosen, broken


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
