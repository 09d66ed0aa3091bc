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
from longspan.memory.sizes import page_layout, page_stride, pages_per_slab, slot_layout

GIB = 2**30
DEFAULT_NUM_SEQS = 64
DEFAULT_CACHE_BYTES = GIB
"""Pages a small model gets if nothing is asked for: plenty for it, and little of the machine."""


@dataclass(frozen=True)
class MemoryPlan:
    """Sizes of one engine. All bytes together are an upper bound of what it takes beside Python itself.

    The cache is one arena of slabs. A slab is the KDA state of a running sequence or of a checkpoint of the
    prefix cache, or `pages_per_slab` pages, whichever is needed.
    """

    page_size: int
    pages_per_slab: int
    num_slabs: int
    max_num_seqs: int  # sequences that can run at once
    max_model_len: int
    slab_bytes: int = 0
    swap_bytes: int = 0  # of the host pool, taken as sequences are swapped out
    weight_bytes: int = 0  # mapped from the files, so the system may drop and read them again
    activation_bytes: int = 0

    @property
    def cache_bytes(self) -> int:
        return self.num_slabs * self.slab_bytes

    @property
    def total_bytes(self) -> int:
        return self.cache_bytes + self.swap_bytes + self.weight_bytes + self.activation_bytes

    def lines(self) -> list[tuple[str, str, str]]:
        """(what, size, remark) of each part, for people."""
        tokens = self.pages_per_slab * self.page_size
        return [
            ("weights", show_bytes(self.weight_bytes), "mapped from the checkpoint"),
            (
                "cache",
                show_bytes(self.cache_bytes),
                f"{self.num_slabs} slabs of {show_bytes(self.slab_bytes)}, each a KDA state or {tokens} "
                f"tokens; for up to {self.max_num_seqs} running sequences and the prefix cache",
            ),
            ("host pool", show_bytes(self.swap_bytes), "for sequences that are preempted"),
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
    swap_gib: float | None = None,
    weight_bytes: int = 0,
    available_bytes: int | None = None,
) -> MemoryPlan:
    """`element_bytes` of the model's dtype; `extra_logit_rows` of a step beside one for each sequence;
    `available_bytes` None: what the machine has free now.

    `cache_gib` None: enough for one longest sequence and for all KDA states, at least DEFAULT_CACHE_BYTES,
    but never more than half of the room beside the weights. `swap_gib` None: a quarter of the cache, if there
    is room. Cache, host pool and activations together must fit in that room. Raises CapacityError.
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
    page_bytes = page_layout(config, page_size, element_bytes, index_key_dtype).num_bytes
    slot_bytes = slot_layout(config, element_bytes).num_bytes
    per_slab = pages_per_slab(page_bytes, slot_bytes)
    slab = _Slab(page_size * per_slab, per_slab * page_stride(page_bytes, slot_bytes, per_slab))
    wanted = slab.count_for(max_model_len or longest)
    available = available_memory() if available_bytes is None else available_bytes
    # Weights are mapped: where they are larger than memory they are read again and again, and still serve.
    room = max(available - weight_bytes, available // 4)
    if cache_gib is not None:
        budget = min(int(cache_gib * GIB), room)  # more is refused below, unless it would never be used
    else:
        states = (max_num_seqs or DEFAULT_NUM_SEQS) * slab.num_bytes
        budget = min(room // 2, max(wanted * slab.num_bytes, DEFAULT_CACHE_BYTES) + states)
    num_slabs = budget // slab.num_bytes

    # What must be there, so that one sequence runs; how many run beside it is left open or asked for.
    needed = wanted if max_model_len is not None else 1
    num_seqs = max_num_seqs
    if num_seqs is None:
        for_states = num_slabs - (needed if max_model_len is not None else num_slabs // 2)
        num_seqs = max(1, min(DEFAULT_NUM_SEQS, for_states))
    if num_slabs < needed + num_seqs:
        raise _too_small(budget, room, slab, max_num_seqs, max_model_len)
    logit_rows = num_seqs + extra_logit_rows
    step_bytes = activation_bytes(config, max_num_batched_tokens, logit_rows, element_bytes)
    left = max(0, room - num_slabs * slab.num_bytes - step_bytes)
    swap_bytes = int(swap_gib * GIB) if swap_gib is not None else min(num_slabs * slab.num_bytes // 4, left)
    plan = MemoryPlan(
        page_size=page_size,
        pages_per_slab=per_slab,
        num_slabs=num_slabs,
        max_num_seqs=num_seqs,
        max_model_len=max_model_len or min(longest, (num_slabs - 1) * slab.num_tokens),
        slab_bytes=slab.num_bytes,
        swap_bytes=swap_bytes,
        weight_bytes=weight_bytes,
        activation_bytes=step_bytes,
    )
    if plan.cache_bytes + plan.swap_bytes + plan.activation_bytes > room:
        tokens = bisect_right(
            range(max_num_batched_tokens),
            room - plan.cache_bytes - (plan.swap_bytes if swap_gib is not None else 0),
            key=lambda count: activation_bytes(config, count, logit_rows, element_bytes),
        )
        least_cache = (needed + (max_num_seqs or 1)) * slab.num_bytes
        raise _too_large(plan, room, available, least_cache, largest_step=tokens - 1)
    return plan


@dataclass(frozen=True)
class _Slab:
    """What one slab holds: one state, or this many tokens."""

    num_tokens: int
    num_bytes: int

    def count_for(self, num_tokens: int) -> int:
        return ceil(num_tokens / self.num_tokens)


def _too_large(
    plan: MemoryPlan, room: int, available: int, least_cache: int, largest_step: int
) -> CapacityError:
    """The error for cache and activations beyond `room`, with the largest legal number of each."""
    remedies = []
    gib = floor(100 * (room - plan.activation_bytes - plan.swap_bytes) / GIB) / 100
    if gib * GIB >= least_cache:
        remedies.append(f"give --cache-gib {gib:.2f}")
    if largest_step > 0:
        remedies.append(f"lower --max-num-batched-tokens to {largest_step}")
    remedies = remedies or ["lower --cache-gib, --max-num-batched-tokens and --max-num-seqs together"]
    swap = f", the host pool of {show_bytes(plan.swap_bytes)}" if plan.swap_bytes else ""
    return CapacityError(
        f"The cache of {show_bytes(plan.cache_bytes)}{swap} and a step of "
        f"{show_bytes(plan.activation_bytes)} don't fit: {show_bytes(available)} are free, "
        f"of which they may take {show_bytes(room)} "
        f"beside the weights of {show_bytes(plan.weight_bytes)}.",
        remedy=f"Free some memory, or {', or '.join(remedies)}.",
    )


def _too_small(
    budget: int, room: int, slab: _Slab, max_num_seqs: int | None, max_model_len: int | None
) -> CapacityError:
    """The error for a budget that can't hold what was asked for, with the largest numbers that it can."""
    states, length = max_num_seqs or 1, max_model_len or 2
    fitting = budget // slab.num_bytes
    needed = (states + slab.count_for(length)) * slab.num_bytes
    gib = ceil(100 * needed / GIB) / 100
    remedies = [f"give --cache-gib {gib:.2f}"] if gib * GIB <= room else []
    fitting_states = fitting - slab.count_for(length)
    if max_num_seqs is not None and fitting_states > 0:
        remedies.append(f"lower --max-num-seqs to {fitting_states}")
    if max_model_len is not None and fitting > states:
        remedies.append(f"lower --max-model-len to {(fitting - states) * slab.num_tokens}")
    return CapacityError(
        f"The cache of {show_bytes(budget)} can't hold {states} KDA state{'s' * (states > 1)} and one "
        f"sequence of {length} tokens, in slabs of {show_bytes(slab.num_bytes)}, each a state or "
        f"{slab.num_tokens} tokens: that takes {show_bytes(needed)}.",
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
