"""Who runs in the next step, and how many of their tokens. Changes when a token is computed, never which.

First come, first served. A sequence is admitted when a slot and the pages of all its known tokens are free,
so a prompt that has begun is never given up for want of its own pages. Decoding sequences go first, then
prompts, in chunks, with what is left of the step's budget. When a decoding sequence needs a page and none is
free, the newest running sequence gives up its memory and waits, first in line, to be computed again.

A sequence must fit the memory when it is alone; the engine's max_model_len sees to that.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass

from longspan.engine.sequence import Sequence
from longspan.memory.memory import Memory

PROMPT_LOGPROB_ROWS = 128
"""Rows of logits a step computes for prompt log-probabilities: bounds memory to this times the vocabulary."""

CUT = 64
"""Long prompts are cut at multiples of this many of their tokens, whatever else is in the step: operators
that work in chunks see the same chunks, and the same bits come out. A budget below it cuts anywhere."""


@dataclass(frozen=True)
class Scheduled:
    """The next `num_tokens` tokens of `seq`, which has room for them in memory."""

    seq: Sequence
    num_tokens: int


class Scheduler:
    """Owns the queues and decides who holds memory. An ended sequence is in no queue and holds none."""

    def __init__(self, memory: Memory, max_num_batched_tokens: int) -> None:
        self._memory = memory
        self._max_num_batched_tokens = max_num_batched_tokens
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # oldest first
        self.num_preemptions = 0

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, seq: Sequence) -> None:
        self.waiting.append(seq)

    def remove(self, seq: Sequence, scrub: bool = False) -> None:
        """Takes an ended sequence out and frees its memory."""
        if seq.memory is None:
            self.waiting.remove(seq)
        else:
            self.running.remove(seq)
            self._free(seq, scrub)

    def schedule(self) -> list[Scheduled]:
        """The work of one step. Empty only if there is none."""
        step = _Step(self._max_num_batched_tokens)
        # Oldest first, so who is preempted for a page has not been scheduled yet.
        for seq in [seq for seq in self.running if seq.num_uncomputed == 1]:
            if step.tokens_left and self._find_page(seq):
                step.add(seq)
        for seq in [seq for seq in self.running if seq.num_uncomputed > 1]:
            step.add(seq)
        while self.waiting and step.tokens_left and self._admit(self.waiting[0]):
            step.add(self.waiting.popleft())
        return step.scheduled

    def _find_page(self, seq: Sequence) -> bool:
        """Makes room for the next token of `seq`; False if it has no memory any more."""
        while seq.memory and not self._memory.grow(seq.memory, len(seq.tokens)):
            self._preempt(self.running[-1])
        return seq.memory is not None

    def _admit(self, seq: Sequence) -> bool:
        memory = self._memory.new_sequence()
        if memory is None:
            return False
        if not self._memory.grow(memory, len(seq.tokens)):
            self._memory.free(memory)
            return False
        seq.memory = memory
        seq.scheduled = seq.scheduled or time.monotonic()
        self.running.append(seq)
        return True

    def _preempt(self, seq: Sequence) -> None:
        self.running.remove(seq)
        self._free(seq)
        self.waiting.appendleft(seq)
        self.num_preemptions += 1

    def _free(self, seq: Sequence, scrub: bool = False) -> None:
        assert seq.memory
        self._memory.free(seq.memory, scrub)
        seq.memory = None


class _Step:
    """A step being put together: what is in it and what is left of its budgets."""

    def __init__(self, max_num_tokens: int) -> None:
        self.scheduled: list[Scheduled] = []
        self.tokens_left = max_num_tokens
        self._logprob_rows_left = PROMPT_LOGPROB_ROWS

    def add(self, seq: Sequence) -> None:
        limit = self.tokens_left
        if seq.num_missing_prompt_logprobs:
            limit = min(limit, self._logprob_rows_left)
        count = min(seq.num_uncomputed, limit)
        if count < seq.num_uncomputed:
            aligned = count - (seq.num_computed + count) % CUT
            count = aligned if aligned > 0 else count  # better cut anywhere than let it wait
        if seq.num_missing_prompt_logprobs:
            self._logprob_rows_left -= count
        if count:
            self.scheduled.append(Scheduled(seq, count))
            self.tokens_left -= count
