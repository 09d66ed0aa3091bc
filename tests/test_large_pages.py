"""Tensors in large pages behave as any other."""

from __future__ import annotations

import pytest
import torch

from longspan import large_pages


@pytest.mark.parametrize("shape", [(0, 3), (1,), (5, 7), (1 << 20, 3)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8])
def test_they_have_shape_and_dtype_and_can_be_written(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensor = large_pages.empty(shape, dtype)
    assert tensor.shape == shape and tensor.dtype == dtype and tensor.is_contiguous()
    assert (tensor.fill_(3) == 3).all()


def test_a_part_keeps_the_whole_alive() -> None:
    part = large_pages.empty((1 << 22,), torch.float32).fill_(2)[5:9]
    assert part.tolist() == [2.0] * 4
