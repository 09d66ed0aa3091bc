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
TIMEOUT = timedelta(seconds=60)
# All groups that a test may ask for, as far as there are ranks: these must make them together.
MEMBERS = ((0, 1), (2, 3), (0, 2), (1, 3), (0, 1, 2), (0, 1, 2, 3))


class World:
    """What a function that runs on a rank is given first."""

    def __init__(self) -> None:
        self.rank = dist.get_rank()
        self.traffic = Traffic()
        size = dist.get_world_size()
        self._groups = {
            members: dist.new_group(list(members), timeout=TIMEOUT)  # its own is half an hour
            for members in MEMBERS
            if max(members) < size
        }

    def group(self, *members: int) -> Group:
        """The group of these ranks, of which this is one."""
        assert self.rank in members
        if len(members) == 1:
            return ALONE
        return Group(self._groups[members], self.traffic)


class Ranks:
    """`size` processes. Each holds its `World` and waits for functions."""

    def __init__(self, directory: Path, size: int = SIZE) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self.processes = []
        for rank in range(size):
            here, there = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, size, there, directory / "store"), daemon=True
            )
            process.start()
            there.close()
            self._pipes.append(here)
            self.processes.append(process)

    def run(self, size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        """function(world, *args) on the first `size` ranks -> what each returned. Raises the first error."""
        for rank in range(size):
            self.start(rank, function, *args)
        answers = [pipe.recv() for pipe in self._pipes[:size]]
        for _, error in answers:
            assert error is None, error
        return [value for value, _ in answers]

    def start(self, rank: int, function: Callable[..., Any], *args: Any) -> None:
        self._pipes[rank].send((function, args))

    def result(self, rank: int) -> Any:
        """What the function that was started there returned."""
        value, error = self._pipes[rank].recv()
        assert error is None, error
        return value

    def close(self) -> None:
        for pipe in self._pipes:
            with suppress(OSError):
                pipe.send(None)
        for process in self.processes:
            process.join(10)
            process.kill()


def _serve(rank: int, size: int, pipe: Connection, store: Path) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=TIMEOUT
    )
    world = World()
    with suppress(EOFError):
        while task := pipe.recv():
            function, args = task
            world.traffic.clear()
            try:
                answer = (function(world, *args), None)
            except Exception:
                answer = (None, f"rank {rank}:\n{traceback.format_exc()}")
            pipe.send(answer)
