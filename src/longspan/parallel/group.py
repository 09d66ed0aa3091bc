"""Ranks that compute together, over a torch.distributed process group of any backend that does CPU tensors.

    all_reduce    sum over ranks; the same bits on every rank
    all_gather    [..] of each rank -> [size, ..], on every rank
    all_to_all    rows cut by destination -> rows that others sent here, by source; any numbers, 0 too
    exchange      part j to rank j; the parts sent here are given out one by one in a fixed order

All ranks of a group must call the same collectives in the same order, ranks without rows too. What a rank
receives is counted by kind (`traffic.py`). A peer that died or did not answer within the process group's
timeout is a PeerError that names the collective; the group is of no use after that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from longspan.errors import PeerError
from longspan.parallel.traffic import Kind, Traffic


class Group:
    """`process_group` None: this rank alone, for which nothing is ever sent.

    A host with a faster sum (shared memory) passes it as `all_reduce`: Tensor -> Tensor, in place or not.
    Groups that share a `traffic` are counted together.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None = None,
        traffic: Traffic | None = None,
        all_reduce: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self._process_group = process_group
        self._all_reduce = all_reduce
        self.traffic = Traffic() if traffic is None else traffic
        self.rank = 0 if process_group is None else dist.get_rank(process_group)
        self.size = 1 if process_group is None else dist.get_world_size(process_group)

    def all_reduce(self, x: Tensor, kind: Kind) -> Tensor:
        """x [T, ..] of the same shape on all ranks -> the sum, in place where x is contiguous."""
        if self.size == 1 or x.numel() == 0:
            return x
        x = x.contiguous()
        with self._collective("all_reduce", kind):
            if self._all_reduce:
                x = self._all_reduce(x)
            else:
                dist.all_reduce(x, group=self._process_group)
        self.traffic.add(kind, 2 * (self.size - 1) * x.nbytes // self.size)
        return x

    def all_gather(self, x: Tensor, kind: Kind) -> Tensor:
        """x [T, ..] of the same shape on all ranks -> [size, T, ..]."""
        if self.size == 1 or x.numel() == 0:
            return x.expand(self.size, *x.shape)
        out = x.new_empty(self.size, *x.shape)
        with self._collective("all_gather", kind):
            dist.all_gather_single(out.flatten(0, 1), x.contiguous(), group=self._process_group)
        self.traffic.add(kind, (self.size - 1) * x.nbytes)
        return out

    def counts(self, sent: Sequence[int]) -> list[int]:
        """sent[j] rows go from here to rank j -> how many come from each."""
        if self.size == 1:
            return list(sent)
        out = torch.tensor(sent)
        received = torch.empty_like(out)
        with self._collective("all_to_all", "counts"):
            dist.all_to_all_single(received, out, group=self._process_group)
        return received.tolist()

    def all_to_all(self, rows: Tensor, sent: Sequence[int], received: Sequence[int], kind: Kind) -> Tensor:
        """rows [sum(sent), ..] by destination -> [sum(received), ..] by source; `received` from `counts`."""
        if self.size == 1:
            return rows
        out = rows.new_empty(sum(received), *rows.shape[1:])
        with self._collective("all_to_all", kind):
            dist.all_to_all_single(
                out, rows.contiguous(), list(received), list(sent), group=self._process_group
            )
        self.traffic.add(kind, out[received[self.rank] :].nbytes)
        return out

    def exchange(self, parts: Tensor, arrived: Callable[[Tensor], None], kind: Kind) -> None:
        """parts [size, T, ..], contiguous: parts[j] goes to rank j, one's own nowhere.

        `arrived` is called with the part [T, ..] of rank + 1, of rank + 2 and so on, round to rank - 1; while
        it works the next is on its way. It must be done with the part when it returns.
        """
        if self.size == 1 or parts.numel() == 0:
            return
        group = self._process_group
        around = [(self.rank + step) % self.size for step in range(1, self.size)]
        buffers = [torch.empty_like(parts[0]) for _ in around[:2]]
        with self._collective("exchange", kind):
            # Rank r waits for r + 1 first, so what r - 1 waits for goes out first.
            sending = [dist.isend(parts[to], group=group, group_dst=to) for to in reversed(around)]
            incoming = dist.irecv(buffers[0], group=group, group_src=around[0])
        for step in range(len(around)):
            with self._collective("exchange", kind):
                _wait(incoming)
                if step + 1 < len(around):
                    incoming = dist.irecv(buffers[(step + 1) % 2], group=group, group_src=around[step + 1])
            arrived(buffers[step % 2])
        with self._collective("exchange", kind):
            for work in sending:
                _wait(work)
        self.traffic.add(kind, len(around) * parts[0].nbytes)

    @contextmanager
    def _collective(self, name: str, what: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            reason = str(error).splitlines()[0].rstrip(".")
            raise PeerError(
                f"{name} of {what} failed on rank {self.rank} of {self.size}: {reason}.",
                remedy="A rank has died or hangs: see its log, then start all of them again.",
            ) from error


def _wait(work: dist.Work | None) -> None:
    assert work is not None, "this rank is of the group"
    work.wait()


ALONE = Group()
"""One rank, no torch.distributed."""
