"""Decode context parallel (DCP): sparse attention where the tokens of a sequence are dealt to D ranks.

    1  each rank scores the keys that are here and lists its best, w = min(top_k, most tokens a rank can hold)
    2  all_gather of the lists; every rank derives the same top_k and keeps those that are here
    3  each rank attends with the queries of all heads of the group, which it made itself, to what it holds
    4  (out | lse) of its heads goes to each rank, which merges what arrives by its log-sum-exp

While nobody sees more than top_k tokens there is no choice: 3 and 4 alone. Bytes that a rank receives for a
token of a sequence of n tokens, per full-attention layer (H heads in T tensor ranks, latents of C):

    candidates   (D - 1) * w * 8                  w = min(top_k, ceil(n / D)) where tokens are dealt singly
    outputs      (D - 1) * (H / T) * (C + 1) * 4

Queries, index keys and latents never move. Merging begins with one's own part and goes round the ranks from
there, so the order of sums of a head depends on nothing but who owns it.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from longspan.ops.backend import Operators
from longspan.ops.batch import MlaView, StepBatch
from longspan.ops.partials import pack_partial
from longspan.parallel.group import Group
from longspan.parallel.layout import Layout

EXCHANGE_ROWS = 256


@dataclass(frozen=True)
class ContextParallel:
    """The operators of `ops` that meet cached tokens, over the context group."""

    ops: Operators
    layout: Layout

    def index_select(
        self, query: Tensor, weight: Tensor, view: MlaView, batch: StepBatch, top_k: int
    ) -> Tensor:
        """As that of `ops` -> [T, w] local indices of the chosen tokens that are here."""
        self._check(batch)
        candidates = self.ops.index_candidates(query, weight, view, batch, top_k)
        self.layout.context.traffic.serve("candidates", batch.num_tokens)
        everyone = self.layout.context.all_gather(candidates, "candidates")
        return self.ops.merge_candidates(everyone, batch.shard, top_k)

    def sparse_attention(
        self,
        query: Tensor,
        view: MlaView,
        batch: StepBatch,
        selected: Tensor | None,
        rank: int,
        scale: float,
    ) -> tuple[Tensor, Tensor]:
        """query [T, heads of the group, rank + rope] -> out [T, own heads, rank] and lse, of all tokens."""
        self._check(batch)
        self.layout.context.traffic.serve("outputs", batch.num_tokens)
        out, lse = self.ops.sparse_attention(query, view, batch, selected, rank, scale)
        return merge_ranks(self.ops, self.layout.context, out, lse)

    def _check(self, batch: StepBatch) -> None:
        if batch.shard != self.layout.shard:
            raise ValueError(f"the batch is for {batch.shard}, this rank has {self.layout.shard}")


def merge_ranks(ops: Operators, group: Group, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """out [T, size * H, C] and lse [T, size * H] of tokens here -> [T, H, C] and [T, H] of tokens everywhere.

    EXCHANGE_ROWS rows at a time: what is packed and on its way does not grow with a prefill.
    """
    heads = out.shape[1] // group.size
    own = slice(group.rank * heads, (group.rank + 1) * heads)
    merged, merged_lse = out[:, own].contiguous(), lse[:, own].contiguous()
    for begin in range(0, out.shape[0], EXCHANGE_ROWS):
        rows = slice(begin, begin + EXCHANGE_ROWS)

        def merge(part: Tensor, rows: slice = rows) -> None:
            ops.merge_partial(merged[rows], merged_lse[rows], part)

        group.exchange(pack_partial(out[rows], lse[rows], group.size), merge, "outputs")
    return merged, merged_lse
