"""What this machine can do at most, measured on all threads: the yardstick of `longspan bench`.

Each figure is the best of a few tries, for the first ones find the processor asleep.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from longspan import large_pages
from longspan.ops.native.extension import choose

_READ_BYTES = 2**29  # far beyond any cache
_MOST_BYTES = 2**30
_SIDE = 2048  # of the matrices that torch multiplies
_TRIES = 5


@dataclass(frozen=True)
class MachineLimits:
    """Each a second; a multiply-accumulate is two operations. 0: this machine has no such instruction."""

    threads: int
    read_bytes: float
    bf16_operations: float
    int8_operations: float


def machine_limits(memory: Tensor | None = None) -> MachineLimits:
    """Under two seconds: by the native operators where they are built, else by torch.

    Reads are those of `memory`, uint8: where bytes lie matters as much as how they are read, and a file
    mapped in small pages can read half as fast as large pages. None, or a tensor that the caches might hold:
    a buffer in large pages.
    """
    if memory is None or memory.nbytes < _READ_BYTES:
        memory = large_pages.empty((_READ_BYTES,), torch.uint8).fill_(1)
    native = choose().module
    return _torch_limits() if native is None else _native_limits(native, memory[:_MOST_BYTES])


def weight_bytes(weight: Tensor) -> Tensor:
    """All bytes that lie in memory with `weight`: of one that is mapped, its whole file, as uint8."""
    storage = weight.untyped_storage()
    return torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),))  # pyright: ignore


def _native_limits(native: Any, memory: Tensor) -> MachineLimits:
    return MachineLimits(
        threads=native.num_threads(),
        read_bytes=1e9 * _best(lambda: native.read_bandwidth(memory.data_ptr(), memory.nbytes)),
        bf16_operations=1e9 * _best(native.bf16_peak),
        int8_operations=1e9 * _best(native.int8_peak),
    )


def _torch_limits() -> MachineLimits:
    """What torch reaches: it sums a large array and multiplies square bfloat16 matrices."""
    memory = large_pages.empty((_READ_BYTES,), torch.uint8).fill_(1).view(torch.float32)
    matrix = torch.ones(_SIDE, _SIDE, dtype=torch.bfloat16)
    return MachineLimits(
        threads=torch.get_num_threads(),
        read_bytes=_best(lambda: memory.nbytes / _seconds(memory.sum)),
        bf16_operations=_best(lambda: 2 * _SIDE**3 / _seconds(lambda: matrix @ matrix)),
        int8_operations=0,
    )


def _best(measure: Callable[[], float]) -> float:
    return max(measure() for _ in range(_TRIES))


def _seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began
