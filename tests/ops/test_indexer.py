"""The indexer's choice against a sort of dense scores, at every length around top-k."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.batches import Tables
from torch import Tensor

from longspan.ops import indexer as indexer_module
from longspan.ops.batch import MlaView
from longspan.ops.indexer import NO_TOKEN, NON_FINITE, index_select

HEADS, DIM = 3, 4


def view_of(keys: Tensor) -> MlaView:
    return MlaView(latent=torch.empty(0), index_key=keys)


def slow_choice(query: Tensor, weight: Tensor, keys: Tensor, position: int, k: int) -> list[int]:
    """Scores of the visible keys one by one, sorted by score, then position; listed ascending."""
    scores = []
    for s in range(position + 1):
        dots = [float(query[h] @ keys[s]) * DIM**-0.5 for h in range(HEADS)]
        scores.append(sum(float(weight[h]) * max(dot, 0.0) for h, dot in enumerate(dots)))
    best = sorted(range(position + 1), key=lambda s: (-scores[s], s))[:k]
    return sorted(best) + [NO_TOKEN] * (k - len(best))


def small_integers(*shape: int) -> Tensor:
    """Exact in float32 in any order of summation, and full of ties."""
    return torch.randint(-2, 3, shape).float()


@pytest.fixture(params=[(64, 4096), (2, 4), (1, 1)], ids=["default", "small", "ones"])
def blocks(request, monkeypatch) -> None:
    monkeypatch.setattr(indexer_module, "INDEX_QUERY_BLOCK", request.param[0])
    monkeypatch.setattr(indexer_module, "INDEX_KEY_BLOCK", request.param[1])


@pytest.mark.parametrize("k", [1, 4, 5])
@pytest.mark.usefixtures("blocks")
def test_ragged_batches_choose_what_a_sort_of_dense_scores_chooses(k: int) -> None:
    torch.manual_seed(k)
    # (rows, context): shorter than k, exactly k, k + 1; suffixes of a long context; a sequence without rows.
    shapes = [(1, 0), (k, 0), (k + 1, 0), (13, 0), (1, k - 1), (1, k), (1, 20), (6, 11), (0, 7)]
    tables = Tables(len(shapes), 24)
    keys = [small_integers(n + c, DIM) for n, c in shapes]
    batch = tables.batch(range(len(shapes)), [n for n, _ in shapes], [c for _, c in shapes])
    query, weight = small_integers(batch.num_tokens, HEADS, DIM), small_integers(batch.num_tokens, HEADS)
    got = index_select(query, weight, view_of(tables.pages_of(keys)), batch, k)
    row = 0
    for (n, c), seq_keys in zip(shapes, keys, strict=True):
        for i in range(n):
            assert got[row].tolist() == slow_choice(query[row], weight[row], seq_keys, c + i, k), (n, c, i)
            row += 1


@settings(max_examples=40)
@given(tokens=st.integers(1, 40), k=st.integers(1, 9), chunk=st.integers(1, 40), seed=st.integers(0, 99))
def test_chunks_choose_what_the_whole_chooses(tokens: int, k: int, chunk: int, seed: int) -> None:
    torch.manual_seed(seed)
    tables = Tables(1, tokens)
    keys, query, weight = (
        small_integers(tokens, DIM),
        small_integers(tokens, HEADS, DIM),
        small_integers(tokens, HEADS),
    )
    whole = index_select(query, weight, view_of(tables.pages_of([keys])), tables.batch([0], [tokens], [0]), k)
    for begin in range(0, tokens, chunk):
        end = min(begin + chunk, tokens)
        view = view_of(tables.pages_of([keys[:end]]))  # later keys are not yet there
        part = index_select(
            query[begin:end], weight[begin:end], view, tables.batch([0], [end - begin], [begin]), k
        )
        assert torch.equal(part, whole[begin:end])


@pytest.mark.parametrize("planted", [0, 7, 30])
def test_a_planted_key_is_found_whichever_chunk_holds_it(planted: int) -> None:
    tables = Tables(1, 40)
    keys = torch.zeros(40, DIM)
    keys[planted] = 5.0
    got = index_select(
        torch.ones(1, HEADS, DIM),
        torch.ones(1, HEADS),
        view_of(tables.pages_of([keys])),
        tables.batch([0], [1], [39]),
        8,
    )
    assert planted in got[0].tolist()


def test_all_scores_equal_means_the_first_positions_not_the_last() -> None:
    tables = Tables(1, 40)
    view = view_of(tables.pages_of([torch.zeros(40, DIM)]))
    got = index_select(torch.ones(1, HEADS, DIM), torch.ones(1, HEADS), view, tables.batch([0], [1], [39]), 8)
    assert got[0].tolist() == list(range(8))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_non_finite_score_is_flagged_for_its_row_and_no_other(bad: float) -> None:
    torch.manual_seed(0)
    tables = Tables(2, 16)
    keys = [torch.rand(12, DIM), torch.rand(12, DIM)]
    keys[0][10] = bad
    batch = tables.batch([0, 1], [12, 12], [0, 0])
    got = index_select(
        torch.rand(24, HEADS, DIM), torch.rand(24, HEADS), view_of(tables.pages_of(keys)), batch, 4
    )
    flagged = (got[:, 0] == NON_FINITE).nonzero()[:, 0].tolist()
    assert flagged == [10, 11]  # the rows of sequence 0 that see token 10
    assert (got[flagged][:, 1:] == NO_TOKEN).all()


def test_more_top_k_than_tokens_takes_them_all() -> None:
    tables = Tables(1, 8)
    view = view_of(tables.pages_of([torch.rand(3, DIM)]))
    got = index_select(
        torch.rand(3, HEADS, DIM), torch.rand(3, HEADS), view, tables.batch([0], [3], [0]), 100
    )
    assert got[:, :3].tolist() == [[0, -1, -1], [0, 1, -1], [0, 1, 2]]
    assert (got[:, 3:] == NO_TOKEN).all()


def test_an_empty_batch_chooses_nothing() -> None:
    tables = Tables(1, 8)
    view = view_of(torch.empty(tables.num_pages, tables.page_size, DIM))
    got = index_select(torch.empty(0, HEADS, DIM), torch.empty(0, HEADS), view, tables.batch([], [], []), 4)
    assert got.shape == (0, 4)
