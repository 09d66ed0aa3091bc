"""The index against a naive model: a dict of prefixes; pages and slots know what is written in them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from longspan.memory.prefix_cache import Checkpoint, PrefixCache, page_digests

PAGE_BYTES = 3
SLOT_BYTES = 20

Prefix = tuple[bytes, tuple[int, ...]]  # seed and tokens


def prefixes(prefix: Prefix, page_size: int) -> list[Prefix]:
    """Every whole number of pages of it, one page first."""
    seed, tokens = prefix
    return [(seed, tokens[:end]) for end in range(page_size, len(tokens) + 1, page_size)]


def begins_with(longer: Prefix, shorter: Prefix) -> bool:
    return longer[0] == shorter[0] and longer[1][: len(shorter[1])] == shorter[1]


@dataclass
class State:
    """A checkpoint as the naive model knows it."""

    checkpoint: Checkpoint
    slot: int
    pins: int = 0
    clock: float = 0.0
    used: int = 0


@dataclass(eq=False)
class Running:
    """A sequence: what the scheduler would hold of it."""

    seed: bytes
    tokens: tuple[int, ...]
    stands_on: Checkpoint | None
    pages: list[int]
    own: set[int]
    digests: list[bytes] = field(default_factory=list)


class Caching(RuleBasedStateMachine):
    """Sequences come, grow, publish states, roll them on and go, while checkpoints are evicted."""

    page_size = 1

    def __init__(self) -> None:
        super().__init__()
        self.cache = PrefixCache(self.page_size, PAGE_BYTES, SLOT_BYTES, self.give_back)
        self.written: dict[int, Prefix] = {}  # page -> the prefix that its last token ends
        self.kept: dict[int, Prefix] = {}  # slot -> the prefix that its state is of
        self.states: dict[Prefix, State] = {}
        self.running: list[Running] = []
        self.given_back: list[tuple[list[int], list[int]]] = []
        self.num_units = 0
        self.clock = 0.0
        self.num_uses = 0

    # What stands for the arena: a unit is never used twice, so a page freed too early is missing.

    def new_unit(self) -> int:
        self.num_units += 1
        return self.num_units

    def give_back(self, pages: list[int], slots: list[int]) -> None:
        self.given_back.append((list(pages), list(slots)))

    def use(self, state: State) -> None:
        self.num_uses += 1
        state.clock, state.used = self.clock, self.num_uses

    def pin(self, checkpoint: Checkpoint) -> None:
        self.cache.pin(checkpoint)
        self.state_of(checkpoint).pins += 1

    def unpin(self, checkpoint: Checkpoint) -> None:
        state = self.state_of(checkpoint)
        self.cache.unpin(checkpoint)
        state.pins -= 1
        if not state.pins:
            self.use(state)

    def state_of(self, checkpoint: Checkpoint) -> State:
        (state,) = (state for state in self.states.values() if state.checkpoint is checkpoint)
        return state

    def grown(self, sequence: Running, symbols: list[int], tail: int) -> None:
        """Fills up the last page, adds whole pages of one token each and some tokens more."""
        rest = -len(sequence.tokens) % self.page_size
        tokens = [0] * rest + [symbol for symbol in symbols for _ in range(self.page_size)]
        sequence.tokens += (*tokens, *[1] * (tail % self.page_size))
        for prefix in prefixes((sequence.seed, sequence.tokens), self.page_size)[len(sequence.pages) :]:
            page = self.new_unit()
            self.written[page] = prefix
            sequence.pages.append(page)
            sequence.own.add(page)
        page_digests(sequence.tokens, self.page_size, sequence.seed, sequence.digests)

    def after(self, sequence: Running, num_pages: int) -> Prefix:
        return (sequence.seed, sequence.tokens[: num_pages * self.page_size])

    symbols = st.lists(st.integers(0, 1), max_size=5)

    @rule(seed=st.sampled_from([b"", b"salt"]), symbols=symbols, tail=st.integers(0, 63))
    def start(self, seed: bytes, symbols: list[int], tail: int) -> None:
        sequence = Running(seed, (), None, [], set())
        tokens = tuple(symbol for symbol in symbols for _ in range(self.page_size))
        digests = page_digests(tokens, self.page_size, seed)
        match = self.cache.match(digests)

        every = [prefix for state in self.states for prefix in prefixes(state, self.page_size)]
        on_path = prefixes((seed, tokens), self.page_size)
        assert match.num_pages_seen == sum(prefix in every for prefix in on_path)
        hits = [prefix for prefix in on_path if prefix in self.states]
        expected = self.states[hits[-1]].checkpoint if hits else None
        assert match.checkpoint is expected

        if match.checkpoint:
            self.pin(match.checkpoint)
            self.cache.touch(match.checkpoint)
            self.use(self.state_of(match.checkpoint))
            assert self.kept[match.checkpoint.slot] == hits[-1]
            sequence.stands_on = match.checkpoint
            sequence.pages = self.cache.pages_of(match.checkpoint)
            sequence.tokens = hits[-1][1]
            sequence.digests = digests[: len(sequence.pages)]
        self.grown(sequence, symbols[len(sequence.pages) :], tail)
        self.running.append(sequence)

    @rule(data=st.data(), symbols=symbols, tail=st.integers(0, 63))
    def grow(self, data: st.DataObject, symbols: list[int], tail: int) -> None:
        if self.running:
            self.grown(data.draw(st.sampled_from(self.running)), symbols, tail)

    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        sequence = self.drawn(data)
        if sequence is None:
            return
        num_pages = data.draw(st.integers(self.num_standing(sequence) + 1, len(sequence.digests)))
        here = self.after(sequence, num_pages)
        cached = {prefix for state in self.states for prefix in prefixes(state, self.page_size)}
        slot = self.new_unit()
        inserted = self.cache.insert(
            sequence.stands_on, sequence.digests[:num_pages], list(sequence.pages), slot
        )
        assert inserted.is_new == (here not in self.states)
        new = [place for place, each in enumerate(prefixes(here, self.page_size)) if each not in cached]
        assert inserted.taken == [sequence.pages[place] for place in new]
        if inserted.is_new:
            self.kept[slot] = here
            self.states[here] = State(inserted.checkpoint, slot)
            self.use(self.states[here])
        self.moved(sequence, inserted.checkpoint, inserted.taken)

    @rule(data=st.data())
    def roll(self, data: st.DataObject) -> None:
        sequence = self.drawn(data)
        if sequence is None or (checkpoint := sequence.stands_on) is None:
            return
        num_pages = data.draw(st.integers(self.num_standing(sequence), len(sequence.digests)))
        before, here = self.after(sequence, self.num_standing(sequence)), self.after(sequence, num_pages)
        state = self.states[before]
        fixed = any(begins_with(each, before) for each in self.states if each != before)
        taken = self.cache.advance(checkpoint, sequence.digests[:num_pages], list(sequence.pages))
        if fixed or state.pins > 1 or here == before:
            assert taken is None
            return
        assert taken == sequence.pages[len(before[1]) // self.page_size : num_pages]
        self.kept[state.slot] = here
        self.states[here] = self.states.pop(before)
        self.use(state)
        self.moved(sequence, checkpoint, taken)

    def drawn(self, data: st.DataObject) -> Running | None:
        """A sequence with a page that it could publish."""
        able = [each for each in self.running if len(each.digests) > self.num_standing(each)]
        return data.draw(st.sampled_from(able)) if able else None

    def num_standing(self, sequence: Running) -> int:
        return sequence.stands_on.num_tokens // self.page_size if sequence.stands_on else 0

    def moved(self, sequence: Running, checkpoint: Checkpoint, taken: list[int]) -> None:
        assert sequence.own >= set(taken)
        sequence.own -= set(taken)
        self.pin(checkpoint)
        if sequence.stands_on:
            self.unpin(sequence.stands_on)
        sequence.stands_on = checkpoint

    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        if not self.running:
            return
        sequence = data.draw(st.sampled_from(self.running))
        self.running.remove(sequence)
        if sequence.stands_on:
            self.unpin(sequence.stands_on)
        for page in sequence.own:
            del self.written[page]

    @rule(want=st.sampled_from(["page", "slot"]))
    def evict(self, want: Literal["page", "slot"]) -> None:
        assert self.cache.evict(want) == self.a_state_went(want)
        assert not self.given_back

    @rule()
    def clear(self) -> None:
        num_unpinned = sum(not state.pins for state in self.states.values())
        assert self.cache.clear() == num_unpinned
        while self.a_state_went("slot"):
            pass
        assert not self.given_back
        assert all(state.pins for state in self.states.values())

    def a_state_went(self, want: Literal["page", "slot"]) -> bool:
        """The state to evict, found by looking at all, was given back next, with the pages it alone needs."""
        choices = []
        for prefix, state in self.states.items():
            others = [each for each in self.states if each != prefix]
            needed = {page for each in others for page in prefixes(each, self.page_size)}
            pages = [page for page in prefixes(prefix, self.page_size) if page not in needed]
            if state.pins or (want == "page" and not pages):
                continue
            above = max((len(each[1]) for each in others if begins_with(prefix, each)), default=0)
            freed = SLOT_BYTES + len(pages) * PAGE_BYTES
            worth = state.clock + (len(prefix[1]) - above) / freed
            choices.append((worth, state.used, prefix, pages))
        if not choices:
            return False
        worth, _, prefix, expected = min(choices)
        self.clock = max(self.clock, worth)
        state = self.states.pop(prefix)
        pages, slots = self.given_back.pop(0)
        assert slots == [state.slot]
        assert [self.written.pop(page) for page in pages] == expected
        assert not state.checkpoint.alive
        del self.kept[state.slot]
        return True

    @invariant()
    def all_is_accounted_for(self) -> None:
        self.cache.check()
        held = self.cache.held_pages()
        own = [page for sequence in self.running for page in sequence.own]
        assert sorted(held + own) == sorted(self.written)
        assert {self.written[page] for page in held} == {
            page for state in self.states for page in prefixes(state, self.page_size)
        }
        assert self.cache.num_pages == len(held)
        assert sorted(self.cache.held_slots()) == sorted(self.kept)
        assert self.cache.num_checkpoints == self.cache.num_slots == len(self.states)

    @invariant()
    def every_sequence_and_state_has_its_pages(self) -> None:
        for sequence in self.running:
            whole = prefixes((sequence.seed, sequence.tokens), self.page_size)
            assert [self.written[page] for page in sequence.pages] == whole
            kept = self.cache.pages_of(sequence.stands_on) if sequence.stands_on else []
            assert set(sequence.pages) <= sequence.own | set(kept)
        for prefix, state in self.states.items():
            pages = self.cache.pages_of(state.checkpoint)
            assert [self.written[page] for page in pages] == prefixes(prefix, self.page_size)
            assert state.checkpoint.alive and self.kept[state.checkpoint.slot] == prefix


@pytest.mark.parametrize("page_size", [1, 4, 64])
def test_the_index_does_what_a_dict_of_prefixes_does(page_size: int) -> None:
    machine = type("Caching", (Caching,), {"page_size": page_size})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=60, stateful_step_count=40, suppress_health_check=list(HealthCheck), deadline=None
        ),
    )
