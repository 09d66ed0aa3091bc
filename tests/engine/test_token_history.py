"""Counts of generated tokens against a plain count."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from longspan.engine.token_history import TokenHistory

IDS = st.integers(0, 6)


@given(prompt=st.lists(IDS, min_size=1, max_size=12), output=st.lists(IDS, max_size=12))
def test_a_history_counts_what_was_generated_as_it_grows(prompt: list[int], output: list[int]) -> None:
    history = TokenHistory(prompt)
    for length in range(len(output) + 1):
        tokens, counts = history.tensors()
        so_far = Counter(output[:length])
        assert tokens.tolist() == list(dict.fromkeys(prompt + output[:length]))
        assert counts.tolist() == [so_far[token] for token in tokens.tolist()]
        if length < len(output):
            history.append(output[length])


def test_what_was_handed_out_does_not_change_later() -> None:
    history = TokenHistory([3, 1])
    tokens, counts = history.tensors()
    for token_id in (1, 5, 1):
        history.append(token_id)
    assert (tokens.tolist(), counts.tolist()) == ([3, 1], [0, 0])
    assert [part.tolist() for part in history.tensors()] == [[3, 1, 5], [0, 2, 1]]
