"""What one step computes (`StepBatch`) and where each layer's memory lives (the views).

Operators and the model see nothing else of the host, so the embedded engine and vLLM can both drive them.
Views may be strided: a host may pack several kinds side by side in one page.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from longspan.ops.shard import WHOLE, Shard

QUAD = 4  # dimensions of an int8 key whose products one instruction sums
ZERO_CODE = 128


class SequenceRows(NamedTuple):
    """Rows `begin:end` of a batch; row `begin` is token `context` of its sequence."""

    begin: int
    end: int
    context: int


@dataclass(frozen=True)
class StepBatch:
    """Tokens of several sequences packed end to end, T in all, S sequences.

    Sequence s owns rows `query_starts[s]:query_starts[s+1]`; `context_lens[s]` of its tokens are already in
    memory. A sequence with `context_lens[s] == 0` starts from zero KDA state, whatever its slot holds. What
    every layer asks of a batch again and again is worked out once, on first use.

    Where a sequence's tokens are dealt to several ranks, `shard` says which are here: then pages and slots
    are this rank's own, while context lengths and positions stay those of the whole sequence.
    """

    token_ids: Tensor  # [T] int64
    query_starts: Tensor  # [S+1] int64, ascending from 0 to T
    context_lens: Tensor  # [S] int64
    block_tables: Tensor  # [S, max_pages] int64 page numbers; entries past a sequence's end are never read
    # [T] int64, page * page_size + offset: where the row's latent and index key are written; -1: not here
    slot_mapping: Tensor
    state_slots: Tensor  # [S] int64, the KDA slot of each sequence
    logit_rows: Tensor  # [R] int64, rows whose logits are wanted
    shard: Shard = WHOLE

    @property
    def num_tokens(self) -> int:
        return self.token_ids.shape[0]

    @property
    def num_seqs(self) -> int:
        return self.context_lens.shape[0]

    @cached_property
    def lengths(self) -> Tensor:
        """[S] int64: rows of each sequence, 0 allowed."""
        return self.query_starts[1:] - self.query_starts[:-1]

    @cached_property
    def row_seqs(self) -> Tensor:
        """[T] int64: the sequence each row belongs to."""
        return torch.repeat_interleave(torch.arange(self.num_seqs), self.lengths)

    @cached_property
    def row_positions(self) -> Tensor:
        """[T] int64: position of each row in its own sequence, counted from 0."""
        offset = self.context_lens - self.query_starts[:-1]
        return torch.arange(self.num_tokens) + offset[self.row_seqs]

    @cached_property
    def row_visible(self) -> Tensor:
        """[T] int64: how many of this rank's tokens each row may look at, itself included if it is here."""
        return self.shard.count(self.row_positions + 1)

    @cached_property
    def sequences(self) -> list[SequenceRows]:
        """The rows and the context of each sequence as plain numbers, for loops over ragged sequences."""
        starts, contexts = self.query_starts.tolist(), self.context_lens.tolist()
        return [SequenceRows(b, e, c) for b, e, c in zip(starts[:-1], starts[1:], contexts, strict=True)]

    @cached_property
    def max_visible(self) -> int:
        """The longest sequence that any row of this step sees, itself included; 0 for an empty batch."""
        return max((s.context + s.end - s.begin for s in self.sequences if s.end > s.begin), default=0)


@dataclass(frozen=True)
class QuantizedKeys:
    """Index keys of one layer as symmetric int8: key ~ scale * (code - 128). The maths: `ops/index_keys.py`.

    Quads of dimensions of one key lie side by side, and the keys of a page next to each other.
    """

    codes: Tensor  # [pages, ceil(index_head_dim / QUAD), page_size, QUAD] uint8
    scale: Tensor  # [pages, page_size] float32


@dataclass(frozen=True)
class MlaView:
    """Memory of one full-attention layer. Row = one token's [latent after its norm | shared rope key]."""

    latent: Tensor  # [pages, page_size, kv_lora_rank + qk_rope_head_dim]
    # [pages, page_size, index_head_dim] or int8; None without a sparse indexer
    index_key: Tensor | QuantizedKeys | None


@dataclass(frozen=True)
class KdaView:
    """Memory of one KDA layer, by slot."""

    state: Tensor  # [slots, heads, head_dim (key), head_dim (value)] float32
    conv: Tensor  # [slots, kernel - 1, 3 * heads * head_dim], raw q|k|v projections, oldest first


LayerView = MlaView | KdaView
