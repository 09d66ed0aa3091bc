"""The one tie rule: higher score first, then lower index."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from longspan.ops.top_k import top_k_indices


@given(st.data())
def test_choice_equals_a_sort_by_score_then_index(data: st.DataObject) -> None:
    rows = data.draw(st.integers(0, 4))
    n = data.draw(st.integers(1, 12))
    k = data.draw(st.integers(0, n))
    score = st.sampled_from([-torch.inf, -1.0, 0.0, 0.5, 2.0])  # few values, so that ties are the rule
    scores = torch.tensor(
        data.draw(st.lists(st.lists(score, min_size=n, max_size=n), min_size=rows, max_size=rows))
    )
    got = top_k_indices(scores.view(rows, n), k)
    want = [sorted(sorted(range(n), key=lambda i: (-row[i], i))[:k]) for row in scores.view(rows, n).tolist()]
    assert got.tolist() == want


def test_nan_ranks_last() -> None:
    scores = torch.tensor([[torch.nan, 1.0, torch.nan, -5.0]])
    assert top_k_indices(scores, 2).tolist() == [[1, 3]]
    assert top_k_indices(scores, 3).tolist() == [[0, 1, 3]]


def test_equal_scores_are_the_first_ones_not_the_last() -> None:
    assert top_k_indices(torch.zeros(2, 9), 3).tolist() == [[0, 1, 2]] * 2
