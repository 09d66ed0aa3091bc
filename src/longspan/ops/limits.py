"""What this machine can do at most, measured on all threads: the yardstick of `longspan bench`."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from longspan.ops.native.extension import choose

_READ_BYTES = 2**29  # far beyond any cache
_SIDE = 2048


@dataclass(frozen=True)
class MachineLimits:
    """In 1e9 a second; a multiply-accumulate is two operations. 0: this machine has no such instruction."""

    threads: int
    read_bytes: float
    bf16_operations: float
    int8_operations: float


def machine_limits() -> MachineLimits:
    """One measurement, of under a second: by the native operators where they are built, else by torch."""
    native = choose().module
    if native is None:
        return torch_limits()
    return MachineLimits(
        threads=native.num_threads(),
        read_bytes=native.read_bandwidth(_READ_BYTES),
        bf16_operations=native.bf16_peak(),
        int8_operations=native.int8_peak(),
    )


def torch_limits() -> MachineLimits:
    """What torch reaches: it sums a large array and multiplies square bfloat16 matrices."""
    array = torch.ones(_READ_BYTES // 4)
    matrix = torch.ones(_SIDE, _SIDE, dtype=torch.bfloat16)
    return MachineLimits(
        threads=torch.get_num_threads(),
        read_bytes=_READ_BYTES / _seconds(array.sum) / 1e9,
        bf16_operations=2 * _SIDE**3 / _seconds(lambda: matrix @ matrix) / 1e9,
        int8_operations=0,
    )


def _seconds(work: Callable[[], object]) -> float:
    """The faster of two runs, after one to warm up."""
    times = []
    for _ in range(3):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return min(times[1:])
