"""Native penalties and sampling against the torch reference."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from longspan.ops import sampling as reference
from longspan.ops.native.sampling import apply_penalties, sample
from longspan.ops.sampling import TokenCounts

from .conftest import THREADS

BOUNDARY = 1e-9

VOCABS = [1, 2, 15, 16, 17, 100, 1023, 1024, 1025, 5000]


def logits_of(kind: str, rows: int, vocab: int) -> Tensor:
    """Flat, peaked, full of ties, or nearly all the same."""
    if kind == "flat":
        return torch.randn(rows, vocab)
    if kind == "peaked":
        return torch.randn(rows, vocab) * 30
    if kind == "ties":
        return torch.randint(-3, 4, (rows, vocab)).float()
    if kind == "banned":
        logits = torch.randn(rows, vocab).masked_fill(torch.rand(rows, vocab) < 0.7, -torch.inf)
        logits[:, vocab // 2] = 0.5
        return logits
    if kind == "huge":
        return torch.randn(rows, vocab) * 1e37
    return torch.ones(rows, vocab) + (torch.rand(rows, vocab) < 0.1) * 2.0**-20


kinds = st.sampled_from(["flat", "peaked", "ties", "banned", "huge", "nearly equal"])


@st.composite
def settings_of_rows(draw: st.DrawFn, rows: int, vocab: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    def each(values: st.SearchStrategy[float]) -> list[float]:
        return [draw(values) for _ in range(rows)]

    return (
        torch.tensor(each(st.sampled_from([0.0, 1e-38, 1e-3, 0.3, 1.0, 2.0]))),
        torch.tensor(
            each(st.sampled_from([0, 1, 2, 15, 16, 17, 40, 1000, vocab - 1, vocab, vocab + 1])),
            dtype=torch.int64,
        ),
        torch.tensor(each(st.sampled_from([0.0, 1e-9, 0.3, 0.9, 0.95, 0.999, 1.0]))),
        torch.tensor(each(st.sampled_from([0.0, 1e-30, 0.01, 0.5, 1.0]))),
    )


def assert_the_same_choice(
    token: int,
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    uniform: Tensor,
) -> None:
    """One row. The token is the reference's, or the numbers that decide lie within BOUNDARY of each other."""
    args = (temperature, top_k, top_p, min_p)
    if token == int(reference.sample(logits, *args, uniform)):
        return
    assert temperature > 0
    # A top_p a little larger or smaller may keep a token more or less, a uniform choose a neighbour.
    near = set()
    for off in (-BOUNDARY, 0.0, BOUNDARY):
        moved = (top_p.double() + off).clamp(0, 1) if float(top_p) < 1 else top_p
        for shift in (-BOUNDARY, BOUNDARY):
            u = (uniform + shift).clamp(0, 1 - 2.0**-53)
            near.add(int(reference.sample(logits, temperature, top_k, moved, min_p, u)))
    assert token in near


@settings(max_examples=150)
@given(data=st.data(), kind=kinds, seed=st.integers(0, 10**6))
def test_samples_are_those_of_the_reference(data: st.DataObject, kind: str, seed: int) -> None:
    torch.manual_seed(seed)
    rows, vocab = data.draw(st.integers(0, 4)), data.draw(st.sampled_from(VOCABS))
    logits = logits_of(kind, rows, vocab)
    args = data.draw(settings_of_rows(rows, vocab))
    uniforms = torch.rand(rows, dtype=torch.float64)
    before = logits.clone()
    got = sample(logits, *args, uniforms)
    assert got.shape == (rows,) and got.dtype == torch.int64 and torch.equal(logits, before)
    for r in range(rows):
        one = slice(r, r + 1)
        assert_the_same_choice(int(got[r]), logits[one], *(a[one] for a in args), uniforms[one])


@pytest.mark.parametrize("uniform", [0.0, 0.5, 1 - 2.0**-53])
@pytest.mark.parametrize("vocab", [1, 16, 1025, 3000])
def test_a_dropped_token_is_never_chosen_at_the_edges(uniform: float, vocab: int) -> None:
    torch.manual_seed(vocab)
    keep = int(torch.randint(0, vocab, ()))
    logits = torch.full((1, vocab), -torch.inf)
    logits[:, keep] = 3.0
    u = torch.tensor([uniform], dtype=torch.float64)
    for top_k, top_p in ((0, 1.0), (2, 1.0), (0, 0.9), (2, 0.9)):
        got = sample(logits, torch.ones(1), torch.tensor([top_k]), torch.tensor([top_p]), torch.zeros(1), u)
        assert got.tolist() == [keep]


def test_every_token_is_chosen_where_its_share_lies() -> None:
    """A sweep over the uniforms walks the tokens in order, each for as long as it weighs."""
    logits = torch.randn(1, 50).expand(5000, -1)
    uniforms = (torch.arange(5000, dtype=torch.float64) + 0.5) / 5000
    ones, none = torch.ones(5000), torch.zeros(5000, dtype=torch.int64)
    got = sample(logits, ones, none, ones, torch.zeros(5000), uniforms)
    assert (got.diff() >= 0).all()
    shares = torch.bincount(got, minlength=50) / 5000
    torch.testing.assert_close(shares, logits[0].softmax(-1), atol=3e-4, rtol=0)


def test_threads_and_batch_mates_change_no_choice(with_threads) -> None:
    torch.manual_seed(1)
    rows, vocab = 9, 3000
    args = (
        torch.randn(rows, vocab),
        torch.tensor([0.0, 0.5, 1.0] * 3),
        torch.tensor([0, 50, 0] * 3),
        torch.tensor([0.9, 0.8, 1.0] * 3),
        torch.tensor([0.0, 0.0, 0.05] * 3),
        torch.rand(rows, dtype=torch.float64),
    )
    alone = [int(sample(*(a[r : r + 1] for a in args))) for r in range(rows)]
    for threads in THREADS:
        with_threads(threads)
        assert sample(*args).tolist() == alone


def test_a_row_without_a_number_gives_some_token_and_disturbs_no_other() -> None:
    torch.manual_seed(2)
    logits = torch.randn(4, 40)
    logits[0], logits[1, 7], logits[2, 9] = -torch.inf, torch.nan, torch.inf
    half = torch.full((4,), 0.5)
    for temperature in (0.0, 1.0):
        top_k = torch.tensor([0, 3, 0, 3])
        args = (torch.full((4,), temperature), top_k, half, torch.zeros(4), half.double())
        got = sample(logits, *args)
        assert ((got >= 0) & (got < 40)).all()
        assert got[3:].tolist() == sample(logits[3:], *(a[3:] for a in args)).tolist()


@settings(max_examples=40)
@given(rows=st.integers(0, 4), vocab=st.sampled_from([1, 7, 100]), seed=st.integers(0, 99))
def test_penalties_are_those_of_the_reference(rows: int, vocab: int, seed: int) -> None:
    torch.manual_seed(seed)
    logits = torch.randn(rows, vocab)
    hit = (torch.rand(rows, vocab) < 0.4).nonzero()
    counts = TokenCounts(hit[:, 0], hit[:, 1], torch.randint(0, 4, (len(hit),)))
    penalties = torch.randn(rows), torch.randn(rows), torch.rand(rows) + 0.5
    before = logits.clone()
    got = apply_penalties(logits, counts, *penalties)
    want = reference.apply_penalties(logits, counts, *penalties)
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)
    assert torch.equal(logits, before)
