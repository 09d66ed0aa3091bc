"""Index of cached prefixes of a hybrid model: what can be used again, what goes first (no torch).

A sequence can go on from a prefix if all memory kinds are there: the pages of all its tokens (latents and
index keys) and the KDA state after its last one. Pages can be cut anywhere, a state can't, so a cached
prefix exists only as a checkpoint: one state (a slot) after a whole number of pages. A hit is the minimum
over all kinds by construction.

The tree. A page is named by a digest chained over everything before it, the seed included. A node is a run
of pages; every digest is in one run only, and whatever begins with it is below it. A node that ends in a
state is a `Checkpoint`; a plain `Node` is a fork, from which two or more go on. Every page is needed by a
checkpoint at or below it. Of two prefixes where one begins with the other, the longer is below the shorter,
so who stands on the longer one keeps all pages of the shorter.

    [system prompt]* --- [chat A, turn 1]* --- [turn 2]*        * ends in a state
                     +-- [chat B] --- [one answer]*             B is a fork: two samples of one prompt
                                  +-- [another answer]*

What goes first. GreedyDual-Size, an LRU with a cost per byte. A checkpoint is worth

    H = clock at its last use + (tokens to compute again without it) / (bytes that it frees)

The least H goes, of equal ones the longest unused, and the clock becomes this H, so what isn't used sinks.
A leaf frees its slot and its run. What has something below it frees its slot alone: its run joins the run
below, or stays as a fork. A pinned checkpoint stays, and so do all pages above it; states above it may go,
even for a page once no leaf is left.

Order. A state is published once the step that copied it is over and was found finite. What is done to bytes
is done in the order in which it was planned here: who finds a checkpoint reads what was published.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from heapq import heapify, heappop, heappush, heapreplace
from typing import Literal

DIGEST_BYTES = 16


def page_digests(
    token_ids: Sequence[int], page_size: int, seed: bytes = b"", known: list[bytes] | None = None
) -> list[bytes]:
    """Digest i names the first (i + 1) * page_size tokens and `seed` (all else that the content depends on).

    `known` are digests of the first pages, already computed with this seed: extended in place and returned.
    """
    digests = [] if known is None else known
    first = len(digests) * page_size
    num_pages = (len(token_ids) - first) // page_size
    content = array("q", token_ids[first : first + num_pages * page_size]).tobytes()
    page_bytes = 8 * page_size
    # `person` keeps a seed chosen to look like a page from naming the same thing.
    digest = digests[-1] if digests else blake2b(seed, digest_size=DIGEST_BYTES, person=b"seed").digest()
    for start in range(0, num_pages * page_bytes, page_bytes):
        page = content[start : start + page_bytes]
        digest = blake2b(digest + page, digest_size=DIGEST_BYTES, person=b"page").digest()
        digests.append(digest)
    return digests


@dataclass(eq=False, kw_only=True)
class Node:
    """`run`: the pages after those of `parent`, with their digests. `num_tokens` counts from the root."""

    parent: Node | None
    num_tokens: int
    run: list[int]
    run_digests: list[bytes]
    children: set[Node] = field(default_factory=set)

    @property
    def digest(self) -> bytes:
        return self.run_digests[-1]


@dataclass(eq=False, kw_only=True)
class Checkpoint(Node):
    """`slot` holds the state after `num_tokens` tokens. `pins` counts users; not `alive` once evicted."""

    slot: int
    pins: int = 0
    alive: bool = True
    clock: float = 0.0  # at the last use
    used: int = 0  # number of the last use
    ticket: int = 0  # of its one entry in a heap that counts, 0 = none


@dataclass(frozen=True)
class Match:
    """`num_pages_seen` leading pages are cached, some beyond the checkpoint if others share more tokens."""

    checkpoint: Checkpoint | None
    num_pages_seen: int


@dataclass(frozen=True)
class Inserted:
    """`taken` pages belong to the cache from now on; not `is_new`: it was there, and the slot isn't taken."""

    checkpoint: Checkpoint
    taken: list[int]
    is_new: bool


Heap = list[tuple[float, int, int, Checkpoint]]  # H, number of the last use, ticket


class PrefixCache:
    """Owns the pages and slots of all checkpoints; `give_back(pages, slots)` returns those of evicted ones.

    Pins are counted. Who uses pages of the cache keeps a checkpoint at or below them pinned. A use is an
    insert, a touch, or the end of the last pin.
    """

    def __init__(
        self,
        page_size: int,
        page_bytes: int,
        slot_bytes: int,
        give_back: Callable[[list[int], list[int]], None],
    ) -> None:
        self.page_size = page_size
        self.num_checkpoints = 0
        self.num_evictions = 0
        self._page_bytes = page_bytes
        self._slot_bytes = max(slot_bytes, 1)  # without KDA layers a state has no bytes
        self._give_back = give_back
        self._owner: dict[bytes, Node] = {}
        self._pinned: set[Checkpoint] = set()
        self._leaves: Heap = []
        self._inner: Heap = []
        self._clock = 0.0
        self._num_uses = 0
        self._num_tickets = 0

    @property
    def num_pages(self) -> int:
        return len(self._owner)

    @property
    def num_slots(self) -> int:
        return self.num_checkpoints

    def pinned(self) -> tuple[int, int]:
        """How many pages and slots no eviction gives back now."""
        seen: set[Node] = set()
        for checkpoint in self._pinned:
            node: Node | None = checkpoint
            while node and node not in seen:
                seen.add(node)
                node = node.parent
        return sum(len(node.run) for node in seen), len(self._pinned)

    def match(self, digests: list[bytes]) -> Match:
        """The deepest checkpoint on the path of `digests`. It may go with the next eviction unless pinned."""
        num_seen = self._num_seen(digests)
        node = self._owner[digests[num_seen - 1]] if num_seen else None
        if node and node.num_tokens > num_seen * self.page_size:  # the path ends inside this run
            node = node.parent
        return Match(node if isinstance(node, Checkpoint) else _checkpoint_above(node), num_seen)

    def pages_of(self, checkpoint: Checkpoint) -> list[int]:
        """All pages from the root to the state."""
        runs: list[list[int]] = []
        node: Node | None = checkpoint
        while node:
            runs.append(node.run)
            node = node.parent
        return [page for run in reversed(runs) for page in run]

    def touch(self, checkpoint: Checkpoint) -> None:
        """It is used now."""
        self._num_uses += 1
        checkpoint.clock, checkpoint.used = self._clock, self._num_uses

    def pin(self, checkpoint: Checkpoint) -> None:
        _expect(checkpoint.alive, "An evicted checkpoint is to be pinned.")
        checkpoint.pins += 1
        self._pinned.add(checkpoint)

    def unpin(self, checkpoint: Checkpoint) -> None:
        _expect(checkpoint.pins > 0, "A checkpoint is to be unpinned more often than it was pinned.")
        checkpoint.pins -= 1
        if not checkpoint.pins:
            self._pinned.remove(checkpoint)
            self.touch(checkpoint)
            self._rank(checkpoint)

    def insert(
        self, parent: Checkpoint | None, digests: list[bytes], pages: list[int], slot: int
    ) -> Inserted:
        """Publishes the state in `slot` after the pages of `digests`, both from the root on.

        `parent` is the pinned checkpoint that the sequence stands on. Of pages that the cache has already
        the caller keeps its own twins. It may now stand on the checkpoint returned, new or not: `parent` is
        above that.
        """
        self._check_path(parent, digests, pages)
        num_seen = self._num_seen(digests)
        above = self._owner[digests[num_seen - 1]] if num_seen else None
        if above and above.num_tokens > num_seen * self.page_size:
            above = self._split(above, num_seen)
        if above and num_seen == len(digests) and isinstance(above, Checkpoint):
            return Inserted(above, [], is_new=False)
        taken = pages[num_seen : len(digests)]
        checkpoint = Checkpoint(
            parent=above,
            num_tokens=len(digests) * self.page_size,
            run=taken,
            run_digests=digests[num_seen:],
            slot=slot,
        )
        if num_seen == len(digests):
            assert above is not None
            self._replace(above, checkpoint)
        else:
            self._own(checkpoint)
            if above:
                above.children.add(checkpoint)
        self.num_checkpoints += 1
        self.touch(checkpoint)
        # Those around it are worth another H now: one leaf less above, less to compute again below.
        for near in (checkpoint, _checkpoint_above(checkpoint), *_checkpoints_below(checkpoint)):
            if near:
                self._rank(near)
        return Inserted(checkpoint, list(taken), is_new=True)

    def evict(self, want: Literal["page", "slot"]) -> bool:
        """Evicts the unpinned checkpoint of least H, for a page a leaf if there is one. False: none."""
        tops = [top for heap in (self._leaves, self._inner) if (top := self._top(heap))]
        if not tops:
            return False
        if want == "page":
            del tops[1:]
        worth, _, _, checkpoint = min(tops)
        self._clock = max(self._clock, worth)
        self.num_evictions += 1
        self._remove(checkpoint)
        return True

    def drop(self, checkpoint: Checkpoint) -> bool:
        """Gives up a state for those further down its path; False if it is pinned, evicted or a leaf."""
        if checkpoint.pins or not checkpoint.alive or not checkpoint.children:
            return False
        self._remove(checkpoint)
        return True

    def clear(self) -> int:
        """Evicts every unpinned checkpoint; how many they were. What pinned ones need stays."""
        before = self.num_evictions
        while self.evict("slot"):
            pass
        return self.num_evictions - before

    def held_pages(self) -> list[int]:
        return [page for node in self._nodes() for page in node.run]

    def held_slots(self) -> list[int]:
        return [node.slot for node in self._nodes() if isinstance(node, Checkpoint)]

    def check(self) -> None:
        """Raises RuntimeError if the tree, the digests or the heaps contradict each other."""
        pages, slots = self.held_pages(), self.held_slots()
        _expect(len(set(pages)) == len(pages) == self.num_pages, "A page is in two runs, or in none.")
        _expect(len(set(slots)) == len(slots) == self.num_slots, "A slot is in two checkpoints.")
        entries = {entry[2]: (entry, heap) for heap in (self._leaves, self._inner) for entry in heap}
        nodes = self._nodes()
        for node in nodes:
            above = node.parent.num_tokens if node.parent else 0
            _expect(len(node.run) == len(node.run_digests) > 0, "A run lacks pages or digests.")
            _expect(all(self._owner.get(each) is node for each in node.run_digests), "A digest is astray.")
            _expect(node.num_tokens == above + len(node.run) * self.page_size, "A run has the wrong length.")
            _expect(node.parent is None or node in node.parent.children, "A node isn't below its parent.")
            _expect(node.children <= nodes, "A node below isn't in the tree.")
            _expect(all(child.parent is node for child in node.children), "A child has another parent.")
            if not isinstance(node, Checkpoint):
                _expect(len(node.children) > 1, "A fork has fewer than two runs below it.")
                continue
            _expect(node.alive and node.pins >= 0, "A checkpoint in the tree is evicted.")
            if not node.pins:
                entry, heap = entries.get(node.ticket, (None, None))
                _expect(entry is not None and entry[3] is node, "A checkpoint can't be evicted.")
                _expect(heap is (self._inner if node.children else self._leaves), "It is in the wrong heap.")
                _expect(entry is None or entry[:2] <= (self._worth(node), node.used), "Its H is too high.")

    def _num_seen(self, digests: list[bytes]) -> int:
        # All digests before a cached one are cached too, so the first missing one is found by halving.
        return bisect_left(digests, True, key=lambda digest: digest not in self._owner)

    def _nodes(self) -> set[Node]:
        return set(self._owner.values())

    def _own(self, node: Node) -> None:
        self._owner.update(dict.fromkeys(node.run_digests, node))

    def _split(self, node: Node, num_pages: int) -> Node:
        """A fork after the first `num_pages` pages from the root, inside the run of `node`."""
        cut = num_pages - (node.num_tokens // self.page_size - len(node.run))
        fork = Node(
            parent=node.parent,
            num_tokens=num_pages * self.page_size,
            run=node.run[:cut],
            run_digests=node.run_digests[:cut],
            children={node},
        )
        if node.parent:
            node.parent.children.remove(node)
            node.parent.children.add(fork)
        node.parent = fork
        del node.run[:cut], node.run_digests[:cut]
        self._own(fork)
        return fork

    def _replace(self, old: Node, new: Node) -> None:
        """`new` takes the place of `old` in the tree, and all that it has."""
        new.parent, new.children = old.parent, old.children
        new.run, new.run_digests = old.run, old.run_digests
        if new.parent:
            new.parent.children.remove(old)
            new.parent.children.add(new)
        for child in new.children:
            child.parent = new
        self._own(new)

    def _remove(self, checkpoint: Checkpoint) -> None:
        checkpoint.alive = False
        checkpoint.ticket = 0
        self.num_checkpoints -= 1
        if checkpoint.children:
            fork = Node(parent=None, num_tokens=checkpoint.num_tokens, run=[], run_digests=[])
            self._replace(checkpoint, fork)
            self._join(fork)
            self._give_back([], [checkpoint.slot])
        else:
            self._cut_off(checkpoint)
            self._give_back(checkpoint.run, [checkpoint.slot])

    def _join(self, fork: Node) -> None:
        """Puts the run of a fork that forks no more in front of what is left below it."""
        if len(fork.children) > 1:
            return
        (child,) = fork.children
        child.parent = fork.parent
        child.run[:0] = fork.run
        child.run_digests[:0] = fork.run_digests
        if fork.parent:
            fork.parent.children.remove(fork)
            fork.parent.children.add(child)
        self._owner.update(dict.fromkeys(fork.run_digests, child))
        if isinstance(child, Checkpoint):
            self._rank(child)

    def _cut_off(self, leaf: Checkpoint) -> None:
        for digest in leaf.run_digests:
            del self._owner[digest]
        parent = leaf.parent
        if parent is None:
            return
        parent.children.remove(leaf)
        if not isinstance(parent, Checkpoint):
            self._join(parent)
        elif not parent.children:
            self._rank(parent)

    def _worth(self, checkpoint: Checkpoint) -> float:
        above = _checkpoint_above(checkpoint)
        cost = checkpoint.num_tokens - (above.num_tokens if above else 0)
        freed = self._slot_bytes + (0 if checkpoint.children else len(checkpoint.run) * self._page_bytes)
        return checkpoint.clock + cost / freed

    def _rank(self, checkpoint: Checkpoint) -> None:
        """Enters it with its H of now: when H falls or its heap changes. That H rose is seen by `_top`."""
        heap = self._inner if checkpoint.children else self._leaves
        if len(heap) > 2 * self.num_checkpoints + 64:  # mostly entries that count no more
            heap[:] = [entry for entry in heap if entry[2] == entry[3].ticket]
            heapify(heap)
        self._num_tickets += 1
        checkpoint.ticket = self._num_tickets
        heappush(heap, (self._worth(checkpoint), checkpoint.used, checkpoint.ticket, checkpoint))

    def _top(self, heap: Heap) -> tuple[float, int, int, Checkpoint] | None:
        """The entry of least H among the unpinned of this heap, with its H of now."""
        while heap:
            worth, used, ticket, checkpoint = heap[0]
            if ticket != checkpoint.ticket or checkpoint.pins:
                heappop(heap)
            elif (worth, used) != (now := (self._worth(checkpoint), checkpoint.used)):
                heapreplace(heap, (*now, ticket, checkpoint))
            else:
                return heap[0]
        return None

    def _check_path(self, start: Checkpoint | None, digests: list[bytes], pages: list[int]) -> None:
        _expect(0 < len(digests) <= len(pages), f"{len(digests)} digests are given for {len(pages)} pages.")
        if start:
            num_pages = start.num_tokens // self.page_size
            _expect(start.alive, "The sequence stands on an evicted checkpoint.")
            _expect(
                num_pages <= len(digests) and digests[num_pages - 1] == start.digest,
                "The sequence stands on a checkpoint that isn't on its path.",
            )


def _checkpoint_above(node: Node | None) -> Checkpoint | None:
    while node and (node := node.parent):
        if isinstance(node, Checkpoint):
            return node
    return None


def _checkpoints_below(node: Node) -> Iterator[Checkpoint]:
    """The nearest on every way down."""
    rest = list(node.children)
    while rest:
        child = rest.pop()
        if isinstance(child, Checkpoint):
            yield child
        else:
            rest += child.children


def _expect(holds: bool, message: str) -> None:
    if not holds:
        raise RuntimeError(message)
