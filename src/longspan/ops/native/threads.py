"""How many threads compute, and on which processors."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path

import torch

from longspan.errors import CapacityError
from longspan.ops.native.extension import extension

NO_QUOTA = 1 << 30


def use_threads(threads: int | None, cpus: Sequence[int]) -> None:
    """Sets up the pool that all native operators of the process share, caller included.

    `threads` None: one for each of `cpus`, or without them one for each core that the process may use. With
    `cpus`, thread i > 0 stays on cpus[i]; the caller's own affinity is left alone. CapacityError for
    processors that the process may not use.

    What torch still does beside the operators is small, so torch gets one thread: two pools on the same
    cores would fight. malloc is told to keep what is freed: every step needs as much again.
    """
    allowed = sorted(os.sched_getaffinity(0))
    foreign = sorted(set(cpus) - set(allowed))
    if foreign:
        raise CapacityError(
            f"cpus names {foreign}, this process may run on {allowed}.", remedy="Name some of those."
        )
    count = threads or len(cpus) or default_threads()
    torch.set_num_threads(1)
    extension().keep_freed_memory()
    extension().set_threads(count, list(cpus))


def default_threads(root: Path = Path("/sys")) -> int:
    """Cores that the process may use: hyperthreads of one core count once, a container's quota is a limit."""
    cores = {_siblings(root, cpu) for cpu in os.sched_getaffinity(0)}
    return max(1, min(len(cores), _quota(root)))


def _siblings(root: Path, cpu: int) -> str:
    try:
        return (root / f"devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text()
    except OSError:
        return str(cpu)


def _quota(root: Path) -> int:
    """Processors' worth of time that a container grants (cgroup version 2)."""
    try:
        quota, period = (root / "fs/cgroup/cpu.max").read_text().split()
        return NO_QUOTA if quota == "max" else math.ceil(int(quota) / int(period))
    except (OSError, ValueError):
        return NO_QUOTA
