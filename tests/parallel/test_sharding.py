"""Who holds what: slices of a checkpoint, and layouts that can't be."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from longspan.config import load_config
from longspan.errors import ConfigError
from longspan.formats.check import require_text_model
from longspan.formats.inventory import common_specs, expected_tensors
from longspan.formats.safetensors import open_checkpoint
from longspan.memory.sizes import bytes_per_sequence, bytes_per_token
from longspan.model.weights import RenamedCheckpoint, build_weights
from longspan.ops.mla_prologue import MlaWeights
from longspan.ops.shard import WHOLE, Shard
from longspan.parallel.group import Group
from longspan.parallel.layout import Layout, share
from longspan.parallel.sharding import ShardedSource, local_weights


class Member(Group):
    """One rank of a group that sends nothing."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__()
        self.rank, self.size = rank, size


def layouts(path: Path, tensor: int, context: int = 1) -> list[Layout]:
    config = load_config(path)
    return [Layout(config, Member(rank, tensor), Member(rank % context, context)) for rank in range(tensor)]


def source_of(path: Path) -> RenamedCheckpoint:
    checkpoint = open_checkpoint(path)
    return RenamedCheckpoint(checkpoint, require_text_model(load_config(path), checkpoint))


@pytest.mark.parametrize("tensor", [1, 2, 4])
def test_slices_of_all_ranks_make_the_checkpoint(tensor: int, checkpoint: Path) -> None:
    """Each tensor is whole on every rank, or its slices of rows or of columns fit together."""
    whole = source_of(checkpoint)
    parts = [ShardedSource(source_of(checkpoint), layout) for layout in layouts(checkpoint, tensor)]
    cut = 0
    for name, _ in common_specs(load_config(checkpoint)):
        want, got = whole.tensor(name), [part.tensor(name) for part in parts]
        if all(torch.equal(one, want) for one in got):
            continue
        cut += 1
        if name.endswith("A_log"):
            want = want.reshape(-1)[: load_config(checkpoint).kda.num_heads]
        rows = torch.cat(got) if got[0].shape[1:] == want.shape[1:] else torch.empty(0)
        assert torch.equal(rows, want) or torch.equal(torch.cat(got, 1), want), name
    # Of 3 KDA layers 12 each, of 2 MLA layers 4, the dense feed-forward, shared experts and the way back of 4
    # layers, embedding and lm_head. A_log is always flat.
    assert cut == (3 if tensor == 1 else 3 * 12 + 2 * 4 + 3 + 4 * 4 + 2)


def test_slices_are_views_of_the_mapped_file_and_experts_are_left_alone(checkpoint: Path) -> None:
    whole, config = source_of(checkpoint), load_config(checkpoint)
    part = ShardedSource(whole, layouts(checkpoint, 2, 2)[1])
    for name in expected_tensors(config):
        tensor, got = whole.tensor(name), part.tensor(name)
        begin, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        assert begin <= got.data_ptr() < end, name
        if ".experts." in name:
            assert torch.equal(got, tensor)


def test_a_bfloat16_rank_computes_from_the_mapped_file(checkpoint: Path) -> None:
    path = str(checkpoint)
    spans = []
    weights = local_weights(source_of(checkpoint), layouts(checkpoint, 2)[1], torch.bfloat16)
    for line in Path("/proc/self/maps").read_text().splitlines():
        if path in line:
            spans.append([int(x, 16) for x in line.split()[0].split("-")])

    def in_file(tensor: Tensor) -> bool:
        return any(begin <= tensor.data_ptr() < end for begin, end in spans)

    for layer in weights.layers:
        assert in_file(layer.attention.output)
        if isinstance(layer.attention, MlaWeights):
            assert in_file(layer.attention.up_key) and in_file(layer.attention.up_value)
    assert in_file(weights.embed) and in_file(weights.lm_head)


@pytest.mark.parametrize("context", [1, 2, 4])
def test_a_rank_asks_for_all_heads_of_its_context_group_and_puts_out_its_own(
    context: int, checkpoint: Path
) -> None:
    whole = build_weights(source_of(checkpoint), load_config(checkpoint), torch.float32).layers[2].attention
    assert isinstance(whole, MlaWeights)
    for rank, layout in enumerate(layouts(checkpoint, 4, context)):
        mla = local_weights(source_of(checkpoint), layout, torch.float32).layers[2].attention
        assert isinstance(mla, MlaWeights)
        first = rank // context * context * 2
        assert torch.equal(mla.up_key, whole.up_key[first : first + 2 * context])
        assert torch.equal(mla.up_value, whole.up_value[2 * rank : 2 * rank + 2])
        assert mla.num_query_heads == layout.context_heads == 2 * context
        assert layout.local_config.mla.num_heads == 2


def test_memory_of_a_rank_follows_its_config(checkpoint: Path) -> None:
    whole, local = load_config(checkpoint), layouts(checkpoint, 4)[0].local_config
    assert bytes_per_sequence(whole).total == 4 * bytes_per_sequence(local).total
    assert bytes_per_token(whole) == bytes_per_token(local)


def test_blocks_cover_everything_once_and_are_as_long_as_the_first() -> None:
    for total in range(20):
        for size in range(1, 8):
            parts = [share(total, Member(rank, size)) for rank in range(size)]
            assert [i for part in parts for i in range(total)[part]] == list(range(total))
            assert all(part.stop - part.start <= parts[0].stop for part in parts)


def test_layouts_that_cannot_be_are_refused_with_the_legal_sizes(checkpoint: Path) -> None:
    config = load_config(checkpoint)

    def refused(message: str, *args, config=config, **kwargs) -> None:
        with pytest.raises(ConfigError, match=re.escape(message)):
            Layout(config, *args, **kwargs)

    refused("The tensor parallel size is 3, which must divide all heads", Member(0, 3))
    refused("the model has 4 KDA heads, 8 attention heads; columns: 50 dense feed-forward", Member(0, 8))
    refused("Legal sizes: 1, 2, 4.", Member(0, 8))
    narrow = replace(config, vocab_size=5)  # blocks of 2 leave nothing for the fourth
    refused("Legal sizes: 1, 2.", Member(0, 4), config=narrow)
    refused("The decode context parallel size is 3; it must divide", Member(0, 4), Member(0, 3))
    refused("Legal sizes: 1, 2, 4.", Member(0, 4), Member(0, 3))
    refused("Tensor rank 1 is rank 0 of its decode context group of 2; 1 was", Member(1, 4), Member(0, 2))
    refused("interleave of decode context parallel is 0", Member(0, 2), Member(0, 2), interleave=0)
    layout = Layout(config, Member(0, 2), Member(0, 2), interleave=3)
    with pytest.raises(
        ConfigError, match=r"interleave .* is 3; it must divide the page size, 4. Legal: 1, 2, 4"
    ):
        layout.check_page_size(4)
    layout.check_page_size(6)


def test_a_rank_without_context_group_has_all_tokens_whatever_the_interleave(checkpoint: Path) -> None:
    config = load_config(checkpoint)
    layout = Layout(config, Member(1, 2), interleave=16)
    assert layout.shard == WHOLE
    layout.check_page_size(4)
    assert Layout(config, Member(1, 2), Member(1, 2), interleave=16).shard == Shard(1, 2, 16)
