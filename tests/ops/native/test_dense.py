"""attention_residual, ffn and lm_head, and with them the kernel of all matrix products."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from longspan.config import ActivationConfig
from longspan.ops import attention_residual as reference_residual
from longspan.ops import ffn as reference_ffn
from longspan.ops import linear as reference_linear
from longspan.ops.ffn import FfnWeights
from longspan.ops.native import dense

from .conftest import THREADS

DTYPES = st.sampled_from([torch.float32, torch.bfloat16])
SITU = ActivationConfig("situ", 4.0, 25.0)
UNBOUNDED_UP = ActivationConfig("situ", 1.0, None)
SILU = ActivationConfig("silu", None, None)


def random(*shape: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape) * scale).to(dtype)


@given(
    rows=st.integers(0, 70),
    width=st.sampled_from([1, 15, 16, 17, 31, 32, 33, 100]),
    out=st.sampled_from([1, 2, 7, 8, 9, 23, 24, 25, 61]),
    dtype=DTYPES,
    seed=st.integers(0, 99),
)
@settings(max_examples=60)
def test_logits_are_the_products_at_all_sizes_of_tiles(rows, width, out, dtype, seed, assert_close) -> None:
    torch.manual_seed(seed)
    x, weight = random(rows, width, dtype=dtype), random(out, width, dtype=dtype)
    assert_close(dense.lm_head(x, weight), reference_linear.lm_head(x, weight))


@given(
    rows=st.sampled_from([0, 1, 2, 5, 33, 40]),
    width=st.sampled_from([1, 16, 36, 50]),
    hidden=st.sampled_from([1, 16, 33, 70]),
    dtype=DTYPES,
    activation=st.sampled_from([SITU, UNBOUNDED_UP, SILU]),
    seed=st.integers(0, 99),
)
@settings(max_examples=60)
def test_the_mlp_equals_its_reference(rows, width, hidden, dtype, activation, seed, assert_close) -> None:
    torch.manual_seed(seed)
    weights = FfnWeights(
        random(hidden, width, dtype=dtype, scale=width**-0.5),
        random(hidden, width, dtype=dtype, scale=width**-0.5),
        random(width, hidden, dtype=dtype, scale=hidden**-0.5),
        activation,
    )
    x = random(rows, width, dtype=dtype, scale=3.0)
    assert_close(dense.ffn(x, weights), reference_ffn.ffn(x, weights))


@given(
    rows=st.sampled_from([0, 1, 2, 9]),
    width=st.sampled_from([1, 16, 36, 1023, 1024, 1025, 4100]),
    blocks=st.sampled_from([0, 1, 2, 8]),
    parts=st.sampled_from(["both", "prefix", "update"]),
    dtype=DTYPES,
    seed=st.integers(0, 99),
)
@settings(max_examples=80)
def test_the_residual_equals_its_reference(rows, width, blocks, parts, dtype, seed, assert_close) -> None:
    torch.manual_seed(seed)
    sources = [random(rows, width, dtype=dtype) for _ in range(blocks)]
    prefix = None if parts == "update" else random(rows, width, dtype=dtype)
    update = None if parts == "prefix" else random(rows, width, dtype=dtype)
    score = torch.randn(width) * width**-0.5 if blocks else None
    args = (sources, prefix, update, score, random(width, dtype=dtype), 1e-5)
    for actual, expected in zip(
        dense.attention_residual(*args), reference_residual.attention_residual(*args), strict=True
    ):
        assert_close(actual, expected)


def test_a_lone_row_gets_the_bits_it_has_in_a_batch() -> None:
    torch.manual_seed(0)
    blocks = [random(5, 4100, dtype=torch.bfloat16) for _ in range(8)]
    prefix, score, norm = (
        random(5, 4100, dtype=torch.bfloat16),
        torch.randn(4100),
        torch.ones(4100).bfloat16(),
    )
    together, _ = dense.attention_residual(blocks, prefix, None, score, norm, 1e-5)
    for row in range(5):
        rows = slice(row, row + 1)
        alone, _ = dense.attention_residual([b[rows] for b in blocks], prefix[rows], None, score, norm, 1e-5)
        assert torch.equal(alone[0], together[row])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_threads_and_batch_mates_change_no_bit_of_a_product(dtype, with_threads) -> None:
    torch.manual_seed(0)
    x, weight = random(200, 300, dtype=dtype), random(1000, 300, dtype=dtype)
    expected = dense.lm_head(x, weight)
    for threads in (*THREADS, 40):
        with_threads(threads)
        for begin, end in [(0, 200), (0, 1), (3, 5), (7, 40), (50, 83), (199, 200)]:
            assert torch.equal(dense.lm_head(x[begin:end], weight), expected[begin:end])


@pytest.mark.parametrize("threads", THREADS)
def test_threads_change_no_bit_of_residuals_and_mlp(threads, with_threads) -> None:
    torch.manual_seed(0)
    weights = FfnWeights(
        *(random(n, k, dtype=torch.bfloat16) for n, k in [(500, 64), (500, 64), (64, 500)]), SITU
    )
    x = random(37, 64, dtype=torch.bfloat16)
    blocks = [random(1, 7168, dtype=torch.bfloat16) for _ in range(8)]
    score, norm = torch.randn(7168), torch.ones(7168).bfloat16()
    with_threads(1)
    expected = (
        dense.ffn(x, weights),
        dense.attention_residual(blocks[1:], blocks[0], None, score, norm, 1e-5)[0],
    )
    with_threads(threads)
    assert torch.equal(dense.ffn(x, weights), expected[0])
    assert torch.equal(
        dense.attention_residual(blocks[1:], blocks[0], None, score, norm, 1e-5)[0], expected[1]
    )


def test_a_row_of_nan_stays_alone() -> None:
    x, weight = torch.ones(5, 40), torch.ones(30, 40)
    x[2] = torch.nan
    logits = dense.lm_head(x, weight)
    assert logits[2].isnan().all() and not logits[[0, 1, 3, 4]].isnan().any()
