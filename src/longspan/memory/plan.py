"""What an engine will hold, worked out before weights are read.

What was asked for is met or refused with the largest legal number; what was left open is chosen to fit.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from contextlib import suppress
from dataclasses import dataclass
from math import ceil, floor
from pathlib import Path

from longspan.config import ModelConfig
from longspan.errors import CapacityError
from longspan.memory.activations import activation_bytes
from longspan.memory.sizes import bytes_per_sequence, bytes_per_token

GIB = 2**30
DEFAULT_NUM_SEQS = 64
DEFAULT_CACHE_BYTES = GIB
"""Pages a small model gets if nothing is asked for: plenty for it, and little of the machine."""


@dataclass(frozen=True)
class MemoryPlan:
    """Sizes of one engine. All bytes together are an upper bound of what it takes beside Python itself."""

    page_size: int
    num_pages: int
    num_slots: int  # sequences that can run at once
    max_model_len: int
    page_bytes: int = 0
    slot_bytes: int = 0
    weight_bytes: int = 0  # mapped from the files, so the system may drop and read them again
    activation_bytes: int = 0

    @property
    def cache_bytes(self) -> int:
        return self.num_pages * self.page_bytes + self.num_slots * self.slot_bytes

    @property
    def total_bytes(self) -> int:
        return self.cache_bytes + self.weight_bytes + self.activation_bytes

    def lines(self) -> list[tuple[str, str, str]]:
        """(what, size, remark) of each part, for people."""
        tokens = self.num_pages * self.page_size
        return [
            ("weights", show_bytes(self.weight_bytes), "mapped from the checkpoint"),
            (
                "cache pages",
                show_bytes(self.num_pages * self.page_bytes),
                f"{self.num_pages} of {self.page_size} tokens, {tokens} in all",
            ),
            (
                "KDA states",
                show_bytes(self.num_slots * self.slot_bytes),
                f"{self.num_slots} sequences at once",
            ),
            ("activations", show_bytes(self.activation_bytes), "of the largest step"),
            (
                "total, at most",
                show_bytes(self.total_bytes),
                f"sequences of up to {self.max_model_len} tokens",
            ),
        ]


def plan_memory(
    config: ModelConfig,
    *,
    element_bytes: int,
    index_key_dtype: str = "auto",
    page_size: int,
    max_num_batched_tokens: int,
    extra_logit_rows: int = 0,
    max_num_seqs: int | None = None,
    max_model_len: int | None = None,
    cache_gib: float | None = None,
    weight_bytes: int = 0,
    available_bytes: int | None = None,
) -> MemoryPlan:
    """`element_bytes` of the model's dtype; `extra_logit_rows` of a step beside one for each sequence;
    `available_bytes` None: what the machine has free now.

    `cache_gib` None: enough for one longest sequence and for all KDA states, at least DEFAULT_CACHE_BYTES,
    but never more than half of the room beside the weights. Cache and activations together must fit in that
    room. Raises CapacityError.
    """
    if index_key_dtype != "auto" and config.indexer is None:
        raise CapacityError(
            f"index_key_dtype is {index_key_dtype!r}, but this model has no sparse indexer.",
            remedy="Leave --index-key-dtype out.",
        )
    longest = config.max_position
    if max_model_len is not None and max_model_len > longest:
        raise CapacityError(
            f"max_model_len is {max_model_len}, the model was made for {longest} tokens.",
            remedy=f"Ask for at most {longest}.",
        )
    page_bytes = page_size * bytes_per_token(config, element_bytes, index_key_dtype).total
    slot_bytes = bytes_per_sequence(config, element_bytes).total
    wanted_pages = ceil((max_model_len or longest) / page_size)
    wanted_slots = max_num_seqs or DEFAULT_NUM_SEQS
    available = available_memory() if available_bytes is None else available_bytes
    # Weights are mapped: where they are larger than memory they are read again and again, and still serve.
    room = max(available - weight_bytes, available // 4)
    if cache_gib is not None:
        budget = min(int(cache_gib * GIB), room)  # more is refused below, unless it would never be used
    else:
        budget = min(
            room // 2, max(wanted_pages * page_bytes, DEFAULT_CACHE_BYTES) + wanted_slots * slot_bytes
        )

    # What must be there, so that one sequence runs; the rest of the budget goes to whatever was left open.
    needed_pages = wanted_pages if max_model_len is not None else ceil(2 / page_size)
    num_slots = max_num_seqs
    if num_slots is None:
        for_slots = budget - (needed_pages * page_bytes if max_model_len is not None else budget // 2)
        num_slots = max(1, min(DEFAULT_NUM_SEQS, for_slots // slot_bytes))
    num_pages = (budget - num_slots * slot_bytes) // page_bytes
    if num_pages < needed_pages:
        raise _too_small(budget, room, page_size, page_bytes, slot_bytes, max_num_seqs, max_model_len)
    num_pages = min(num_pages, num_slots * wanted_pages)
    logit_rows = num_slots + extra_logit_rows
    plan = MemoryPlan(
        page_size=page_size,
        num_pages=num_pages,
        num_slots=num_slots,
        max_model_len=max_model_len or min(longest, num_pages * page_size),
        page_bytes=page_bytes,
        slot_bytes=slot_bytes,
        weight_bytes=weight_bytes,
        activation_bytes=activation_bytes(config, max_num_batched_tokens, logit_rows, element_bytes),
    )
    if plan.cache_bytes + plan.activation_bytes > room:
        tokens = bisect_right(
            range(max_num_batched_tokens),
            room - plan.cache_bytes,
            key=lambda count: activation_bytes(config, count, logit_rows, element_bytes),
        )
        least_cache = needed_pages * page_bytes + (max_num_seqs or 1) * slot_bytes
        raise _too_large(plan, room, available, least_cache, largest_step=tokens - 1)
    return plan


def _too_large(
    plan: MemoryPlan, room: int, available: int, least_cache: int, largest_step: int
) -> CapacityError:
    """The error for cache and activations beyond `room`, with the largest legal number of each."""
    remedies = []
    gib = floor(100 * (room - plan.activation_bytes) / GIB) / 100
    if gib * GIB >= least_cache:
        remedies.append(f"give --cache-gib {gib:.2f}")
    if largest_step > 0:
        remedies.append(f"lower --max-num-batched-tokens to {largest_step}")
    remedies = remedies or ["lower --cache-gib, --max-num-batched-tokens and --max-num-seqs together"]
    return CapacityError(
        f"The cache of {show_bytes(plan.cache_bytes)} and a step of {show_bytes(plan.activation_bytes)} "
        f"don't fit: {show_bytes(available)} are free, of which they may take {show_bytes(room)} "
        f"beside the weights of {show_bytes(plan.weight_bytes)}.",
        remedy=f"Free some memory, or {', or '.join(remedies)}.",
    )


def _too_small(
    budget: int,
    room: int,
    page_size: int,
    page_bytes: int,
    slot_bytes: int,
    max_num_seqs: int | None,
    max_model_len: int | None,
) -> CapacityError:
    """The error for a budget that can't hold what was asked for, with the largest numbers that it can."""
    pages = ceil((max_model_len or 2) / page_size)
    slots = max_num_seqs or 1
    needed = pages * page_bytes + slots * slot_bytes
    gib = ceil(100 * needed / GIB) / 100
    remedies = [f"give --cache-gib {gib:.2f}"] if gib * GIB <= room else []
    fitting_slots = (budget - pages * page_bytes) // slot_bytes
    if max_num_seqs is not None and fitting_slots > 0:
        remedies.append(f"lower --max-num-seqs to {fitting_slots}")
    fitting_tokens = (budget - slots * slot_bytes) // page_bytes * page_size
    if max_model_len is not None and fitting_tokens >= 2:
        remedies.append(f"lower --max-model-len to {fitting_tokens}")
    return CapacityError(
        f"The cache of {show_bytes(budget)} can't hold {slots} KDA state{'s' * (slots > 1)} of "
        f"{show_bytes(slot_bytes)} and {pages} page{'s' * (pages > 1)} of {show_bytes(page_bytes)} "
        f"for one sequence of {max_model_len or 2} tokens: that takes {show_bytes(needed)}.",
        remedy=f"To mend it, {', or '.join(remedies or ['free some memory'])}.",
    )


def available_memory() -> int:
    """Bytes that can be had without swapping, as far as the system says, limits of a container included."""
    limits = []
    try:
        meminfo = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        limits.append(int(meminfo["MemAvailable"].split()[0]) * 1024)
    except (OSError, KeyError, ValueError):
        limits.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    with suppress(OSError, ValueError, KeyError):  # no container, or one without a limit
        limits.append(left_in_container(Path("/sys/fs/cgroup")))
    return max(min(limits), 0)


def left_in_container(group: Path) -> int:
    """Bytes up to the limit of this cgroup (version 2); cached files make way, so they count as free."""
    limit, used = (int((group / f"memory.{name}").read_text()) for name in ("max", "current"))
    stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    return limit - used + int(stat["active_file"]) + int(stat["inactive_file"])


def show_bytes(count: int) -> str:
    """1536 -> "1.5 KiB"."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
