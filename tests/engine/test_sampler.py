from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.serving import make_request
from torch import Tensor

from longspan.engine.sampler import Sampled, Sampler, token_logprobs
from longspan.engine.sequence import Sequence
from longspan.errors import LongspanError, NonFiniteError
from longspan.ops.backend import TORCH
from longspan.ops.sampling import TokenCounts

VOCAB = 12
EOS = 11


def sequence(
    prompt: list[int] | None = None, output: list[int] | None = None, seed: int = 0, **params: Any
) -> Sequence:
    seq = Sequence(make_request("a", prompt or [1], **params), 0, seed)
    for token_id in output or []:
        seq.append(token_id)
    return seq


def sample(logits: Tensor, *seqs: Sequence) -> list[int | None]:
    sampled = Sampler(TORCH, (EOS,)).sample(logits, list(seqs))
    return [s.token_id if isinstance(s, Sampled) else None for s in sampled]


def logits_for(rows: int = 1, seed: int = 0) -> Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


def frequencies(logits: list[float], count: int = 4000, **params: Any) -> dict[int, float]:
    """How often each token is chosen as one seeded stream goes on."""
    seqs = [
        sequence(seed=i, temperature=params.get("temperature", 1.0), **_rest(params)) for i in range(count)
    ]
    chosen = sample(torch.tensor([logits]).expand(count, -1), *seqs)
    return {token: times / count for token, times in Counter(chosen).items() if token is not None}


def _rest(params: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in params.items() if name != "temperature"}


def test_greedy_takes_the_largest_and_of_equals_the_lowest() -> None:
    logits = torch.zeros(2, VOCAB)
    logits[0, [4, 7]] = 2.0
    logits[1] = -1.0
    assert sample(logits, sequence(), sequence()) == [4, 0]


def test_what_was_given_is_not_changed() -> None:
    logits = logits_for()
    before = logits.clone()
    sample(logits, sequence(logit_bias={1: 5.0}, presence_penalty=1.0, min_tokens=3, temperature=0.7))
    assert torch.equal(logits, before)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_edits_that_leave_no_number_fail_their_row_alone(value: float, temperature: float) -> None:
    def spoil(logits: Tensor, counts: TokenCounts, *_: Tensor) -> Tensor:
        return logits.index_put((counts.rows, counts.tokens), torch.tensor(value))

    logits = logits_for(rows=3)
    spoiled = sequence(presence_penalty=1.0, temperature=temperature)
    ops = replace(TORCH, apply_penalties=spoil)
    first, second, third = Sampler(ops, (EOS,)).sample(logits, [sequence(), spoiled, sequence()])
    assert isinstance(second, NonFiniteError)
    assert [s.token_id for s in (first, third) if isinstance(s, Sampled)] == logits[[0, 2]].argmax(
        -1
    ).tolist()


@pytest.mark.parametrize("operator", ["apply_penalties", "sample"])
@pytest.mark.parametrize("size", [1, 2, 5])
def test_a_row_on_which_sampling_raises_fails_alone(operator: str, size: int) -> None:
    genuine = getattr(TORCH, operator)

    def picky(logits: Tensor, *rest: Any) -> Tensor:
        if bool((logits.amax(-1) - logits.amin(-1) > 500).any()):
            raise ValueError("out of luck")
        return genuine(logits, *rest)

    seqs = [sequence(seed=i, temperature=1.0, presence_penalty=0.5) for i in range(size)]
    logits = logits_for(rows=size)
    expected = sample(logits, *seqs)
    logits[-1, 3] = -1000.0
    *others, culprit = Sampler(replace(TORCH, **{operator: picky}), (EOS,)).sample(logits, seqs)
    assert isinstance(culprit, LongspanError) and "out of luck" in str(culprit)
    assert [s.token_id for s in others if isinstance(s, Sampled)] == expected[:-1]


def test_frequencies_follow_the_softmax_at_this_temperature() -> None:
    logits = [0.0, 1.0, 2.0, 3.0]
    for temperature in (0.5, 1.0, 2.0):
        weights = [math.exp(value / temperature) for value in logits]
        found = frequencies(logits, temperature=temperature)
        for token, weight in enumerate(weights):
            assert found.get(token, 0.0) == pytest.approx(weight / sum(weights), abs=0.03)


def test_a_tiny_temperature_is_greedy_and_no_overflow() -> None:
    logits = logits_for(rows=1) + 50
    best = int(logits.argmax())
    assert sample(logits, sequence(temperature=1e-30)) == [best]
    assert sample(-logits.abs() * 1e4, sequence(temperature=1e-38)) == [int((-logits.abs()).argmax())]


@pytest.mark.parametrize(
    ("params", "allowed"),
    [
        ({"top_k": 1}, {3}),
        ({"top_k": 2}, {3, 2}),
        ({"top_k": 100}, {0, 1, 2, 3}),
        ({"top_k": -1}, {0, 1, 2, 3}),
        ({"top_p": 1e-9}, {3}),
        ({"top_p": 0.6}, {3}),
        ({"top_p": 0.7}, {3, 2}),
        ({"min_p": 0.2}, {3, 2}),
        ({"min_p": 1.0}, {3}),
        ({"top_k": 3, "top_p": 0.9}, {3, 2}),
    ],
)
def test_only_what_the_filters_leave_is_chosen(params: dict[str, Any], allowed: set[int]) -> None:
    # Probabilities 0.032, 0.087, 0.237, 0.644.
    assert set(frequencies([0.0, 1.0, 2.0, 3.0], count=600, **params)) == allowed


def naive_penalties(row: list[float], seq: Sequence) -> list[float]:
    params, output = seq.params, Counter(seq.tokens[seq.num_prompt_tokens :])
    result = []
    for token, value in enumerate(row):
        if token in seq.tokens:
            value = value / params.repetition_penalty if value > 0 else value * params.repetition_penalty
        value -= params.frequency_penalty * output[token] + params.presence_penalty * (token in output)
        result.append(value)
    return result


@given(
    seed=st.integers(0, 1000),
    prompt=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=6),
    output=st.lists(st.integers(0, VOCAB - 1), max_size=8),
    presence=st.sampled_from([-2.0, 0.0, 0.7, 2.0]),
    frequency=st.sampled_from([-1.0, 0.0, 0.4, 2.0]),
    repetition=st.sampled_from([0.5, 1.0, 1.3, 4.0]),
)
def test_penalties_are_those_of_a_naive_loop(
    seed: int, prompt: list[int], output: list[int], presence: float, frequency: float, repetition: float
) -> None:
    logits = logits_for(rows=2, seed=seed)
    penalised = sequence(
        prompt,
        output,
        presence_penalty=presence,
        frequency_penalty=frequency,
        repetition_penalty=repetition,
        logprobs=0,
    )
    plain = sequence(prompt, output)
    expected = naive_penalties(logits[0].tolist(), penalised)
    chosen = sample(logits, penalised, plain)
    assert chosen[0] is not None
    assert expected[chosen[0]] == pytest.approx(max(expected), abs=1e-5)
    assert chosen[1] == int(logits[1].argmax())


def test_penalties_count_each_token_as_it_comes() -> None:
    seq = sequence([1], frequency_penalty=1.0)
    logits = torch.zeros(1, VOCAB)
    logits[0, 5], logits[0, 6] = 2.5, 1.0
    found = []
    for _ in range(5):
        (token_id,) = sample(logits, seq)
        assert token_id is not None
        found.append(token_id)
        seq.append(token_id)
    assert found == [5, 5, 6, 5, 0]


def test_bias_is_added_before_penalties_and_temperature() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 2] = 1.0
    assert sample(logits, sequence(logit_bias={3: 1.5})) == [3]
    assert sample(logits, sequence(logit_bias={3: 0.5})) == [2]
    # The penalty halves a bias that came before it.
    assert sample(logits, sequence([3], logit_bias={3: 2.2}, repetition_penalty=2.0)) == [3]
    assert sample(logits, sequence([3], logit_bias={3: 1.8}, repetition_penalty=2.0)) == [2]


def test_the_end_is_banned_until_min_tokens() -> None:
    logits = logits_for()
    logits[0, [EOS, 4]] = torch.tensor([60.0, 50.0])
    params = {"min_tokens": 2, "stop_token_ids": [4]}
    for length, expected in ((0, None), (1, None), (2, EOS)):
        (chosen,) = sample(logits, sequence(output=[1] * length, **params))
        assert (chosen == expected) if expected else (chosen not in (EOS, 4))


def test_a_row_never_depends_on_the_others() -> None:
    logits = logits_for(rows=4, seed=3)
    seqs = [
        sequence(seed=1, temperature=1.0, top_p=0.8),
        sequence([2, 3], [4], frequency_penalty=1.0),
        sequence(seed=2, temperature=2.0, min_p=0.1, logit_bias={1: 3.0}),
        sequence(seed=3, temperature=0.5, top_k=3),
    ]
    together = sample(logits, *seqs)
    alone = [sample(logits[i : i + 1], seq)[0] for i, seq in enumerate(seqs)]
    reordered = sample(logits.flip(0), *reversed(seqs))
    assert together == alone == reordered[::-1]


def test_every_step_of_a_sequence_has_its_own_random_number() -> None:
    seq = sequence(temperature=1.0)
    found = []
    for _ in range(60):
        (token_id,) = sample(torch.zeros(1, VOCAB), seq)
        assert token_id is not None
        found.append(token_id)
        seq.append(token_id)
    assert len(set(found)) > VOCAB // 2


def test_logprobs_are_of_the_unchanged_logits() -> None:
    logits = logits_for()
    seq = sequence(logit_bias={0: 90.0}, temperature=3.0, top_k=1, logprobs=2)
    (sampled,) = Sampler(TORCH, (EOS,)).sample(logits, [seq])
    assert isinstance(sampled, Sampled) and sampled.logprobs is not None
    assert sampled.token_id == 0
    expected = torch.log_softmax(logits[0], -1)
    assert sampled.logprobs[0].logprob == pytest.approx(float(expected[0]))
    assert sampled.logprobs[0].rank == int((expected > expected[0]).sum()) + 1


def test_equal_logprobs_rank_by_token_id() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 1.0, 3.0]])
    for token_id, rank in ((1, 1), (2, 2), (4, 3), (0, 4), (3, 5)):
        (entry,) = token_logprobs(logits, [token_id], 2)
        assert entry[token_id].rank == rank
        assert [t for t, e in entry.items() if e.rank <= 2] == ([token_id] if rank <= 2 else []) + [
            t for t in (1, 2) if t != token_id
        ]


def test_more_logprobs_than_tokens_do_not_exist() -> None:
    (entry,) = token_logprobs(torch.tensor([[1.0, 2.0, 0.0]]), [2], 3)
    assert list(entry) == [2, 1, 0]
    assert sum(math.exp(e.logprob) for e in entry.values()) == pytest.approx(1.0)
