"""Where a sequence leaves checkpoints of its state for the prefix cache.

    every `interval` tokens of a prompt
    at the end of a prompt: the last multiple of `grid` that leaves a token to compute
    at branch points: where a later prompt was seen to leave a cached one
    at the end of a reply: at each multiple of `grid` while it is written, of which only the last is kept

`grid` is the page size; a whole number of pages and of CUT tokens where bits depend on how a prompt is cut.
"""

from __future__ import annotations

from dataclasses import dataclass

from longspan.engine.sequence import Sequence


@dataclass(frozen=True)
class SnapshotPolicy:
    """Both numbers count tokens; `interval` is a multiple of `grid`."""

    grid: int
    interval: int

    def next_position(self, seq: Sequence, start: int) -> int | None:
        """The first number of tokens beyond `start`, of those known, after which the state is to be kept."""
        end_of_prompt = (len(seq.tokens) - 1) // self.grid * self.grid
        candidates = [(start // self.interval + 1) * self.interval, end_of_prompt, *seq.branch_points]
        return min((p for p in candidates if start < p <= end_of_prompt), default=None)

    def keeps(self, seq: Sequence, start: int, end: int) -> bool:
        """The state after `end` tokens is to be kept, of a step that began at `start`."""
        if end % self.grid:
            return False
        decoding = end >= len(seq.tokens)
        return decoding or self.next_position(seq, start) == end

    def is_lasting(self, num_tokens: int) -> bool:
        """A checkpoint of a reply that stays when the next one is made."""
        return num_tokens % self.interval == 0
