"""A pool of numbered units (pages or slots), each free or with exactly one owner."""

from __future__ import annotations

from itertools import pairwise


class Pool:
    """Units 0 to `size` - 1. What was freed last is given out first: it is warm, the untouched stays so."""

    def __init__(self, name: str, size: int) -> None:
        self.name = name
        self.size = size
        self._free = list(reversed(range(size)))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int] | None:
        """`count` units, or None and nothing taken if there are fewer."""
        if count > len(self._free):
            return None
        return [self._free.pop() for _ in range(count)]

    def give_back(self, units: list[int]) -> None:
        self._free.extend(reversed(units))

    def check(self, held: list[int]) -> None:
        """Raises RuntimeError unless every unit is either free or in `held`, and in one place only."""
        everywhere = sorted(self._free + held)
        if everywhere != list(range(self.size)):
            twice = sorted({unit for unit, after in pairwise(everywhere) if unit == after})
            lost = sorted(set(range(self.size)) - set(everywhere))
            raise RuntimeError(
                f"Of {self.size} {self.name}s {len(self._free)} are free and {len(held)} held; "
                f"lost: {lost[:8]}, in two places: {twice[:8]}."
            )
