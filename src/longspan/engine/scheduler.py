"""Who runs in the next step, and how many of their tokens. Changes when a token is computed, never which.

Order: by priority, then first come, first served. A sequence is admitted when there is room for its state and
for the pages of all its known tokens: a prompt that has begun is never given up for want of its own pages. It
goes on from the deepest checkpoint of the prefix cache. One whose prompt begins like one that is being
computed waits for the checkpoint where they part.

A step: decoding sequences first, one token each; then prompts, in chunks, with what is left of the budget and
with as much as `Pace` allows beside the decoding ones. The oldest prompt gets at least half of it, the
shortest one the rest: nobody waits behind a long prompt, which itself never stops.

When there is no memory for a decoding sequence (after the prefix cache has given up all that nobody uses), or
for a waiting one of higher priority, the last in order is preempted: swapped to the host pool if that has
room, else computed again later. A sequence must fit the memory when it is alone; max_model_len sees to that.

Schedules may be made while the step before them runs: nothing here touches the bytes (see `Memory`).
"""

from __future__ import annotations

import time
from bisect import bisect_left, insort
from dataclasses import dataclass

from longspan.engine.pace import Pace
from longspan.engine.sequence import Sequence
from longspan.engine.snapshots import SnapshotPolicy
from longspan.memory.memory import Memory, SequenceMemory
from longspan.memory.prefix_cache import Checkpoint

PROMPT_LOGPROB_ROWS = 128
"""Rows of logits a step computes for prompt log-probabilities: bounds memory to this times the vocabulary."""

CUT = 64
"""Long prompts are cut at multiples of this many of their tokens, whatever else is in the step: operators
that work in chunks see the same chunks, and the same bits come out. With less than this beside the decoding
sequences one prompt is cut anywhere."""


@dataclass(frozen=True)
class Scheduled:
    """The tokens `start` to `end` - 1 of `seq`, for which there is room in `memory`."""

    seq: Sequence
    memory: SequenceMemory
    line: int  # of `BatchState`
    start: int
    end: int
    samples: bool  # its last row predicts a token that is to be chosen
    prompt_rows: range  # of its rows, those that predict prompt tokens whose log-probabilities are wanted
    state_slot: int | None = None  # where the state after these tokens is to be copied
    new_pages: tuple[int, ...] = ()  # with it, those filled since the last state that was kept


class Scheduler:
    """Owns the queues and decides who holds memory. An ended sequence is in no queue and holds none."""

    def __init__(
        self,
        memory: Memory,
        *,
        max_num_batched_tokens: int,
        max_num_seqs: int,
        max_model_len: int,
        snapshots: SnapshotPolicy | None,
        pace: Pace,
    ) -> None:
        """`snapshots` None: no prefix cache."""
        self._memory = memory
        self._max_num_batched_tokens = max_num_batched_tokens
        self._max_num_seqs = max_num_seqs
        self._max_model_len = max_model_len
        self._snapshots = snapshots
        self.pace = pace
        self.waiting: list[Sequence] = []  # both in order
        self.running: list[Sequence] = []
        self.num_preemptions = 0
        self.num_swaps = 0
        self._shortest_goes_first = False
        self._lines = list(reversed(range(max_num_seqs)))
        self.prefix_queries = 0  # tokens
        self.prefix_hits = 0

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, seq: Sequence) -> None:
        insort(self.waiting, seq, key=_key)

    def remove(self, seq: Sequence, scrub: bool = False) -> None:
        """Takes an ended sequence out and frees its memory."""
        if seq.memory is None:
            self.waiting.remove(seq)
            self._drop_swapped(seq)
        else:
            self._memory.free(seq.memory, scrub)
            self._stop_running(seq)

    def schedule(self) -> list[Scheduled]:
        """The work of one step. Empty if there is none, or if all of it depends on the step in flight."""
        step = _Step(self._max_num_batched_tokens)
        self._admit_outranking()
        decoding, prompts = [], []
        for seq in self.running:
            num_uncomputed = seq.num_uncomputed
            if num_uncomputed > 1:
                prompts.append(seq)
            elif num_uncomputed and not self._ends_in_flight(seq):
                decoding.append(seq)
        for seq in decoding:
            # In order, so who is preempted for a page has not been scheduled yet.
            if step.tokens_left and self._find_page(seq):
                self._add(step, seq, 1)
        prompts_left = self.pace.limit(step.tokens_left) if step.scheduled else step.tokens_left
        prompts = [seq for seq in prompts if seq.memory]
        if self.waiting:
            prompts += self._admit_waiting(prompts, prompts_left)
            prompts.sort(key=_key)
        for seq, share in self._shares(prompts, prompts_left):
            prompts_left -= self._add(step, seq, min(share, prompts_left))
        return step.scheduled

    def _shares(self, prompts: list[Sequence], num_tokens: int) -> list[tuple[Sequence, int]]:
        """Which prompts get how many of `num_tokens`. They are in order; what one leaves is for the next."""
        if len(prompts) < 2:
            return [(seq, num_tokens) for seq in prompts]
        oldest, *others = prompts
        shortest = min(others, key=lambda seq: seq.num_uncomputed)
        rest = [seq for seq in others if seq is not shortest]
        first = num_tokens // 2 // CUT * CUT
        both_want_rows = oldest.num_missing_prompt_logprobs and shortest.num_missing_prompt_logprobs
        if first and not both_want_rows:
            first = max(first, num_tokens - oldest.num_uncomputed)
            return [(shortest, first), *((seq, num_tokens) for seq in (oldest, *rest))]
        # Too few tokens, or rows of log-probabilities, to share, so they take turns.
        self._shortest_goes_first = not self._shortest_goes_first
        ordered = [shortest, oldest] if self._shortest_goes_first else [oldest, shortest]
        return [(seq, num_tokens) for seq in (*ordered, *rest)]

    def is_lasting(self, checkpoint: Checkpoint) -> bool:
        """It stays when its sequence makes the next one."""
        return self._snapshots is not None and self._snapshots.is_lasting(checkpoint.num_tokens)

    def _ends_in_flight(self, seq: Sequence) -> bool:
        """The token that is being chosen is its last."""
        if not seq.num_in_flight:
            return False
        full = len(seq.tokens) + seq.num_in_flight == self._max_model_len
        return full or seq.num_output_tokens + seq.num_in_flight == seq.params.max_tokens

    def _add(self, step: _Step, seq: Sequence, limit: int) -> int:
        """Takes on at most `limit` tokens; how many."""
        memory = seq.memory
        assert memory
        start = memory.num_tokens
        count = step.count(seq, limit)
        if self._snapshots and count > 1:
            position = self._snapshots.next_position(seq, start)
            count = count if position is None else min(count, position - start)
        if not count:
            return 0
        end = start + count
        state_slot, new_pages = None, ()
        if self._snapshots and self._snapshots.keeps(seq, start, end):
            state_slot = self._memory.reserve_state()
            if state_slot is not None:
                seq.planned_states.add(end)
                new_pages = self._memory.kept_up_to(memory, end)
        samples = count == seq.num_uncomputed
        rows = seq.plan_prompt_logprobs(start, count)
        step.add(Scheduled(seq, memory, seq.line, start, end, samples, rows, state_slot, new_pages))
        memory.num_tokens = end
        seq.num_in_flight += samples
        return count

    def _find_page(self, seq: Sequence) -> bool:
        """Makes room for the next token of `seq`; False if it has no memory any more."""
        while seq.memory and not self._memory.grow(seq.memory, seq.num_computed + 1):
            self._preempt(self.running[-1])
        return seq.memory is not None

    def _admit_waiting(self, prompts: list[Sequence], num_tokens: int) -> list[Sequence]:
        """Admits in order, until there are prompts for `num_tokens` tokens or no memory is left; whom."""
        sizes = [seq.num_uncomputed for seq in prompts]
        admitted: list[Sequence] = []
        # Looking at a prompt costs time, so nobody is looked at who is further behind than could run.
        for seq in self.waiting[: self._max_num_seqs]:
            if len(self.running) >= self._max_num_seqs:
                break
            # Two at least are looked after, so that a short prompt need not wait for a long one.
            if num_tokens == 0 or (sum(sizes) >= num_tokens and len(sizes) > 1):
                break
            if seq.num_in_flight or self._waits_for_another(seq):
                continue
            if not self._admit(seq):
                break
            admitted.append(seq)
            sizes.append(seq.num_uncomputed)
        return admitted

    def _admit_outranking(self) -> None:
        """Admits those of higher priority than somebody who runs, at whose cost if need be.

        Before anybody is scheduled, so that who is preempted has no part in the step.
        """
        for seq in list(self.waiting):
            if not self._outranks(seq):
                break
            if seq.num_in_flight or self._waits_for_another(seq):
                continue
            while not self._admit(seq) and self._outranks(seq):
                self._preempt(self.running[-1])

    def _outranks(self, seq: Sequence) -> bool:
        """There is somebody to preempt for it."""
        return bool(self.running) and seq.request.priority < self.running[-1].request.priority

    def _admit(self, seq: Sequence) -> bool:
        if len(self.running) >= self._max_num_seqs:
            return False
        memory = self._take_memory(seq)
        if memory is None:
            return False
        seq.memory = memory
        seq.line = self._lines.pop()
        self.waiting.remove(seq)
        insort(self.running, seq, key=_key)
        if seq.scheduled is None:
            seq.scheduled = time.monotonic()
            seq.num_cached_tokens = memory.num_tokens
            self.prefix_queries += len(seq.tokens) if self._uses_cache(seq) else 0
            self.prefix_hits += memory.num_tokens
        return True

    def _take_memory(self, seq: Sequence) -> SequenceMemory | None:
        if seq.swapped and seq.swapped.lost:
            self._drop_swapped(seq)
        if seq.swapped:
            memory = self._memory.swap_in(seq.swapped, len(seq.tokens))
            seq.swapped = seq.swapped if memory is None else None
        else:
            memory = self._new_memory(seq, self._reusable(seq))
        if memory is None and not self.running:
            # Alone it fits, but not with the state that it goes on from beside its own.
            self._drop_swapped(seq)
            memory = self._new_memory(seq, [])
        return memory

    def _new_memory(self, seq: Sequence, digests: list[bytes]) -> SequenceMemory | None:
        memory = self._memory.new_sequence(digests)
        if memory is not None and not self._memory.grow(memory, len(seq.tokens)):
            self._memory.free(memory)
            return None
        if memory is not None and self._snapshots:
            self._note_branch_point(seq)
        return memory

    def _uses_cache(self, seq: Sequence) -> bool:
        # Log-probabilities of a prompt need all its rows.
        return self._snapshots is not None and not seq.num_missing_prompt_logprobs

    def _reusable(self, seq: Sequence) -> list[bytes]:
        """Names of its pages that may come from the cache: one token at least is left to compute."""
        if not self._uses_cache(seq):
            return []
        return list(seq.digests(len(seq.tokens) - 1, self._memory.page_size))

    def _note_branch_point(self, seq: Sequence) -> None:
        """Where it leaves what others have cached beyond the last state, it is to keep one."""
        grid = self._snapshots.grid if self._snapshots else 1
        seen = self._memory.cache.match(self._reusable(seq)).num_pages_seen * self._memory.page_size
        seq.branch_points.add(seen // grid * grid)

    def _waits_for_another(self, seq: Sequence) -> bool:
        """A running sequence computes the same prompt up to a point yet to come: there it keeps its state."""
        if not self._snapshots or seq.swapped or not self._uses_cache(seq):
            return False
        page_size, grid = self._memory.page_size, self._snapshots.grid
        mine = self._reusable(seq)
        for other in self.running:
            if other.num_uncomputed <= 1 and not other.planned_states:
                continue
            theirs = other.digests(len(other.tokens), page_size)
            # Names are chained, so pages are the same up to one point, which is found by halving.
            shared = bisect_left(range(min(len(mine), len(theirs))), True, key=lambda i: mine[i] != theirs[i])
            point = shared * page_size // grid * grid
            if point in other.planned_states:
                return True
            if point > other.num_computed and point > self._cached_tokens(mine):
                other.branch_points.add(point)
                if self._snapshots.next_position(other, other.num_computed) is not None:
                    return True
        return False

    def _cached_tokens(self, digests: list[bytes]) -> int:
        checkpoint = self._memory.cache.match(digests).checkpoint
        return checkpoint.num_tokens if checkpoint else 0

    def _preempt(self, seq: Sequence) -> None:
        assert seq.memory
        seq.swapped = self._memory.swap_out(seq.memory)
        if seq.swapped is None:
            self._memory.free(seq.memory)
        self.num_swaps += seq.swapped is not None
        self.num_preemptions += seq.swapped is None
        self._stop_running(seq)
        self.add(seq)

    def _stop_running(self, seq: Sequence) -> None:
        self.running.remove(seq)
        self._lines.append(seq.line)
        seq.memory, seq.rolling = None, None
        seq.planned_states.clear()

    def _drop_swapped(self, seq: Sequence) -> None:
        if seq.swapped:
            self._memory.swap.remove(seq.swapped)
            seq.swapped = None


def _key(seq: Sequence) -> tuple[int, int]:
    return seq.key


class _Step:
    """A step being put together: what is in it and what is left of its budgets."""

    def __init__(self, max_num_tokens: int) -> None:
        self.scheduled: list[Scheduled] = []
        self.tokens_left = max_num_tokens
        self._logprob_rows_left = PROMPT_LOGPROB_ROWS
        self._has_prompt = False

    def count(self, seq: Sequence, limit: int) -> int:
        """How many tokens of `seq` the step takes on, at most `limit`."""
        limit = min(limit, self.tokens_left)
        if seq.num_missing_prompt_logprobs:
            limit = min(limit, self._logprob_rows_left)
        count = min(seq.num_uncomputed, limit)
        if 0 < count < seq.num_uncomputed:
            aligned = count - (seq.num_computed + count) % CUT
            # Where nobody's prompt would go on, better be cut anywhere than wait.
            count = max(aligned, 0) if aligned > 0 or self._has_prompt else count
        return count

    def add(self, item: Scheduled) -> None:
        self.scheduled.append(item)
        self._has_prompt |= item.end - item.start > 1
        self.tokens_left -= item.end - item.start
        self._logprob_rows_left -= len(item.prompt_rows)
