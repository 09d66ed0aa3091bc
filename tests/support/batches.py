"""Ragged batches over scrambled pages and slots, in memory where everything unwritten is NaN."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from longspan.memory.layout import allocate_views
from longspan.model.decoder import Decoder, Observer
from longspan.ops.batch import StepBatch
from longspan.ops.shard import WHOLE, Shard


class Tables:
    """Pages and slots of a few sequences: disjoint, in no particular order."""

    def __init__(self, num_seqs: int, max_tokens: int, page_size: int = 4, seed: int = 0) -> None:
        order = torch.Generator().manual_seed(seed)
        per_seq = -(-max_tokens // page_size)
        self.page_size = page_size
        self.num_pages = num_seqs * per_seq + 2
        self.num_slots = num_seqs + 2
        pages = torch.randperm(self.num_pages, generator=order)[: num_seqs * per_seq]
        self.pages = pages.view(num_seqs, per_seq)
        self.slots = torch.randperm(self.num_slots, generator=order)[:num_seqs]

    def batch(
        self,
        seqs: Sequence[int],
        lengths: Sequence[int],
        contexts: Sequence[int],
        token_ids: Sequence[int] | None = None,
        shard: Shard = WHOLE,
    ) -> StepBatch:
        """`lengths[i]` new rows of `seqs[i]`, of which `contexts[i]` tokens are in memory; all logits.

        These are the pages of a rank: with a `shard`, of its own tokens.
        """
        total = sum(lengths)
        slots = [
            self._slot(s, shard.local(p)) if shard.owner(p) == shard.rank else -1
            for s, n, c in zip(seqs, lengths, contexts, strict=True)
            for p in range(c, c + n)
        ]
        starts = [0]
        for n in lengths:
            starts.append(starts[-1] + n)
        index = torch.tensor(list(seqs), dtype=torch.int64)
        ids = [0] * total if token_ids is None else list(token_ids)
        return StepBatch(
            token_ids=torch.tensor(ids, dtype=torch.int64),
            query_starts=torch.tensor(starts),
            context_lens=torch.tensor(list(contexts), dtype=torch.int64),
            block_tables=self.pages[index],
            slot_mapping=torch.tensor(slots, dtype=torch.int64),
            state_slots=self.slots[index],
            logit_rows=torch.arange(total),
            shard=shard,
        )

    def _slot(self, seq: int, token: int) -> int:
        return int(self.pages[seq, token // self.page_size]) * self.page_size + token % self.page_size

    def pages_of(self, seq_rows: Sequence[Tensor], fill: float = torch.nan) -> Tensor:
        """Pages [num_pages, page_size, n] holding the rows [len, n] of each sequence, `fill` elsewhere."""
        pages = torch.full((self.num_pages, self.page_size, seq_rows[0].shape[1]), fill)
        for s, rows in enumerate(seq_rows):
            for p, row in enumerate(rows):
                pages[self.pages[s, p // self.page_size], p % self.page_size] = row
        return pages


class Host:
    """Runs a model over a few sequences, of whose memory it keeps a rank's share, or all."""

    def __init__(
        self, model: Decoder, num_seqs: int, max_tokens: int, page_size: int = 4, shard: Shard = WHOLE
    ) -> None:
        self.model = model
        self.shard = shard
        self.tables = Tables(num_seqs, max_tokens, page_size)
        self.views = allocate_views(
            model.config, self.tables.num_pages, page_size, self.tables.num_slots, model.dtype, poison=True
        )
        self.lengths = [0] * num_seqs

    def step(self, chunks: dict[int, Sequence[int]], observe: Observer | None = None) -> dict[int, Tensor]:
        """Feeds `chunks[seq]` to each sequence in one step -> logits [len, vocab] of each."""
        seqs = list(chunks)
        lengths = [len(chunks[s]) for s in seqs]
        batch = self.tables.batch(
            seqs, lengths, [self.lengths[s] for s in seqs], [t for s in seqs for t in chunks[s]], self.shard
        )
        logits = self.model.step(batch, self.views, observe).split(lengths)
        for s, n in zip(seqs, lengths, strict=True):
            self.lengths[s] += n
        return dict(zip(seqs, logits, strict=True))

    def feed(self, seq: int, ids: Sequence[int], chunk: int) -> Tensor:
        """The whole of `ids` in steps of `chunk` tokens -> logits [len(ids), vocab]."""
        return torch.cat([self.step({seq: ids[i : i + chunk]})[seq] for i in range(0, len(ids), chunk)])
