"""What ranks do in the tests of collectives."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from support.ranks import World
from torch import Tensor

from longspan.errors import PeerError
from longspan.parallel.group import Group


def all_to_all(world: World, size: int, plans: list[list[list[int]]]) -> list[tuple[Tensor, dict[str, int]]]:
    """plans[i][r][j]: rows that rank r sends to rank j. A row says [sender, receiver, number]."""
    group, answers = world.group(*range(size)), []
    for plan in plans:
        sent = plan[world.rank]
        rows = [[world.rank, j, i] for j, count in enumerate(sent) for i in range(count)]
        received = group.counts(sent)
        assert received == [row[world.rank] for row in plan]
        world.traffic.clear()
        got = group.all_to_all(torch.tensor(rows, dtype=torch.int64).view(-1, 3), sent, received, "experts")
        answers.append((got, dict(world.traffic.nbytes)))
    return answers


def exchange(world: World, size: int, rows: int) -> tuple[list[float], int]:
    """Part j of rank r is full of 10 r + j -> what arrived, in order, and the bytes counted."""
    group, arrived = world.group(*range(size)), []
    parts = torch.tensor([10.0 * world.rank + j for j in range(size)])
    parts = parts[:, None, None].expand(size, rows, 1000).contiguous()

    def keep(part: Tensor) -> None:
        assert part.shape == (rows, 1000) and (part == part[0, 0]).all()
        arrived.append(part[0, 0].item())

    group.exchange(parts, keep, "outputs")
    return arrived, world.traffic.nbytes["outputs"]


def sums_and_gathers(world: World, size: int) -> tuple[Tensor, Tensor, Tensor, dict[str, int]]:
    group = world.group(*range(size))
    summed = group.all_reduce(torch.full((3, 8), 2.0**world.rank), "sums")
    gathered = group.all_gather(torch.full((2, 5), float(world.rank)), "logits")
    nothing = group.all_gather(group.all_reduce(torch.empty(0, 4), "sums"), "sums")
    return summed, gathered, nothing, dict(world.traffic.nbytes)


def hosts_own_sum(world: World) -> Tensor:
    """A host's own all_reduce, which this one only pretends to be."""
    return Group(dist.group.WORLD, world.traffic, lambda x: x + 41).all_reduce(torch.ones(1, 4), "sums")


COLLECTIVES = {
    "all_reduce of sums": lambda group: group.all_reduce(torch.ones(4, 4), "sums"),
    "all_gather of candidates": lambda group: group.all_gather(torch.ones(4, 4), "candidates"),
    "all_to_all of counts": lambda group: group.counts([1, 1]),
    "all_to_all of experts": lambda group: group.all_to_all(torch.ones(2, 4), [1, 1], [1, 1], "experts"),
    "exchange of outputs": lambda group: group.exchange(torch.ones(2, 4, 4), lambda _: None, "outputs"),
}


def lonely(world: World, name: str) -> str:
    """Rank 0 takes part in a collective, rank 1 does not -> the error of rank 0."""
    members = dist.new_group([0, 1], timeout=timedelta(seconds=1), use_local_synchronization=True)
    if world.rank == 1:
        return ""
    return _error_of(Group(members), name)


def widowed(world: World, name: str) -> str:
    """Rank 1 dies while rank 0 waits for it -> the error of rank 0."""
    group = world.group(0, 1)
    group.all_reduce(torch.ones(1, 1), "sums")
    if world.rank == 1:
        os._exit(1)
    return _error_of(group, name)


def _error_of(group: Group, name: str) -> str:
    try:
        COLLECTIVES[name](group)
    except PeerError as error:
        return str(error)
    return "no error"
