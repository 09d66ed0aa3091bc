"""The host pool: what sequences that had to give up their memory take back later, bit for bit.

Kept is what the prefix cache has not: the state, and the pages after the checkpoint that the sequence stood
on. If that checkpoint is evicted meanwhile, the rest is worth nothing, and the sequence is computed again.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from longspan.memory.prefix_cache import Checkpoint


@dataclass(eq=False)
class Swapped:
    """One sequence. `pages` [n, bytes] and `slot` [bytes] are there once the edit that saves them has run."""

    tip: Checkpoint | None
    num_tokens: int
    num_bytes: int
    pages: Tensor | None = None
    slot: Tensor | None = None

    @property
    def lost(self) -> bool:
        return self.tip is not None and not self.tip.alive


class SwapPool:
    """At most `total_bytes` of swapped sequences, taken from the system as they come."""

    def __init__(self, total_bytes: int) -> None:
        self.total_bytes = total_bytes
        self._held: set[Swapped] = set()

    @property
    def used_bytes(self) -> int:
        return sum(swapped.num_bytes for swapped in self._held)

    def add(self, tip: Checkpoint | None, num_tokens: int, num_bytes: int) -> Swapped | None:
        """A place for `num_bytes`, or None if the pool is too full."""
        if self.used_bytes + num_bytes > self.total_bytes:
            return None
        swapped = Swapped(tip, num_tokens, num_bytes)
        self._held.add(swapped)
        return swapped

    def remove(self, swapped: Swapped) -> None:
        """Raises KeyError if it was removed before."""
        self._held.remove(swapped)
