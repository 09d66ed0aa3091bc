"""The index against a naive model: a dict of prefixes; pages and slots know what is written in them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from longspan.memory.prefix_cache import Checkpoint, Inserted, PrefixCache, page_digests

PAGE_BYTES = 3
SLOT_BYTES = 20

Prefix = tuple[bytes, bytes]  # seed and tokens, which are 0 and 1


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
    tokens: bytes
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
        sequence.tokens += bytes(tokens) + b"\1" * (tail % self.page_size)
        for prefix in prefixes((sequence.seed, sequence.tokens), self.page_size)[len(sequence.pages) :]:
            page = self.new_unit()
            self.written[page] = prefix
            sequence.pages.append(page)
            sequence.own.add(page)
        page_digests(list(sequence.tokens), self.page_size, sequence.seed, sequence.digests)

    def after(self, sequence: Running, num_pages: int) -> Prefix:
        return (sequence.seed, sequence.tokens[: num_pages * self.page_size])

    symbols = st.lists(st.integers(0, 1), max_size=5)

    @rule(data=st.data(), symbols=st.lists(st.integers(0, 1), min_size=1, max_size=5))
    def serve(self, data: st.DataObject, symbols: list[int]) -> None:
        """A whole life at once, else few states would ever be unpinned."""
        sequence = self.start(b"", symbols, 0)
        for _ in range(2):
            if len(sequence.digests) > self.num_standing(sequence):
                self.publish(data, sequence)
        self.finish(sequence)

    @rule(seed=st.sampled_from([b"", b"salt"]), symbols=symbols, tail=st.integers(0, 63))
    def begin(self, seed: bytes, symbols: list[int], tail: int) -> None:
        self.start(seed, symbols, tail)

    def start(self, seed: bytes, symbols: list[int], tail: int) -> Running:
        sequence = Running(seed, b"", None, [], set())
        tokens = bytes(symbol for symbol in symbols for _ in range(self.page_size))
        digests = page_digests(list(tokens), self.page_size, seed)
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
        return sequence

    @rule(data=st.data(), symbols=symbols, tail=st.integers(0, 63))
    def grow(self, data: st.DataObject, symbols: list[int], tail: int) -> None:
        if self.running:
            self.grown(data.draw(st.sampled_from(self.running)), symbols, tail)

    @rule(data=st.data())
    def go_on(self, data: st.DataObject) -> None:
        able = [each for each in self.running if len(each.digests) > self.num_standing(each)]
        if able:
            sequence = data.draw(st.sampled_from(able))
            self.publish(data, sequence)

    def publish(self, data: st.DataObject, sequence: Running) -> None:
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
    def end(self, data: st.DataObject) -> None:
        if self.running:
            self.finish(data.draw(st.sampled_from(self.running)))

    def finish(self, sequence: Running) -> None:
        self.running.remove(sequence)
        if sequence.stands_on:
            self.unpin(sequence.stands_on)
        for page in sequence.own:
            del self.written[page]

    @rule(want=st.sampled_from(["page", "slot"]))
    def evict(self, want: Literal["page", "slot"]) -> None:
        assert self.cache.evict(want) == self.a_state_went(want)
        assert not self.given_back

    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        """A state is given up for those below it; its pages stay."""
        if not self.states:
            return
        prefix = data.draw(st.sampled_from(sorted(self.states)))
        state = self.states[prefix]
        is_inner = any(begins_with(each, prefix) for each in self.states if each != prefix)
        assert self.cache.drop(state.checkpoint) == (is_inner and not state.pins)
        if is_inner and not state.pins:
            assert self.given_back.pop(0) == ([], [state.slot])
            assert not state.checkpoint.alive and not self.given_back
            del self.kept[state.slot], self.states[prefix]

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
            if state.pins:
                continue
            above = max((len(each[1]) for each in others if begins_with(prefix, each)), default=0)
            freed = SLOT_BYTES + len(pages) * PAGE_BYTES
            worth = state.clock + (len(prefix[1]) - above) / freed
            choices.append((worth, state.used, prefix, pages))
        if not choices:
            return False
        if want == "page":  # for which a slot has to do if there is none
            choices = [choice for choice in choices if choice[3]] or choices
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
        pinned = [prefix for prefix, state in self.states.items() if state.pins]
        needed = {page for prefix in pinned for page in prefixes(prefix, self.page_size)}
        assert self.cache.pinned() == (len(needed), len(pinned))
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
        settings=settings(max_examples=40, stateful_step_count=40, deadline=None),
    )


class Shelf:
    """A cache of pages of one token, and what it gave back. With slot 3 come pages 30, 31, 32 .."""

    def __init__(self, page_bytes: int = 1, slot_bytes: int = 10) -> None:
        self.cache = PrefixCache(1, page_bytes, slot_bytes, self.give_back)
        self.pages: list[int] = []
        self.slots: list[int] = []

    def give_back(self, pages: list[int], slots: list[int]) -> None:
        self.pages += pages
        self.slots += slots

    def insert(self, text: str, slot: int, parent: Checkpoint | None = None) -> Inserted:
        return self.cache.insert(parent, named(text), [10 * slot + place for place in range(len(text))], slot)

    def match(self, text: str) -> tuple[int | None, int]:
        """Slot of the deepest checkpoint, pages seen."""
        match = self.cache.match(named(text))
        return match.checkpoint and match.checkpoint.slot, match.num_pages_seen

    def evicted(self, want: Literal["page", "slot"] = "slot") -> int:
        """The slot of what goes next."""
        assert self.cache.evict(want)
        self.cache.check()
        return self.slots[-1]


def named(text: str) -> list[bytes]:
    return page_digests([ord(letter) for letter in text], 1)


@given(
    tokens=st.lists(st.integers(0, 2**31), max_size=40),
    page_size=st.sampled_from([1, 4, 64]),
    cut=st.integers(0, 40),
)
def test_digests_of_a_prefix_are_those_of_the_whole_and_only_full_pages_have_one(
    tokens: list[int], page_size: int, cut: int
) -> None:
    tokens = tokens * (page_size // 4 + 1)
    whole = page_digests(tokens, page_size, b"seed")
    assert len(whole) == len(tokens) // page_size
    assert len(set(whole)) == len(whole) and all(len(digest) == 16 for digest in whole)
    known = page_digests(tokens[:cut], page_size, b"seed")
    assert known == whole[: cut // page_size]
    assert page_digests(tokens, page_size, b"seed", known) is known
    assert known == whole


@pytest.mark.parametrize("seed", [b"a", b"b" * 200, named("x")[0] + (121).to_bytes(8, "little")])
def test_another_seed_never_matches_even_one_made_to_look_like_a_page(seed: bytes) -> None:
    shelf = Shelf()
    shelf.insert("xyz", slot=1)
    tokens = [ord(letter) for letter in "xyz"]
    for start in range(3):
        assert shelf.cache.match(page_digests(tokens[start:], 1, seed)).num_pages_seen == 0


def test_a_change_in_any_token_of_a_page_gives_another_digest_to_it_and_all_after_it() -> None:
    tokens = list(range(12))
    before = page_digests(tokens, 4)
    for place in range(12):
        after = page_digests([*tokens[:place], 99, *tokens[place + 1 :]], 4)
        assert [one == other for one, other in zip(before, after, strict=True)] == [
            page < place // 4 for page in range(3)
        ]


def test_a_hit_ends_at_a_state_however_many_pages_are_cached() -> None:
    shelf = Shelf()
    first = shelf.insert("ab", slot=1).checkpoint
    shelf.insert("abcde", slot=2, parent=first)
    assert shelf.match("a") == (None, 1)
    assert shelf.match("ab") == (1, 2)
    assert shelf.match("abcdx") == (1, 4)
    assert shelf.match("abcdefg") == (2, 5)
    assert shelf.match("xab") == (None, 0)
    assert shelf.match("") == (None, 0)


def test_a_state_at_a_branch_point_splits_the_run_and_takes_no_page() -> None:
    shelf = Shelf()
    long = shelf.insert("abcd", slot=1).checkpoint
    branch = shelf.insert("ab", slot=2)
    assert branch.is_new and branch.taken == []
    assert shelf.cache.pages_of(branch.checkpoint) == [10, 11]
    assert long.parent is branch.checkpoint and long.run == [12, 13]
    assert shelf.insert("abxy", slot=3, parent=branch.checkpoint).taken == [32, 33]
    shelf.cache.check()


def test_of_two_sequences_at_once_the_second_keeps_its_twins_of_what_the_first_published() -> None:
    shelf = Shelf()
    shelf.insert("abcd", slot=1)
    assert shelf.insert("abxy", slot=2).taken == [22, 23]
    again = shelf.insert("abcd", slot=3)
    assert not again.is_new and again.taken == [] and again.checkpoint.slot == 1
    assert shelf.match("abc") == (None, 3)
    assert shelf.match("abxy") == (2, 4)
    assert sorted(shelf.cache.held_pages()) == [10, 11, 12, 13, 22, 23]
    assert sorted(shelf.cache.held_slots()) == [1, 2]
    shelf.cache.check()


def test_a_sequence_that_stands_further_up_continues_the_deepest_state_of_its_path() -> None:
    shelf = Shelf()
    top = shelf.insert("a", slot=1).checkpoint
    shelf.insert("abc", slot=2, parent=top)
    assert shelf.insert("abcde", slot=3, parent=top).taken == [33, 34]
    shelf.cache.check()
    assert shelf.match("abcd") == (2, 4)
    assert shelf.evicted("page") == 3 and shelf.pages == [33, 34]


def test_a_state_is_dropped_for_one_further_down_and_its_pages_stay() -> None:
    shelf = Shelf()
    first = shelf.insert("ab", slot=1).checkpoint
    assert not shelf.cache.drop(first)  # nothing is below it
    second = shelf.insert("abcd", slot=2, parent=first).checkpoint
    shelf.cache.pin(first)
    assert not shelf.cache.drop(first)
    shelf.cache.unpin(first)
    assert shelf.cache.drop(first) and not shelf.cache.drop(first)
    assert (shelf.pages, shelf.slots) == ([], [1])
    assert shelf.match("abcde") == (2, 4) and shelf.match("abc") == (None, 3)
    assert shelf.cache.pages_of(second) == [10, 11, 22, 23]
    assert shelf.cache.num_checkpoints == 1 and shelf.cache.num_evictions == 0
    shelf.cache.check()


def test_of_equal_states_the_longest_unused_goes_first() -> None:
    shelf = Shelf()
    first, second, third = (shelf.insert(text, slot).checkpoint for slot, text in enumerate(("a", "b", "c")))
    shelf.cache.touch(first)
    shelf.cache.pin(second)
    shelf.cache.unpin(second)  # the end of a use is a use
    assert third.alive
    assert [shelf.evicted() for _ in range(3)] == [2, 0, 1]
    assert not shelf.cache.evict("slot") and not shelf.cache.evict("page")


def test_the_state_that_saves_least_per_byte_goes_before_older_ones() -> None:
    shelf = Shelf(page_bytes=1, slot_bytes=10)
    shelf.insert("a" * 9, slot=1)  # 9 tokens / 19 bytes
    shelf.insert("b", slot=2)  # 1 / 11
    shelf.insert("c" * 5, slot=3)  # 5 / 15
    assert [shelf.evicted() for _ in range(3)] == [2, 3, 1]


def test_what_is_not_used_sinks_below_cheaper_states_that_are() -> None:
    shelf = Shelf(page_bytes=1, slot_bytes=10)
    shelf.insert("a" * 10, slot=0)  # H 0.5
    for slot in range(1, 6):  # H 1/6 above the clock, which it becomes
        shelf.insert(f"b{slot}", slot)
        if shelf.evicted() == 0:
            break
    assert shelf.slots == [1, 2, 0]


def test_the_clock_never_runs_back() -> None:
    shelf = Shelf(page_bytes=10, slot_bytes=10)
    top = shelf.insert("a" * 10, slot=1).checkpoint  # 10 tokens / 10 bytes as long as something is below it
    shelf.insert("a" * 10 + "b" * 9, slot=2, parent=top)  # 9 / 100
    assert shelf.evicted("page") == 2  # clock 0.09
    shelf.insert("cc", slot=3)  # 0.09 + 2 / 30
    shelf.cache.pin(top)
    assert shelf.evicted() == 3  # clock 0.157
    shelf.cache.unpin(top)
    lone = shelf.insert("d" * 10, slot=4).checkpoint
    assert top.clock == lone.clock == pytest.approx(0.09 + 2 / 30)


@pytest.mark.parametrize("want", ["page", "slot"])
def test_a_state_with_something_below_it_frees_its_slot_alone(want: Literal["page", "slot"]) -> None:
    shelf = Shelf()
    top = shelf.insert("a", slot=1).checkpoint
    below = shelf.insert("abcdefgh", slot=2, parent=top).checkpoint
    shelf.cache.pin(below)
    assert shelf.evicted(want) == 1
    assert not shelf.cache.evict(want)
    assert shelf.pages == [] and not top.alive
    assert shelf.cache.pages_of(below) == [10, *range(21, 28)]
    assert shelf.match("abc") == (None, 3)


def test_a_branch_point_whose_state_went_still_joins_what_is_below_it() -> None:
    shelf = Shelf()
    top = shelf.insert("ab", slot=1).checkpoint
    left = shelf.insert("abcd", slot=2, parent=top).checkpoint
    right = shelf.insert("abxy", slot=3, parent=top).checkpoint
    shelf.cache.pin(left)
    shelf.cache.pin(right)
    assert shelf.evicted("slot") == 1
    assert shelf.match("ab") == (None, 2)
    shelf.cache.unpin(left)
    assert shelf.evicted("page") == 2
    assert shelf.pages == [22, 23]
    assert right.parent is None and shelf.cache.pages_of(right) == [10, 11, 32, 33]


def test_clear_leaves_what_is_pinned_and_the_pages_that_it_needs() -> None:
    shelf = Shelf()
    top = shelf.insert("ab", slot=1).checkpoint
    kept = shelf.insert("abcd", slot=2, parent=top).checkpoint
    shelf.insert("abcdef", slot=3, parent=kept)
    shelf.insert("xy", slot=4)
    shelf.cache.pin(kept)
    assert shelf.cache.clear() == 3
    assert sorted(shelf.pages) == [34, 35, 40, 41] and sorted(shelf.slots) == [1, 3, 4]
    assert shelf.match("abcdef") == (2, 4)
    shelf.cache.unpin(kept)
    assert shelf.cache.clear() == 1
    assert shelf.cache.num_pages == shelf.cache.num_checkpoints == 0
    assert shelf.cache.num_evictions == 4


def test_states_of_no_bytes_can_be_evicted() -> None:
    shelf = Shelf(slot_bytes=0)
    top = shelf.insert("ab", slot=1).checkpoint
    shelf.insert("abcd", slot=2, parent=top)
    assert shelf.cache.clear() == 2


def test_use_without_eviction_leaves_no_trace_behind() -> None:
    shelf = Shelf()
    for slot, text in enumerate(("ab", "abcd")):
        shelf.insert(text, slot)
    for _ in range(1000):
        for text in ("ab", "abcd"):
            checkpoint = shelf.cache.match(named(text)).checkpoint
            assert checkpoint
            shelf.cache.pin(checkpoint)
            shelf.cache.unpin(checkpoint)
    assert len(shelf.cache._leaves) + len(shelf.cache._inner) < 200
    shelf.cache.check()
    assert [shelf.evicted() for _ in range(2)] == [1, 0]


def test_wrong_use_is_an_error_that_changes_nothing() -> None:
    shelf = Shelf()
    gone = shelf.insert("xy", slot=1).checkpoint
    assert shelf.evicted() == 1
    stays = shelf.insert("ab", slot=2).checkpoint
    with pytest.raises(RuntimeError, match="evicted checkpoint is to be pinned"):
        shelf.cache.pin(gone)
    with pytest.raises(RuntimeError, match="more often"):
        shelf.cache.unpin(stays)
    with pytest.raises(RuntimeError, match="stands on an evicted"):
        shelf.insert("xyz", slot=3, parent=gone)
    for text in ("axc", "a"):
        with pytest.raises(RuntimeError, match="isn't on its path"):
            shelf.insert(text, slot=3, parent=stays)
    with pytest.raises(RuntimeError, match="3 digests are given for 2 pages"):
        shelf.cache.insert(None, named("abc"), [10, 11], 3)
    with pytest.raises(RuntimeError, match="0 digests"):
        shelf.cache.insert(None, [], [], 3)
    shelf.cache.check()
    assert shelf.match("abc") == (2, 2) and shelf.cache.num_slots == 1


@pytest.mark.parametrize("wreck", ["page", "slot", "digest", "child", "length"])
def test_a_broken_index_is_noticed(wreck: str) -> None:
    shelf = Shelf()
    top = shelf.insert("ab", slot=1).checkpoint
    below = shelf.insert("abcd", slot=2, parent=top).checkpoint
    shelf.cache.check()
    if wreck == "page":
        below.run[0] = 10
    elif wreck == "slot":
        below.slot = 1
    elif wreck == "digest":
        below.run_digests[0] = named("x")[0]
    elif wreck == "child":
        top.children.clear()
    else:
        below.num_tokens += 1
    with pytest.raises(RuntimeError):
        shelf.cache.check()
