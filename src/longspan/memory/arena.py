"""One arena for both kinds of memory, cut into slabs: a slab is one KDA state, or a number of pages.

    slab s = bytes [s * slab_bytes, (s + 1) * slab_bytes)        slot s = all of slab s
    page p = bytes [p * page_bytes, ...) of slab p // pages_per_slab

So pages and states share one budget, and whoever needs memory takes it from wherever it is free. Pages are
taken from the slab that has fewest left, which keeps whole slabs free for states. Bookkeeping only: no bytes.
"""

from __future__ import annotations


class Arena:
    """Slabs and pages, each free or with exactly one owner."""

    def __init__(self, num_slabs: int, pages_per_slab: int) -> None:
        self.num_slabs = num_slabs
        self.pages_per_slab = pages_per_slab
        self._free_slabs = list(reversed(range(num_slabs)))  # what was freed last goes first: it is warm
        self._open: dict[int, list[int]] = {}  # slab -> its free pages, where some but not all are free
        # The open slabs by their number of free pages; dicts, for they keep an order and lose members
        # cheaply.
        self._by_free: list[dict[int, None]] = [{} for _ in range(pages_per_slab + 1)]
        self._num_open_pages = 0

    @property
    def num_pages(self) -> int:
        return self.num_slabs * self.pages_per_slab

    @property
    def num_free_pages(self) -> int:
        return len(self._free_slabs) * self.pages_per_slab + self._num_open_pages

    @property
    def num_free_slots(self) -> int:
        return len(self._free_slabs)

    def take_slot(self) -> int | None:
        return self._free_slabs.pop() if self._free_slabs else None

    def take_pages(self, count: int) -> list[int] | None:
        """`count` pages, or None and nothing taken if there are fewer."""
        if count > self.num_free_pages:
            return None
        return [self._take_page() for _ in range(count)]

    def give_back_slots(self, slots: list[int]) -> None:
        self._free_slabs += slots

    def give_back_pages(self, pages: list[int]) -> None:
        for page in reversed(pages):
            slab = page // self.pages_per_slab
            free = self._open.setdefault(slab, [])
            self._by_free[len(free)].pop(slab, None)
            free.append(page)
            self._num_open_pages += 1
            if len(free) < self.pages_per_slab:
                self._by_free[len(free)][slab] = None
            else:
                del self._open[slab]
                self._num_open_pages -= self.pages_per_slab
                self._free_slabs.append(slab)

    def check(self, held_pages: list[int], held_slots: list[int]) -> None:
        """Raises RuntimeError unless every byte is either free or held, and in one place only."""
        slots = [*self._free_slabs, *held_slots]
        pages = [page for free in self._open.values() for page in free] + held_pages
        pages += [page for slot in slots for page in self._pages_of(slot)]
        if sorted(pages) != list(range(self.num_pages)):
            lost = sorted(set(range(self.num_pages)) - set(pages))
            twice = sorted({page for page in pages if pages.count(page) > 1}) if len(pages) < 10_000 else "?"
            raise RuntimeError(
                f"Of {self.num_slabs} slabs {len(self._free_slabs)} are free, {len(held_slots)} hold states "
                f"and {len(self._open)} have free pages; pages lost: {lost[:8]}, in two places: {twice[:8]}."
            )

    def _pages_of(self, slab: int) -> range:
        return range(slab * self.pages_per_slab, (slab + 1) * self.pages_per_slab)

    def _take_page(self) -> int:
        for count in range(1, self.pages_per_slab):
            if self._by_free[count]:
                slab, _ = self._by_free[count].popitem()
                break
        else:
            slab = self._free_slabs.pop()
            self._open[slab] = list(reversed(self._pages_of(slab)))
            self._num_open_pages += self.pages_per_slab
        free = self._open[slab]
        page = free.pop()
        self._num_open_pages -= 1
        if free:
            self._by_free[len(free)][slab] = None
        else:
            del self._open[slab]
        return page
