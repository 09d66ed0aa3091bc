"""Filters, penalties and the choice against slow twins over sorted lists."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from longspan.ops.sampling import (
    TokenCounts,
    apply_masks,
    apply_penalties,
    choose,
    filter_logits,
    sample,
    uniforms,
)


def slow_filter(row: list[float], temperature: float, top_k: int, top_p: float, min_p: float) -> set[int]:
    """The tokens that stay."""
    p = torch.tensor(row, dtype=torch.float64).div(temperature).softmax(0).tolist()
    order = sorted(range(len(row)), key=lambda i: (-row[i], i))
    order = [i for i in order if p[i] >= min_p * max(p)]
    if top_k:
        order = order[:top_k]
    total, mass, kept = sum(p[i] for i in order), 0.0, set()
    for i in order:
        if kept and mass >= top_p * total and top_p < 1:
            break
        kept.add(i)
        mass += p[i]
    return kept


@given(st.data())
def test_filters_keep_what_a_sorted_walk_keeps(data: st.DataObject) -> None:
    vocab = data.draw(st.integers(1, 9))
    rows = data.draw(st.integers(0, 4))
    torch.manual_seed(data.draw(st.integers(0, 99)))
    logits = torch.randn(rows, vocab) * 2
    if vocab > 2:
        logits[:, 2] = logits[:, 0]  # a tie
    temperature = [data.draw(st.sampled_from([0.6, 1.0, 3.0])) for _ in range(rows)]
    top_k = [data.draw(st.integers(0, vocab + 1)) for _ in range(rows)]
    top_p = [data.draw(st.sampled_from([0.03, 0.51, 0.93, 1.0])) for _ in range(rows)]
    min_p = [data.draw(st.sampled_from([0.0, 0.11, 0.77])) for _ in range(rows)]
    got = filter_logits(
        logits,
        torch.tensor(temperature),
        torch.tensor(top_k, dtype=torch.int64),
        torch.tensor(top_p),
        torch.tensor(min_p),
    )
    for r in range(rows):
        kept = slow_filter(logits[r].tolist(), temperature[r], top_k[r], top_p[r], min_p[r])
        assert set(got[r].isfinite().nonzero()[:, 0].tolist()) == kept
        for i in kept:
            assert math.isclose(float(got[r, i]), float(logits[r, i]) / temperature[r], rel_tol=1e-5)


def neutral(rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return torch.ones(rows), torch.zeros(rows, dtype=torch.int64), torch.ones(rows), torch.zeros(rows)


def test_neutral_settings_change_nothing() -> None:
    logits = torch.randn(3, 7)
    assert torch.equal(filter_logits(logits, *neutral(3)), logits)


def test_a_neutral_row_is_untouched_beside_a_filtered_one() -> None:
    logits = torch.randn(2, 7)
    temperature, _, _, min_p = neutral(2)
    got = filter_logits(logits, temperature, torch.tensor([0, 2]), torch.tensor([1.0, 0.5]), min_p)
    assert torch.equal(got[0], logits[0])


def test_tokens_banned_before_the_filters_stay_banned() -> None:
    logits = torch.tensor([[5.0, -torch.inf, 1.0, -torch.inf]])
    got = filter_logits(logits, torch.ones(1), torch.tensor([3]), torch.tensor([0.99999]), torch.zeros(1))
    assert got.isfinite().tolist() == [[True, False, True, False]]


def count_tokens(prompts: list[list[int]], outputs: list[list[int]]) -> TokenCounts:
    pairs = [
        (row, token, output.count(token))
        for row, (prompt, output) in enumerate(zip(prompts, outputs, strict=True))
        for token in dict.fromkeys([*prompt, *output])
    ]
    return TokenCounts(*torch.tensor(pairs, dtype=torch.int64).view(-1, 3).unbind(1))


@given(seed=st.integers(0, 50), rows=st.integers(0, 3))
def test_penalties_equal_a_loop_over_the_vocabulary(seed: int, rows: int) -> None:
    torch.manual_seed(seed)
    vocab = 6
    logits = torch.randn(rows, vocab)
    prompts = [torch.randint(0, vocab, (3,)).tolist() for _ in range(rows)]
    outputs = [torch.randint(0, vocab, (n,)).tolist() for n in (0, 4, 7)[:rows]]
    presence, frequency, repetition = torch.randn(rows), torch.randn(rows), torch.rand(rows) + 0.5
    got = apply_penalties(logits, count_tokens(prompts, outputs), presence, frequency, repetition)
    for r in range(rows):
        for t in range(vocab):
            want, n = float(logits[r, t]), outputs[r].count(t)
            if t in prompts[r] or n:
                want = want / float(repetition[r]) if want > 0 else want * float(repetition[r])
            want -= float(frequency[r]) * n + float(presence[r]) * (n > 0)
            assert math.isclose(float(got[r, t]), want, rel_tol=1e-5, abs_tol=1e-6)


def test_a_row_without_history_is_not_penalised_and_the_input_is_not_written() -> None:
    logits = torch.randn(2, 5)
    before = logits.clone()
    got = apply_penalties(
        logits, count_tokens([[], [1]], [[], [1, 1]]), torch.ones(2), torch.ones(2), torch.full((2,), 2.0)
    )
    assert torch.equal(got[0], before[0]) and torch.equal(logits, before)
    assert not torch.equal(got[1], before[1])


def test_choices_follow_the_distribution() -> None:
    logits = torch.tensor([[0.0, 1.0, -torch.inf, 2.0]]).expand(4000, 4)
    numbers = uniforms(np.full(4000, 7, dtype=np.uint64), np.arange(4000, dtype=np.uint64))
    counts = torch.bincount(choose(logits, torch.from_numpy(numbers)), minlength=4) / 4000
    assert counts[2] == 0
    torch.testing.assert_close(counts, logits[0].softmax(-1), atol=0.03, rtol=0)


@given(u=st.sampled_from([0.0, 0.5, 1 - 2.0**-53]), vocab=st.integers(1, 50))
def test_a_dropped_token_is_never_chosen_at_the_edges(u: float, vocab: int) -> None:
    torch.manual_seed(vocab)
    logits = torch.randn(1, vocab)
    keep = int(torch.randint(0, vocab, ()))
    logits[:, :keep] = -torch.inf
    logits[:, keep + 1 :] = -torch.inf
    assert choose(logits, torch.tensor([u], dtype=torch.float64)).tolist() == [keep]


def test_a_row_chooses_the_same_alone_and_among_others() -> None:
    torch.manual_seed(0)
    logits = torch.randn(5, 100)
    numbers = torch.rand(5, dtype=torch.float64)
    together = choose(logits, numbers)
    for r in range(5):
        assert choose(logits[r : r + 1], numbers[r : r + 1]).tolist() == [int(together[r])]


@pytest.mark.parametrize("seed", [0, 1, 2**63, 2**64 - 2])
def test_uniform_numbers_are_reproducible_and_differ_by_stream_and_step(seed: int) -> None:
    streams = np.array([seed, seed + 1], dtype=np.uint64).repeat(100)
    steps = np.tile(np.arange(100, dtype=np.uint64), 2)
    numbers = uniforms(streams, steps).tolist()
    assert len(set(numbers)) == 200
    assert all(0 <= x < 1 for x in numbers)
    for i in (0, 7, 199):
        assert uniforms(streams[i : i + 1], steps[i : i + 1]).tolist() == [numbers[i]]
    assert 0.4 < sum(numbers) / 200 < 0.6


def test_the_uniform_numbers_are_those_of_splitmix64() -> None:
    # Two rounds over stream 0 and step 0: the first output of splitmix64 seeded with its own first output.
    assert uniforms(np.zeros(1, dtype=np.uint64), np.zeros(1, dtype=np.uint64)).tolist() == [
        0.6524484863740322
    ]


def test_empty_batches_choose_nothing() -> None:
    assert choose(torch.empty(0, 5), torch.empty(0, dtype=torch.float64)).shape == (0,)
    assert filter_logits(torch.empty(0, 5), *neutral(0)).shape == (0, 5)


@given(st.data())
def test_masks_take_away_the_tokens_without_a_bit_and_touch_no_other_row(data: st.DataObject) -> None:
    vocab, rows = data.draw(st.sampled_from([1, 31, 32, 33, 64, 70])), data.draw(st.integers(1, 4))
    masked = data.draw(st.lists(st.integers(0, rows - 1), unique=True, min_size=1, max_size=rows))
    torch.manual_seed(data.draw(st.integers(0, 99)))
    logits = torch.randn(rows, vocab)
    masks = torch.randint(-(2**31), 2**31, (len(masked), (vocab + 31) // 32), dtype=torch.int64).int()
    got = logits.clone()
    apply_masks(got, torch.tensor(masked), masks)
    expected = logits.clone()
    for mask, row in zip(masks.tolist(), masked, strict=True):
        for token in range(vocab):
            if not mask[token // 32] >> token % 32 & 1:
                expected[row, token] = -torch.inf
    assert torch.equal(got, expected)


@given(st.data())
def test_a_sample_is_the_argmax_or_the_choice_among_what_the_filters_leave(data: st.DataObject) -> None:
    vocab, rows = data.draw(st.integers(1, 9)), data.draw(st.integers(0, 5))
    torch.manual_seed(data.draw(st.integers(0, 99)))
    logits = torch.randint(-2, 3, (rows, vocab)).float()  # full of ties
    temperature = torch.tensor([data.draw(st.sampled_from([0.0, 0.5, 1.0])) for _ in range(rows)])
    top_k = torch.tensor([data.draw(st.integers(0, vocab + 1)) for _ in range(rows)], dtype=torch.int64)
    top_p = torch.tensor([data.draw(st.sampled_from([0.4, 1.0])) for _ in range(rows)])
    min_p = torch.tensor([data.draw(st.sampled_from([0.0, 0.3])) for _ in range(rows)])
    uniforms = torch.rand(rows, dtype=torch.float64)
    before = logits.clone()
    got = sample(logits, temperature, top_k, top_p, min_p, uniforms)
    assert got.shape == (rows,) and got.dtype == torch.int64 and torch.equal(logits, before)
    for r in range(rows):
        row = slice(r, r + 1)
        if temperature[r] == 0:
            values = logits[r].tolist()
            assert int(got[r]) == values.index(max(values))
        else:
            kept = filter_logits(logits[row], temperature[row], top_k[row], top_p[row], min_p[row])
            assert got[row].tolist() == choose(kept, uniforms[row]).tolist()


@pytest.mark.parametrize("temperature", [0.0, 1e-38, 1e-30, 1.0])
def test_large_logits_overflow_at_no_temperature(temperature: float) -> None:
    logits = torch.tensor([[3e38, -3e38, 1.0]])
    _, top_k, top_p, min_p = neutral(1)
    half = torch.tensor([0.5], dtype=torch.float64)
    assert sample(logits, torch.tensor([temperature]), top_k, top_p, min_p, half).tolist() == [0]
