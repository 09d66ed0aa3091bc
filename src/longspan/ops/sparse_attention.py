"""Attention over cached latents in absorbed form, sparse or dense, with the log-sum-exp of each row and head.

    score[h, s] = scale * query_h . row_s          row_s = [latent | rope key] as cached, s in the row's set
    out_h = sum_s softmax(score)_s latent_s        lse_h = log sum_s e^score[h, s]

The set is `selected[t]` (entries below 0 are no tokens), or with `selected` None every cached token up to
the row's own position. With a `Shard` both speak of the tokens that are here, and the result is this
rank's part. All float32 inside; partial results over disjoint sets merge by their lse. A row with an empty
set gives zeros and lse = -inf. A row flagged NON_FINITE by the indexer gives NaN.

Sparse rows are gathered GATHER_ELEMENTS cached numbers at a time; dense rows are walked with an online
softmax in blocks of DENSE_QUERY_BLOCK x DENSE_KEY_BLOCK. Neither holds rows x context x heads.
"""

from __future__ import annotations

import torch
from torch import Tensor

from longspan.ops.batch import MlaView, StepBatch
from longspan.ops.indexer import NON_FINITE
from longspan.ops.pages import read_rows, read_span

GATHER_ELEMENTS = 1 << 22
DENSE_QUERY_BLOCK = 64
DENSE_KEY_BLOCK = 1024


def sparse_attention(
    query: Tensor, view: MlaView, batch: StepBatch, selected: Tensor | None, rank: int, scale: float
) -> tuple[Tensor, Tensor]:
    """query [T, H, rank + rope], selected [T, k] or None -> out [T, H, rank] and lse [T, H], both float32."""
    out = torch.zeros(*query.shape[:2], rank)
    lse = torch.full(query.shape[:2], -torch.inf)
    if selected is None:
        _dense(query, view.latent, batch, scale, out, lse)
    else:
        _gathered(query, view.latent, batch, selected, scale, out, lse)
    return out, lse


def _gathered(
    query: Tensor, pages: Tensor, batch: StepBatch, selected: Tensor, scale: float, out: Tensor, lse: Tensor
) -> None:
    if selected.shape[1] == 0:
        return
    block = max(1, GATHER_ELEMENTS // (selected.shape[1] * pages.shape[2]))
    for begin in range(0, batch.num_tokens, block):
        rows = slice(begin, begin + block)
        valid = selected[rows] >= 0
        # Position 0 stands in for no token: it is this sequence's own, and its weight is 0.
        cached = read_rows(
            pages, batch.block_tables, batch.row_seqs[rows], selected[rows].clamp(min=0)
        ).float()
        cached = torch.where(valid[..., None], cached, 0.0)
        scores = scale * (query[rows].float() @ cached.transpose(1, 2))
        scores = torch.where(valid[:, None], scores, -torch.inf)
        peak = scores.amax(-1)
        weights = torch.where(valid[:, None], (scores - peak[..., None]).exp(), 0.0)
        total = weights.sum(-1)
        lse[rows] = peak + total.log()
        # The best entry has weight 1, so only an empty set has a total below 1: it stays 0 / 1.
        out[rows] = (weights @ cached[..., : out.shape[2]]) / total.clamp(min=1.0)[..., None]
    broken = selected[:, 0] == NON_FINITE
    out[broken] = torch.nan
    lse[broken] = torch.nan


def _dense(query: Tensor, pages: Tensor, batch: StepBatch, scale: float, out: Tensor, lse: Tensor) -> None:
    for s, (begin, end, _) in enumerate(batch.sequences):
        blind = int((batch.row_visible[begin:end] == 0).sum())  # the first rows, which see none of a shard
        for row in range(begin + blind, end, DENSE_QUERY_BLOCK):
            rows = slice(row, min(row + DENSE_QUERY_BLOCK, end))
            out[rows], lse[rows] = _dense_block(
                query[rows], pages, batch.block_tables[s], batch.row_visible[rows], out.shape[2], scale
            )


def _dense_block(
    query: Tensor, pages: Tensor, block_table: Tensor, visible: Tensor, rank: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Rows of one sequence, row r seeing its first visible[r] tokens here."""
    queries, heads = query.shape[:2]
    wide = query.float().flatten(0, 1)
    peak = torch.full((queries, heads), -torch.inf)
    total = torch.zeros(queries, heads)
    mixed = torch.zeros(queries, heads, rank)
    end = int(visible[-1])
    for begin in range(0, end, DENSE_KEY_BLOCK):
        positions = torch.arange(begin, min(begin + DENSE_KEY_BLOCK, end))
        cached = read_span(pages, block_table, begin, begin + len(positions)).float()
        scores = scale * (wide @ cached.T).unflatten(0, (queries, heads))
        scores = torch.where((positions < visible[:, None])[:, None], scores, -torch.inf)
        # The first block holds token 0, which every row sees: from then on the peak is finite.
        new_peak = torch.maximum(peak, scores.amax(-1))
        shrink = (peak - new_peak).exp()
        weights = (scores - new_peak[..., None]).exp()
        total = total * shrink + weights.sum(-1)
        mixed = mixed * shrink[..., None] + (weights.flatten(0, 1) @ cached[:, :rank]).view(mixed.shape)
        peak = new_peak
    return mixed / total[..., None], peak + total.log()
