"""What ranks do in the tests of whole decoders: importable, so that their processes find it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
from support.batches import Host
from support.ranks import World
from torch import Tensor

from longspan.config import load_config
from longspan.formats.check import require_text_model
from longspan.formats.safetensors import open_checkpoint
from longspan.model.decoder import Decoder
from longspan.model.weights import RenamedCheckpoint
from longspan.ops.backend import select_backend
from longspan.ops.batch import MlaView
from longspan.ops.pages import read_span
from longspan.ops.shard import Shard
from longspan.parallel.group import ALONE
from longspan.parallel.layout import Layout
from longspan.parallel.operators import parallel_operators
from longspan.parallel.sharding import local_weights
from longspan.parallel.traffic import Traffic

Chunks = dict[int, list[int]]  # tokens that a step feeds to each sequence


@dataclass(frozen=True)
class Split:
    """Ranks 0, 1, .. as `replicas` of `tensor` ranks each, every `context` of which share out tokens."""

    tensor: int = 1
    context: int = 1
    replicas: int = 1
    interleave: int = 1
    backend: str = "torch"
    dtype: torch.dtype = torch.float32

    @property
    def size(self) -> int:
        return self.tensor * self.replicas

    def layout(self, world: World, path: Path) -> Layout:
        replica, rank = divmod(world.rank, self.tensor)
        first = replica * self.tensor
        neighbours = first + rank // self.context * self.context
        tensor = world.group(*range(first, first + self.tensor))
        expert = world.group(*range(self.size)) if self.replicas > 1 else tensor
        context = world.group(*range(neighbours, neighbours + self.context)) if self.context > 1 else ALONE
        return Layout(load_config(path), tensor, context, expert, self.interleave)


@dataclass(frozen=True)
class Fork:
    """Before step `step`, sequence `to` becomes a copy of `source`, whose pages it shares."""

    step: int
    source: int
    to: int


class Trace(NamedTuple):
    """What a rank saw."""

    shard: Shard
    logits: list[dict[int, Tensor]]  # of each step, by sequence
    selected: list[list[Tensor]]  # of each step, full-attention layer by layer: [T, k] positions, -1: none
    keys: list[list[Tensor]]  # index keys of each sequence, layer by layer, [tokens that are here, dim]
    traffic: Traffic


@dataclass
class Script:
    """Steps that a replica takes; all replicas of a split take equally many."""

    steps: list[Chunks]
    num_seqs: int
    max_tokens: int
    page_size: int = 4
    forks: list[Fork] = field(default_factory=list)


def local_decoder(path: Path, layout: Layout, backend: str, dtype: torch.dtype) -> Decoder:
    checkpoint = open_checkpoint(path)
    source = RenamedCheckpoint(checkpoint, require_text_model(layout.config, checkpoint))
    weights = local_weights(source, layout, dtype)
    ops = parallel_operators(select_backend(backend), layout)
    return Decoder(layout.local_config, weights, ops, dtype)


def run_split(world: World, path: Path, split: Split, scripts: Sequence[Script]) -> Trace:
    layout = split.layout(world, path)
    script = scripts[world.rank // split.tensor]
    layout.check_page_size(script.page_size)
    trace = run_script(local_decoder(path, layout, split.backend, split.dtype), script, layout.shard)
    return trace._replace(traffic=world.traffic)


def run_script(model: Decoder, script: Script, shard: Shard) -> Trace:
    host = Host(model, script.num_seqs, script.max_tokens, script.page_size, shard)
    logits, selected = [], []
    for i, chunks in enumerate(script.steps):
        for fork in script.forks:
            if fork.step == i:
                _fork(host, fork)
        chosen: list[Tensor] = []

        def observe(name: str, _: int, tensor: Tensor, chosen: list[Tensor] = chosen) -> None:
            if name == "selected":
                chosen.append(torch.where(tensor < 0, tensor, shard.position(tensor)))

        logits.append(host.step(chunks, observe))
        selected.append(chosen)
    return Trace(shard, logits, selected, [_keys(host, s) for s in range(script.num_seqs)], Traffic())


def _fork(host: Host, fork: Fork) -> None:
    tables, tokens = host.tables, host.lengths[fork.source]
    pages = host.shard.count(tokens) // tables.page_size
    assert host.shard.count(tokens) % tables.page_size == 0, "whole pages are shared"
    tables.pages[fork.to, :pages] = tables.pages[fork.source, :pages]
    for view in host.views:
        if not isinstance(view, MlaView):
            for memory in (view.state, view.conv):
                memory[tables.slots[fork.to]] = memory[tables.slots[fork.source]]
    host.lengths[fork.to] = tokens


def _keys(host: Host, seq: int) -> list[Tensor]:
    here = host.shard.count(host.lengths[seq])
    return [
        read_span(view.index_key, host.tables.pages[seq], 0, here)
        for view in host.views
        if isinstance(view, MlaView) and isinstance(view.index_key, Tensor)
    ]
