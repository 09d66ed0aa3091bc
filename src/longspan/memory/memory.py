"""All that sequences need to remember, behind one owner.

A sequence holds one slot (KDA state and convolution window of every KDA layer) and pages (latent and index
key of every full-attention layer), all of one arena. Page p is row p in each of those layers, so one list of
pages serves them all, and the kinds are taken, grown and freed together. What sequences have in common lies
in the prefix cache, as checkpoints: a state and all pages below it.

Who holds what changes at once, when a step is scheduled. What that means for the bytes (a state copied, a
freed page poisoned) is kept as *edits*, which whoever runs the steps carries out in order, before the next
one. So a step may be scheduled while the one before it still runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import ceil

import torch
from torch import Tensor

from longspan.config import ModelConfig
from longspan.memory.arena import Arena
from longspan.memory.layout import POISON, allocate, make_views
from longspan.memory.prefix_cache import Checkpoint, PrefixCache
from longspan.memory.sizes import page_layout, page_stride, slot_layout
from longspan.memory.swap import Swapped, SwapPool
from longspan.memory.use import MemoryUse
from longspan.ops.batch import KdaView, LayerView, QuantizedKeys

Edit = Callable[[], None]


@dataclass(eq=False)
class SequenceMemory:
    """What one sequence holds. `num_tokens` of its tokens are stored, or will be by the steps scheduled.

    Pages that it does not own are the prefix cache's, and stay while `tip` is pinned.
    """

    slot: int
    pages: list[int] = field(default_factory=list)
    own: set[int] = field(default_factory=set)
    tip: Checkpoint | None = None
    num_tokens: int = 0
    num_kept: int = 0  # of these, covered by checkpoints or by those planned
    is_sound: bool = True  # False: something in it is not finite, so no checkpoint is made of it


class Memory:
    """`num_slabs` slabs, each one slot or `pages_per_slab` pages of `page_size` tokens.

    `poison` makes NaN of everything that nobody owns, so that a read of it can't go unnoticed. The KDA state
    of a new sequence is a copy of a checkpoint's, or else whatever its slot holds: `StepBatch.context_lens` 0
    makes it start from zero. `swap_bytes`: of the host pool for sequences that lose their memory.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        num_slabs: int,
        pages_per_slab: int,
        page_size: int,
        dtype: torch.dtype,
        index_key_dtype: str = "auto",
        swap_bytes: int = 0,
        poison: bool = False,
    ) -> None:
        self.page_size = page_size
        self._page_bytes = page_layout(config, page_size, dtype.itemsize, index_key_dtype).num_bytes
        self._slot_bytes = slot_layout(config, dtype.itemsize).num_bytes
        self.page_stride = page_stride(self._page_bytes, self._slot_bytes, pages_per_slab)
        self.slab_bytes = pages_per_slab * self.page_stride
        data = allocate(num_slabs, self.slab_bytes)
        self._slots, self._pages = data, data.view(num_slabs * pages_per_slab, self.page_stride)
        self.views: tuple[LayerView, ...] = make_views(
            config, self._pages, self._slots, page_size, dtype, index_key_dtype
        )
        self._arena = Arena(num_slabs, pages_per_slab)
        self.cache = PrefixCache(page_size, self.page_stride, self.slab_bytes, self._give_back)
        self.swap = SwapPool(swap_bytes)
        self._held: set[SequenceMemory] = set()
        self._reserved: set[int] = set()  # slots of states that are to become checkpoints
        self._edits: list[Edit] = []
        self._poison = poison
        if poison:
            data.fill_(POISON)

    @property
    def num_pages(self) -> int:
        return self._arena.num_pages

    @property
    def free_pages(self) -> int:
        return self._arena.num_free_pages

    @property
    def total_bytes(self) -> int:
        return self._arena.num_slabs * self.slab_bytes

    def use(self) -> MemoryUse:
        """Who holds the bytes. What sequences share counts as cached."""
        return MemoryUse(
            total_bytes=self.total_bytes,
            page_bytes_running=sum(len(seq.own) for seq in self._held) * self.page_stride,
            page_bytes_cached=self.cache.num_pages * self.page_stride,
            state_bytes_running=len(self._held) * self.slab_bytes,
            state_bytes_cached=(self.cache.num_slots + len(self._reserved)) * self.slab_bytes,
            swap_bytes=self.swap.used_bytes,
            swap_total_bytes=self.swap.total_bytes,
        )

    def new_sequence(self, digests: Sequence[bytes] = ()) -> SequenceMemory | None:
        """Memory that goes on from the deepest checkpoint of these pages; None: no room for a state."""
        tip = self.cache.match(list(digests)).checkpoint if digests else None
        return self._start(tip)

    def grow(self, seq: SequenceMemory, num_tokens: int) -> bool:
        """Makes room for `num_tokens` tokens in all. False, and nothing taken, if there are too few pages."""
        missing = ceil(num_tokens / self.page_size) - len(seq.pages)
        if missing > 0:
            pages = self._take_pages(missing)
            if pages is None:
                return False
            seq.pages += pages
            seq.own.update(pages)
        return True

    def free(self, seq: SequenceMemory, scrub: bool = False) -> None:
        """Takes everything back. `scrub` zeroes it first: the sequence may have left NaN behind.

        Raises KeyError if `seq` was freed before.
        """
        self._held.remove(seq)
        own = [page for page in seq.pages if page in seq.own]
        if scrub and not self._poison:
            self._edits.append(partial(self._fill, own, [seq.slot], 0))
        self._give_back(own, [seq.slot])
        if seq.tip:
            self.cache.unpin(seq.tip)
        seq.pages, seq.own, seq.tip = [], set(), None

    def reserve_state(self) -> int | None:
        """A slot to copy a state into, for `publish` or `cancel`; None if there is no room."""
        slot = self._take_slot()
        if slot is not None:
            self._reserved.add(slot)
        return slot

    def kept_up_to(self, seq: SequenceMemory, num_tokens: int) -> tuple[int, ...]:
        """A checkpoint after `num_tokens` tokens is planned; the pages filled since the one before."""
        first, last = seq.num_kept // self.page_size, num_tokens // self.page_size
        seq.num_kept = num_tokens
        return tuple(seq.pages[first:last])

    def copy_state(self, source: int, target: int) -> None:
        """Copies a slot now. Only who runs the steps may call it."""
        self._slots[target, : self._slot_bytes] = self._slots[source, : self._slot_bytes]

    def is_finite(self, slot: int, pages: Sequence[int]) -> bool:
        """No NaN and no infinity in this slot and these pages. Only who runs the steps may call it."""
        rows = torch.tensor(pages, dtype=torch.int64)
        parts: list[Tensor] = []
        for view in self.views:
            if isinstance(view, KdaView):
                parts += [view.state[slot], view.conv[slot]]
            else:
                keys = view.index_key.scale if isinstance(view.index_key, QuantizedKeys) else view.index_key
                parts += [part[rows] for part in (view.latent, keys) if part is not None]
        # A sum of finite numbers that overflows is looked at again; far cheaper than looking at each.
        return all(math.isfinite(part.sum().item()) or bool(part.isfinite().all()) for part in parts)

    def publish(self, seq: SequenceMemory, digests: list[bytes], slot: int) -> Checkpoint | None:
        """Makes a checkpoint of the reserved `slot`: the state after the pages of `digests`, which `seq`
        holds.

        None, and the slot is given up, if `seq` has been freed meanwhile.
        """
        if seq not in self._held:
            self.cancel(slot)
            return None
        self._reserved.remove(slot)
        inserted = self.cache.insert(seq.tip, digests, seq.pages, slot)
        if not inserted.is_new:
            self._give_back([], [slot])
        seq.own -= set(inserted.taken)
        if inserted.checkpoint is not seq.tip:
            self.cache.pin(inserted.checkpoint)
            if seq.tip:
                self.cache.unpin(seq.tip)
            seq.tip = inserted.checkpoint
        return inserted.checkpoint

    def cancel(self, slot: int) -> None:
        """Gives up a reserved slot."""
        self._reserved.remove(slot)
        self._give_back([], [slot])

    def swap_out(self, seq: SequenceMemory) -> Swapped | None:
        """Frees `seq`, keeping in the host pool what the prefix cache has not; None: no room there."""
        first = seq.tip.num_tokens // self.page_size if seq.tip else 0
        tail = seq.pages[first : ceil(seq.num_tokens / self.page_size)]
        swapped = self.swap.add(seq.tip, seq.num_tokens, len(tail) * self._page_bytes + self._slot_bytes)
        if swapped:
            self._edits.append(partial(self._save, swapped, tail, seq.slot))
            self.free(seq)
        return swapped

    def swap_in(self, swapped: Swapped, num_tokens: int) -> SequenceMemory | None:
        """Takes back what was swapped out, with room for `num_tokens`; None, and nothing changed, without it.

        Raises KeyError if the checkpoint that it stood on has been evicted: `swapped.lost`.
        """
        if swapped.lost:
            raise KeyError("the checkpoint below a swapped sequence is gone")
        seq = self._start(swapped.tip, restore=False)
        if seq is None:
            return None
        if not self.grow(seq, num_tokens):
            self.free(seq)
            return None
        first = swapped.tip.num_tokens // self.page_size if swapped.tip else 0
        seq.num_tokens = swapped.num_tokens
        pages = seq.pages[first : ceil(swapped.num_tokens / self.page_size)]
        self._edits.append(partial(self._load, swapped, pages, seq.slot))
        self.swap.remove(swapped)
        return seq

    def take_edits(self) -> list[Edit]:
        """What must be done to the bytes before the next step, in order."""
        edits, self._edits = self._edits, []
        return edits

    def settle(self) -> None:
        """Carries out all edits. Only while no step runs."""
        for edit in self.take_edits():
            edit()

    def check(self) -> None:
        """Raises RuntimeError unless every byte is free or held once, by a sequence or the prefix cache."""
        self.cache.check()
        pages = [page for seq in self._held for page in seq.own] + self.cache.held_pages()
        slots = [seq.slot for seq in self._held] + self.cache.held_slots() + list(self._reserved)
        self._arena.check(pages, slots)

    def audit(self) -> None:
        """`check` if memory is poisoned; else only whether the numbers add up, which takes no time."""
        if self._poison:
            self.check()
            return
        pages = sum(len(seq.own) for seq in self._held) + self.cache.num_pages + self.free_pages
        slots = len(self._held) + self.cache.num_slots + len(self._reserved)
        if pages + slots * self._arena.pages_per_slab != self.num_pages:
            raise RuntimeError(
                f"Of {self.num_pages} pages {pages} are free or hold tokens, and {slots} slots hold states, "
                f"each of {self._arena.pages_per_slab} pages."
            )

    def _start(self, tip: Checkpoint | None, restore: bool = True) -> SequenceMemory | None:
        if tip:
            self.cache.pin(tip)
        slot = self._take_slot()
        if slot is None:
            if tip:
                self.cache.unpin(tip)
            return None
        seq = SequenceMemory(slot)
        if tip:
            seq.tip, seq.pages = tip, self.cache.pages_of(tip)
            seq.num_tokens = seq.num_kept = tip.num_tokens
            if restore:
                self._edits.append(partial(self.copy_state, tip.slot, slot))
        self._held.add(seq)
        return seq

    def _take_slot(self) -> int | None:
        while (slot := self._arena.take_slot()) is None:
            if not self.cache.evict("slot"):
                return None
        return slot

    def _take_pages(self, count: int) -> list[int] | None:
        missing = count - self._arena.num_free_pages
        if missing > 0:
            pages, slots = self.cache.pinned()
            slots = self.cache.num_slots - slots
            if missing > self.cache.num_pages - pages + slots * self._arena.pages_per_slab:
                return None  # evicting would be in vain
        while count > self._arena.num_free_pages and self.cache.evict("page"):
            pass
        return self._arena.take_pages(count)

    def _give_back(self, pages: list[int], slots: list[int]) -> None:
        if self._poison:
            self._edits.append(partial(self._fill, list(pages), list(slots), POISON))
        self._arena.give_back_pages(pages)
        self._arena.give_back_slots(slots)

    def _fill(self, pages: list[int], slots: list[int], value: int) -> None:
        self._pages[torch.tensor(pages, dtype=torch.int64)] = value
        self._slots[torch.tensor(slots, dtype=torch.int64)] = value

    def _save(self, swapped: Swapped, pages: list[int], slot: int) -> None:
        rows = torch.tensor(pages, dtype=torch.int64)
        swapped.pages = self._pages[rows, : self._page_bytes]
        swapped.slot = self._slots[slot, : self._slot_bytes].clone()

    def _load(self, swapped: Swapped, pages: list[int], slot: int) -> None:
        assert swapped.pages is not None and swapped.slot is not None
        self._pages[torch.tensor(pages, dtype=torch.int64), : self._page_bytes] = swapped.pages
        self._slots[slot, : self._slot_bytes] = swapped.slot
        swapped.pages = swapped.slot = None
