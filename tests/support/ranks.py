"""A few processes, started once, that run functions as the ranks of gloo groups over loopback."""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from longspan.parallel.group import ALONE, Group
from longspan.parallel.traffic import Traffic

SIZE = 4
TIMEOUT = 60  # seconds
# All groups that a test may ask for: ranks must make them together.
MEMBERS = ((0, 1), (2, 3), (0, 2), (1, 3), (0, 1, 2), (0, 1, 2, 3))


class World:
    """What a function that runs on a rank is given first."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.traffic = Traffic()
        self._groups = {members: dist.new_group(list(members)) for members in MEMBERS}

    def group(self, *members: int) -> Group:
        """The group of these ranks, of which this is one."""
        assert self.rank in members
        if len(members) == 1:
            return ALONE
        return Group(self._groups[members], self.traffic)


class Ranks:
    """`SIZE` processes. Each holds its `World` and waits for functions."""

    def __init__(self, directory: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self.processes = []
        for rank in range(SIZE):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(rank, there, directory / "store"), daemon=True)
            process.start()
            there.close()
            self._pipes.append(here)
            self.processes.append(process)

    def run(self, size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        """function(world, *args) on the first `size` ranks -> what each returned. Raises the first error."""
        for pipe in self._pipes[:size]:
            pipe.send((function, args))
        answers = [pipe.recv() for pipe in self._pipes[:size]]
        for value, error in answers:
            if error:
                raise AssertionError(error)
            del value
        return [value for value, _ in answers]

    def close(self) -> None:
        for pipe in self._pipes:
            with suppress(OSError):
                pipe.send(None)
        for process in self.processes:
            process.join(10)
            process.kill()


def _serve(rank: int, pipe: Connection, store: Path) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=SIZE,
        timeout=timedelta(seconds=TIMEOUT),
    )
    world = World(rank)
    with suppress(EOFError):
        while task := pipe.recv():
            function, args = task
            world.traffic.clear()
            try:
                answer = (function(world, *args), None)
            except Exception:
                answer = (None, f"rank {rank}:\n{traceback.format_exc()}")
            pipe.send(answer)
    dist.destroy_process_group()
