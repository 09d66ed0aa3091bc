"""Expert parallel: rank r of the expert group owns the experts r * ceil(E / size) and on, whole.

Tokens that are the same on all ranks of the group (it is the tensor group) stay where they are: every rank
routes all of them, mixes the experts that it owns, and the sums are all-reduced in float32.

Tokens that differ (the group spans replicas) travel. Of its replica's tokens tensor rank t takes t, t + T and
so on, routes those and sends each to every rank that owns one of its experts, once, as one row of bytes:

    local experts [k] int32, -1 where they are not that rank's | their weights [k] float32 | z

The owners mix and send back float32 sums, which are added up in the order of ranks, rounded, and gathered
over the tensor group. Ranks without tokens and ranks without experts take part all the same.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from longspan.ops.backend import Operators
from longspan.ops.moe import MoeWeights
from longspan.parallel.layout import Layout, share

FIELD = 4  # bytes of an expert's number and of its weight


@dataclass(frozen=True)
class ExpertParallel:
    """`routed_experts` of `ops` over the expert group."""

    ops: Operators
    layout: Layout

    def routed_experts(self, x: Tensor, weights: MoeWeights) -> Tensor:
        """x [T, hidden], the same on all tensor ranks -> [T, in], so too."""
        self.layout.expert.traffic.serve("experts", x.shape[0])
        if self.layout.expert is self.layout.tensor:
            return self._in_place(x, weights)
        tensor = self.layout.tensor
        mine = self._dispatched(x[tensor.rank :: tensor.size], weights).to(x.dtype)
        if tensor.size == 1:
            return mine
        shares = -(-x.shape[0] // tensor.size)
        padded = mine.new_zeros(shares, mine.shape[1])
        padded[: mine.shape[0]] = mine
        everyone = tensor.all_gather(padded, "experts")
        return everyone.transpose(0, 1).flatten(0, 1)[: x.shape[0]].contiguous()

    def _in_place(self, x: Tensor, weights: MoeWeights) -> Tensor:
        group = self.layout.expert
        z, experts, shares = self.ops.route_experts(x, weights)
        own = share(len(weights.bank), group)
        elsewhere = (experts < own.start) | (experts >= own.stop)
        mixed = self.ops.mix_experts(z, experts.masked_fill(elsewhere, -1), shares, weights)
        return group.all_reduce(mixed, "experts").to(x.dtype)

    def _dispatched(self, x: Tensor, weights: MoeWeights) -> Tensor:
        """x [n, hidden] of this rank alone -> [n, in] float32."""
        group = self.layout.expert
        z, experts, shares = self.ops.route_experts(x.contiguous(), weights)
        block = -(-len(weights.bank) // group.size)
        owners = experts // block
        # (rank, token) pairs by rank, then token: one row each.
        to, token = (owners == torch.arange(group.size)[:, None, None]).any(-1).nonzero().unbind(1)
        local = torch.where(owners[token] == to[:, None], experts[token] - to[:, None] * block, -1)
        rows = torch.cat([_bytes(local.to(torch.int32)), _bytes(shares[token]), _bytes(z[token])], 1)

        sent = torch.bincount(to, minlength=group.size).tolist()
        received = group.counts(sent)
        rows = group.all_to_all(rows, sent, received, "experts")
        field = FIELD * experts.shape[1]
        local = _values(rows[:, :field], torch.int32).long()
        chosen = torch.where(local >= 0, local + group.rank * block, -1)
        mixed = self.ops.mix_experts(
            _values(rows[:, 2 * field :], z.dtype),
            chosen,
            _values(rows[:, field : 2 * field], torch.float32),
            weights,
        )
        mixed = group.all_to_all(mixed, received, sent, "experts")
        out = torch.zeros(z.shape)
        for part, rows_of in zip(mixed.split(sent), token.split(sent), strict=True):
            out[rows_of] += part  # a rank answers once for a token
        return out


def _bytes(rows: Tensor) -> Tensor:
    return _dense(rows).view(torch.uint8)


def _values(rows: Tensor, dtype: torch.dtype) -> Tensor:
    return _dense(rows).view(dtype)


def _dense(rows: Tensor) -> Tensor:
    """A copy: no rows at all count as contiguous with any strides, also with those that `view` refuses."""
    return rows.clone(memory_format=torch.contiguous_format)
