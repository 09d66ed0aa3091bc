"""Which tokens of a sequence this rank's pages hold, under decode context parallel (DCP).

Stretches of `interleave` tokens are dealt to `size` ranks in turn:

    owner(p) = (p // interleave) % size
    local(p) = p // (interleave * size) * interleave + p % interleave

A rank's own tokens have local indices 0, 1, 2, .. in the order of their positions, so what a row may look
at is always a number of first local tokens: `count(position + 1)`. All functions take whole numbers or
integer tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor

Whole = TypeVar("Whole", int, Tensor)


@dataclass(frozen=True)
class Shard:
    """The share of rank `rank` of `size`."""

    rank: int = 0
    size: int = 1
    interleave: int = 1

    def count(self, tokens: Whole) -> Whole:
        """How many of the first `tokens` tokens are this rank's."""
        turn = self.interleave * self.size
        rest = tokens % turn - self.rank * self.interleave
        if isinstance(rest, int):
            rest = min(max(rest, 0), self.interleave)
        else:
            rest = rest.clamp(0, self.interleave)
        return tokens // turn * self.interleave + rest

    def owner(self, position: Whole) -> Whole:
        """The rank that holds the token at `position`."""
        return position // self.interleave % self.size

    def local(self, position: Whole) -> Whole:
        """The index of the token among those of its owner."""
        turn = self.interleave * self.size
        return position // turn * self.interleave + position % self.interleave

    def position(self, local: Whole) -> Whole:
        """The position of this rank's token `local`."""
        turns, rest = local // self.interleave, local % self.interleave
        return (turns * self.size + self.rank) * self.interleave + rest


WHOLE = Shard()
"""Everything is here."""
