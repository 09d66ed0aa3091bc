"""All that a sequence needs to remember, behind one owner.

A sequence holds one slot (KDA state and convolution window of every KDA layer) and pages (latent and index
key of every full-attention layer). Page p is row p in each of those layers, so one list of pages serves them
all, and the kinds are taken, grown and freed together.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import ceil

import torch
from torch import Tensor

from longspan.config import ModelConfig
from longspan.memory.layout import allocate_views
from longspan.memory.pool import Pool
from longspan.ops.batch import ZERO_CODE, KdaView, LayerView, QuantizedKeys


@dataclass(eq=False)
class SequenceMemory:
    """What one sequence holds. `num_tokens` of its tokens are stored; the pages may have room for more."""

    slot: int
    pages: list[int] = field(default_factory=list)
    num_tokens: int = 0


class Memory:
    """`num_pages` pages of `page_size` tokens and `num_slots` slots for a model of this config.

    `poison` fills everything that nobody owns with NaN (of int8 keys the scale), so that a read of it can't
    go unnoticed. The KDA state of a new sequence is whatever its slot holds: `StepBatch.context_lens` 0 makes
    it start from zero.
    """

    def __init__(
        self,
        config: ModelConfig,
        num_pages: int,
        page_size: int,
        num_slots: int,
        dtype: torch.dtype,
        index_key_dtype: str = "auto",
        poison: bool = False,
    ) -> None:
        self.page_size = page_size
        self.views: tuple[LayerView, ...] = tuple(
            allocate_views(config, num_pages, page_size, num_slots, dtype, index_key_dtype)
        )
        self._pages = Pool("page", num_pages)
        self._slots = Pool("slot", num_slots)
        self._held: set[SequenceMemory] = set()
        self._poison = poison
        if poison:
            self._fill(list(range(num_pages)), list(range(num_slots)), torch.nan)

    @property
    def num_pages(self) -> int:
        return self._pages.size

    @property
    def num_slots(self) -> int:
        return self._slots.size

    @property
    def free_pages(self) -> int:
        return self._pages.num_free

    @property
    def free_slots(self) -> int:
        return self._slots.num_free

    @property
    def capacity(self) -> int:
        """Tokens of one sequence that has all pages."""
        return self.num_pages * self.page_size

    def new_sequence(self) -> SequenceMemory | None:
        """Memory of an empty sequence, or None if all slots are taken."""
        slots = self._slots.take(1)
        if slots is None:
            return None
        seq = SequenceMemory(slot=slots[0])
        self._held.add(seq)
        return seq

    def grow(self, seq: SequenceMemory, num_tokens: int) -> bool:
        """Makes room for `num_tokens` tokens in all. False, and nothing taken, if there are too few pages."""
        missing = ceil(num_tokens / self.page_size) - len(seq.pages)
        if missing > 0:
            pages = self._pages.take(missing)
            if pages is None:
                return False
            seq.pages += pages
        return True

    def free(self, seq: SequenceMemory, scrub: bool = False) -> None:
        """Takes everything back. `scrub` zeroes it first: the sequence may have left NaN behind.

        Raises KeyError if `seq` was freed before.
        """
        self._held.remove(seq)
        if self._poison or scrub:
            self._fill(seq.pages, [seq.slot], torch.nan if self._poison else 0.0)
        self._pages.give_back(seq.pages)
        self._slots.give_back([seq.slot])
        seq.pages = []

    def check(self) -> None:
        """Raises RuntimeError unless every page and slot is either free or held by one sequence."""
        self._pages.check([page for seq in self._held for page in seq.pages])
        self._slots.check([seq.slot for seq in self._held])

    def _fill(self, pages: list[int], slots: list[int], value: float) -> None:
        for view in self.views:
            if isinstance(view, KdaView):
                _fill_rows(view.state, slots, value)
                _fill_rows(view.conv, slots, value)
            else:
                _fill_rows(view.latent, pages, value)
                if isinstance(view.index_key, QuantizedKeys):
                    _fill_rows(view.index_key.codes, pages, ZERO_CODE)
                    _fill_rows(view.index_key.scale, pages, value)
                elif view.index_key is not None:
                    _fill_rows(view.index_key, pages, value)


def _fill_rows(tensor: Tensor, rows: list[int], value: float) -> None:
    tensor[torch.tensor(rows, dtype=torch.int64)] = value
