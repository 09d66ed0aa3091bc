from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from longspan.memory.arena import Arena


def test_what_was_freed_last_is_taken_first() -> None:
    arena = Arena(8, 1)
    assert [arena.take_slot() for _ in range(3)] == [0, 1, 2]
    arena.give_back_slots([1])
    assert arena.take_slot() == 1


def test_pages_come_from_the_slab_that_has_fewest_left() -> None:
    arena = Arena(4, 4)
    first = arena.take_pages(4)
    second = arena.take_pages(3)
    assert first == [0, 1, 2, 3] and second == [4, 5, 6]
    arena.give_back_pages([0, 1])
    assert arena.take_pages(1) == [7]
    assert arena.num_free_slots == 2


def test_a_slab_whose_pages_are_all_free_can_hold_a_state() -> None:
    arena = Arena(1, 3)
    pages = arena.take_pages(3)
    assert pages is not None and arena.take_slot() is None
    arena.give_back_pages(pages)
    assert arena.take_slot() == 0
    assert arena.take_pages(1) is None


@pytest.mark.parametrize(("pages", "slots"), [([0], []), ([0, 1, 1], [1]), ([0, 1], [0])])
def test_what_is_lost_or_held_twice_is_noticed(pages: list[int], slots: list[int]) -> None:
    arena = Arena(3, 2)
    assert arena.take_pages(2) == [0, 1] and arena.take_slot() == 1
    arena.check([0, 1], [1])
    with pytest.raises(RuntimeError, match="pages lost"):
        arena.check(pages, slots)


class ArenaMachine(RuleBasedStateMachine):
    """Whatever is taken and given back, every byte is in one place."""

    @initialize(num_slabs=st.integers(0, 6), per_slab=st.integers(1, 5))
    def start(self, num_slabs: int, per_slab: int) -> None:
        self.arena = Arena(num_slabs, per_slab)
        self.pages: list[int] = []
        self.slots: list[int] = []

    @rule()
    def take_slot(self) -> None:
        free = self.arena.num_free_slots
        slot = self.arena.take_slot()
        assert (slot is None) == (free == 0)
        self.slots += [] if slot is None else [slot]

    @rule(count=st.integers(0, 8))
    def take_pages(self, count: int) -> None:
        free = self.arena.num_free_pages
        pages = self.arena.take_pages(count)
        assert (pages is None) == (count > free)
        self.pages += pages or []
        assert self.arena.num_free_pages == free - len(pages or [])

    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        back = data.draw(st.lists(st.sampled_from(self.pages), unique=True)) if self.pages else []
        self.arena.give_back_pages(back)
        self.pages = [page for page in self.pages if page not in back]
        if self.slots and data.draw(st.booleans()):
            self.arena.give_back_slots([self.slots.pop()])

    @invariant()
    def everything_is_somewhere(self) -> None:
        if hasattr(self, "arena"):
            self.arena.check(self.pages, self.slots)


TestArena = ArenaMachine.TestCase
