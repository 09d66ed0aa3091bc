"""The persistent side of batches: a line for each running sequence, updated in place as it grows.

So the metadata of a step (block tables, slot mapping, positions) is a few gathers over the lines that take
part, whatever the sequences are, and can be made while the step before it runs: what it gives is copies. Only
the tokens that are being chosen meanwhile are filled in at the end.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from longspan.engine.scheduler import Scheduled
from longspan.memory.memory import SequenceMemory
from longspan.ops.batch import StepBatch


@dataclass(frozen=True)
class LogitRows:
    """Of one scheduled sequence, which of the step's rows of logits are whose."""

    first: int
    num_prompt: int  # predictions of prompt tokens whose log-probabilities are wanted
    samples: bool

    @property
    def end(self) -> int:
        return self.first + self.num_prompt + self.samples


class BatchState:
    """Lines 0 to `max_num_seqs` - 1; the scheduler says who has which."""

    def __init__(self, max_num_seqs: int, max_num_pages: int, page_size: int) -> None:
        self._page_size = page_size
        self._tables = np.zeros((max_num_seqs, max_num_pages), dtype=np.int64)
        self._num_pages = [0] * max_num_seqs  # entries of each table that are filled
        self._slots = np.zeros(max_num_seqs, dtype=np.int64)
        self._holders: list[SequenceMemory | None] = [None] * max_num_seqs

    def batch(self, scheduled: list[Scheduled]) -> tuple[StepBatch, list[LogitRows]]:
        """The step over these. Tokens that are not known yet are 0: see `fill_in`."""
        count = len(scheduled)
        lines = np.array([self._updated(item) for item in scheduled], dtype=np.int64)
        context_lens = np.array([item.start for item in scheduled], dtype=np.int64)
        ends = np.array([item.end for item in scheduled], dtype=np.int64)
        query_starts = np.zeros(count + 1, dtype=np.int64)
        np.cumsum(ends - context_lens, out=query_starts[1:])
        num_tokens, longest = int(query_starts[-1]), int(ends.max())
        tables = self._tables[lines, : -(-longest // self._page_size)]
        if num_tokens == count:
            seqs, positions = np.arange(count), context_lens
        else:
            seqs = np.repeat(np.arange(count), ends - context_lens)
            positions = np.arange(num_tokens) + (context_lens - query_starts[:-1])[seqs]
        pages, offsets = np.divmod(positions, self._page_size)
        token_ids: list[int] = []
        logit_rows: list[int] = []
        rows: list[LogitRows] = []
        first = 0
        for item in scheduled:
            begin, seq_tokens = len(token_ids), item.seq.tokens
            token_ids += seq_tokens[item.start : item.end]
            if item.end > len(seq_tokens):
                token_ids.append(0)
            num_prompt = len(item.prompt_rows)
            if num_prompt:
                logit_rows += [begin + row for row in item.prompt_rows]
            if item.samples:
                logit_rows.append(len(token_ids) - 1)
            rows.append(LogitRows(first, num_prompt, item.samples))
            first = len(logit_rows)
        batch = StepBatch(
            token_ids=torch.from_numpy(np.array(token_ids, dtype=np.int64)),
            query_starts=torch.from_numpy(query_starts),
            context_lens=torch.from_numpy(context_lens),
            block_tables=torch.from_numpy(tables),
            slot_mapping=torch.from_numpy(tables[seqs, pages] * self._page_size + offsets),
            state_slots=torch.from_numpy(self._slots[lines]),
            logit_rows=torch.from_numpy(np.array(logit_rows, dtype=np.int64)),
        )
        batch.__dict__["max_visible"] = longest  # all layers ask
        return batch, rows

    def _updated(self, item: Scheduled) -> int:
        """The line of a sequence, with the pages that it has taken since."""
        line, pages = item.line, item.memory.pages
        if self._holders[line] is not item.memory:  # somebody else had it before
            self._holders[line] = item.memory
            self._num_pages[line] = 0
            self._slots[line] = item.memory.slot
        filled = self._num_pages[line]
        if filled < len(pages):
            self._tables[line, filled : len(pages)] = pages[filled:]
            self._num_pages[line] = len(pages)
        return line


def fill_in(batch: StepBatch, scheduled: list[Scheduled]) -> None:
    """Puts in the tokens that were being chosen when the batch was made."""
    late = [i for i, item in enumerate(scheduled) if item.samples]
    rows = batch.query_starts.numpy()[1:][late] - 1
    batch.token_ids.numpy()[rows] = [scheduled[i].seq.tokens[scheduled[i].end - 1] for i in late]
