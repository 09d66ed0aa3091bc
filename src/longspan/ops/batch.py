"""What one step computes (`StepBatch`) and where each layer's memory lives (the views).

Operators and the model see nothing else of the host, so the embedded engine and vLLM can both drive them. Views may
be strided: a host may pack several kinds side by side in one page.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class StepBatch:
    """Tokens of several sequences packed end to end, T in all, S sequences.

    Sequence s owns rows `query_starts[s]:query_starts[s+1]`; `context_lens[s]` of its tokens are already in memory.
    A sequence with `context_lens[s] == 0` starts from zero KDA state, whatever its slot holds.
    """

    token_ids: Tensor  # [T] int64
    query_starts: Tensor  # [S+1] int64, ascending from 0 to T
    context_lens: Tensor  # [S] int64
    block_tables: Tensor  # [S, max_pages] int64 page numbers; entries past a sequence's end are never read
    slot_mapping: Tensor  # [T] int64, page * page_size + offset: where the row's latent and index key are written
    state_slots: Tensor  # [S] int64, the KDA slot of each sequence
    logit_rows: Tensor  # [R] int64, rows whose logits are wanted

    @property
    def num_tokens(self) -> int:
        return self.token_ids.shape[0]

    @property
    def num_seqs(self) -> int:
        return self.context_lens.shape[0]

    def positions(self) -> Tensor:
        """[T] int64: position of each row in its own sequence, counted from 0."""
        lengths = self.query_starts[1:] - self.query_starts[:-1]
        offset = torch.repeat_interleave(self.context_lens - self.query_starts[:-1], lengths)
        return torch.arange(self.num_tokens) + offset


@dataclass(frozen=True)
class MlaView:
    """Memory of one full-attention layer. Row = one token's [latent after its norm | shared rope key]."""

    latent: Tensor  # [pages, page_size, kv_lora_rank + qk_rope_head_dim]
    index_key: Tensor | None  # [pages, page_size, index_head_dim], None without a sparse indexer


@dataclass(frozen=True)
class KdaView:
    """Memory of one KDA layer, by slot."""

    state: Tensor  # [slots, heads, head_dim (key), head_dim (value)] float32
    conv: Tensor  # [slots, kernel - 1, 3 * heads * head_dim], raw q|k|v projections, oldest first


LayerView = MlaView | KdaView
