"""Tensors in large pages: caches are read all over, and each small page needs a translation of its own."""

from __future__ import annotations

import math
import mmap

import torch
from torch import Tensor

LARGE_PAGE = 2 << 20  # bytes


def empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """An undefined tensor, in large pages where the system gives any and it is larger than one.

    Memory is taken from the system when first written, and given back with the tensor.
    """
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes < LARGE_PAGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(shape, dtype=dtype)
    mapped = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    mapped.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(mapped, dtype=torch.uint8).view(dtype).view(shape)
