"""Native twin of merge_partial."""

from __future__ import annotations

from torch import Tensor

from longspan.ops.native.extension import extension
from longspan.ops.native.handles import contiguous


def merge_partial(out: Tensor, lse: Tensor, part: Tensor) -> None:
    if not (out.is_contiguous() and lse.is_contiguous()):
        raise ValueError("what parts are merged into must be contiguous")
    part = contiguous(part)
    extension().merge_partial(lse.numel(), out.shape[-1], out.data_ptr(), lse.data_ptr(), part.data_ptr())
