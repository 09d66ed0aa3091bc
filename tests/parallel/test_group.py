"""Collectives: contents, order, counts, empty ranks and lost ones."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from support import rank_collectives as cases
from support.ranks import Ranks

from longspan.parallel.group import ALONE
from longspan.parallel.traffic import Traffic

SIZES = [2, 3, 4]


@pytest.mark.parametrize("size", SIZES)
def test_sums_and_gathers_are_those_of_all_ranks_and_counted(size: int, ranks: Ranks) -> None:
    for summed, gathered, nothing, nbytes in ranks.run(size, cases.sums_and_gathers, size):
        assert (summed == 2**size - 1).all()
        assert gathered.shape == (size, 2, 5)
        assert (gathered == torch.arange(size)[:, None, None]).all()
        assert nothing.shape == (size, 0, 4)
        assert nbytes["sums"] == 2 * (size - 1) * 3 * 8 * 4 // size
        assert nbytes["logits"] == (size - 1) * 2 * 5 * 4


@pytest.mark.parametrize("size", SIZES)
def test_rows_reach_their_rank_in_the_order_of_senders_whatever_the_numbers(size: int, ranks: Ranks) -> None:
    dice = random.Random(size)
    everyone_to_last = [[0] * (size - 1) + [r] for r in range(size)]
    plans = [[[0] * size for _ in range(size)], everyone_to_last]
    plans += [[[dice.choice((0, 0, 1, 2, 50)) for _ in range(size)] for _ in range(size)] for _ in range(20)]
    for rank, answers in enumerate(ranks.run(size, cases.all_to_all, size, plans)):
        for plan, (got, nbytes) in zip(plans, answers, strict=True):
            want = [[r, rank, i] for r in range(size) for i in range(plan[r][rank])]
            assert got.tolist() == want
            assert nbytes["experts"] == 3 * 8 * sum(r != rank for r, _, _ in want)


@pytest.mark.parametrize("rows", [0, 1, 500])
@pytest.mark.parametrize("size", SIZES)
def test_parts_arrive_from_the_next_rank_and_on_round_the_group(size: int, rows: int, ranks: Ranks) -> None:
    for rank, (arrived, nbytes) in enumerate(ranks.run(size, cases.exchange, size, rows)):
        around = [(rank + step) % size for step in range(1, size)]
        assert arrived == ([10 * other + rank for other in around] if rows else [])
        assert nbytes == (size - 1) * rows * 1000 * 4


def test_a_host_may_bring_its_own_sum(ranks: Ranks) -> None:
    for got in ranks.run(4, cases.hosts_own_sum):
        assert (got == 42).all()


@pytest.mark.parametrize("name", cases.COLLECTIVES)
def test_a_rank_that_does_not_answer_is_an_error_that_names_the_collective(name: str, ranks: Ranks) -> None:
    error, _ = ranks.run(2, cases.lonely, name)
    assert error.startswith(f"{name} failed on rank 0 of 2")
    assert "start all of them again" in error


@pytest.mark.parametrize("name", ["all_reduce of sums", "exchange of outputs"])
def test_a_rank_that_dies_is_an_error_that_names_the_collective(name: str, tmp_path: Path) -> None:
    pair = Ranks(tmp_path, size=2)
    try:
        for rank in range(2):
            pair.start(rank, cases.widowed, name)
        error = pair.result(0)
    finally:
        pair.close()
    assert error.startswith(f"{name} failed on rank 0 of 2")


def test_a_rank_alone_sends_nothing() -> None:
    x = torch.ones(3, 4)
    assert ALONE.all_reduce(x, "sums") is x
    assert torch.equal(ALONE.all_gather(x, "sums"), x[None])
    assert ALONE.counts([3]) == [3] and ALONE.all_to_all(x, [3], [3], "sums") is x
    ALONE.exchange(x[None], lambda _: pytest.fail("nobody sends"), "outputs")
    assert sum(ALONE.traffic.nbytes.values()) == 0


def test_the_report_of_traffic_says_bytes_for_each_token_and_layer() -> None:
    traffic = Traffic()
    traffic.add("candidates", 4096)
    traffic.serve("candidates", 4)
    traffic.add("outputs", 10)
    traffic.serve("outputs", 3)
    lines = str(traffic).splitlines()
    assert [line.split() for line in lines[1:]] == [
        ["candidates", "4,096", "4", "1,024.0"],
        ["outputs", "10", "3", "3.3"],
    ]
