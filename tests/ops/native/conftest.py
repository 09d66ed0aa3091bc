"""Native operators against their torch twins; skipped where there are none."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from longspan.ops.native.extension import choose

THREADS = (1, 2, 3, 7)


@pytest.fixture(autouse=True)
def needs_native() -> None:
    if choose().module is None:
        pytest.skip(choose().reason)


@pytest.fixture
def with_threads() -> Iterator[Callable[[int], None]]:
    """Sets the number of threads of the pool until the test ends."""
    module = choose().module
    assert module
    before = module.num_threads()
    yield module.set_threads
    module.set_threads(before)


@pytest.fixture(scope="session")
def assert_close() -> Callable[[Tensor, Tensor], None]:
    """Within 1e-4 of the largest magnitude in float32, within 2 ulps of it in bfloat16."""

    def check(actual: Tensor, expected: Tensor) -> None:
        assert actual.shape == expected.shape and actual.dtype == expected.dtype
        if expected.numel() == 0:
            return
        scale = expected.float().abs().max().item()
        tolerance = 2 * 2**-8 if expected.dtype == torch.bfloat16 else 1e-4
        torch.testing.assert_close(actual, expected, atol=tolerance * scale, rtol=0)

    return check
