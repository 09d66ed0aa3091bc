"""What a plan says a rank holds is what a rank holds: tensors of loaded weights, and the arena's views."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.random_checkpoint import write_checkpoint
from support.weight_bytes import weight_tensors

from longspan.config import load_config
from longspan.errors import CapacityError
from longspan.formats.inventory import totals
from longspan.memory.memory import Memory
from longspan.memory.sizes import page_layout, pages_per_slab, slot_layout
from longspan.model.loader import load_model, open_model
from longspan.ops.batch import KdaView, QuantizedKeys
from longspan.parallel.group import Group
from longspan.parallel.layout import Layout, share
from longspan.parallel.sharding import local_weights
from longspan.planning.memory import memory_of
from longspan.planning.models import PUBLISHED, load_model_config
from longspan.planning.schemes import SCHEMES
from longspan.planning.split import Split, legal_splits

PROMISED = 0.03
HEADS = {
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "linear_attn_config": {
        "head_dim": 6,
        "num_heads": 8,
        "short_conv_kernel_size": 4,
        "full_attn_layers": [3, 5],
        "kda_layers": [1, 2, 4],
    },
}
GATE = {"use_full_rank_gate": True, "gate_lower_bound": -5.0}


def changes(family: str) -> dict[str, Any]:
    """Heads that eight ranks can share; widths, vocabulary and experts stay odd."""
    gate = {} if family == "kimi-linear" else GATE
    return HEADS | {"linear_attn_config": HEADS["linear_attn_config"] | gate}


class Member(Group):
    """One rank of a group that sends nothing."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__()
        self.rank, self.size = rank, size


@pytest.mark.parametrize(
    ("family", "packed"),
    [("kimi-linear", False), ("k3", False), ("k3", True), ("k3.1", False), ("k3.1", True)],
)
def test_weights_of_one_process_are_predicted(family: str, packed: bool, tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "model", family, packed=packed)
    config = load_config(path)
    held = sum(t.nbytes for t in weight_tensors(load_model(path, backend="torch").weights, slice(None)))
    assert memory_of(config, Split()).weight_bytes == pytest.approx(held, rel=PROMISED)


@pytest.mark.parametrize("family", ["kimi-linear", "k3.1"])
@pytest.mark.parametrize(("tensor", "context"), [(2, 1), (4, 2), (8, 8)])
def test_weights_of_the_fullest_rank_are_predicted(
    family: str, tensor: int, context: int, tmp_path: Path
) -> None:
    path = write_checkpoint(tmp_path / "model", family, packed=family != "kimi-linear", **changes(family))
    config, source = open_model(path)
    ranks = []
    for rank in range(tensor):
        group = Member(rank, tensor)
        layout = Layout(config, group, Member(rank % context, context), group)
        weights = local_weights(source, layout, torch.bfloat16)
        own = share(config.moe.num_experts, group)
        ranks.append(sum(t.nbytes for t in weight_tensors(weights, own)))
    split = Split(tensor, context=context)
    if split.expert > config.moe.num_experts:  # the last ranks have none, which a plan refuses
        with pytest.raises(CapacityError):
            memory_of(config, split)
        return
    assert memory_of(config, split).weight_bytes == pytest.approx(max(ranks), rel=PROMISED)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("keys", ["auto", "int8"])
def test_pages_and_states_of_the_arena_are_predicted(keys: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Both as the views count, and as the arena takes them where pages fill a slab well."""
    path = write_checkpoint(tmp_path / "model", "k3.1", packed=True)
    config, page_size = load_config(path), 64
    size = dtype.itemsize
    page = page_layout(config, page_size, size, keys).num_bytes
    slot = slot_layout(config, size).num_bytes
    per_slab = pages_per_slab(page, slot)
    memory = Memory(
        config, num_slabs=6, pages_per_slab=per_slab, page_size=page_size, dtype=dtype, index_key_dtype=keys
    )
    predicted = memory_of(config, Split(), element_bytes=size, index_key_dtype=keys, page_tokens=page_size)
    states, pages = 0, 0
    for view in memory.views:
        if isinstance(view, KdaView):
            states += view.state[0].nbytes + view.conv[0].nbytes
        else:
            key = view.index_key
            parts = [key.codes, key.scale] if isinstance(key, QuantizedKeys) else [key]
            pages += view.latent[0].nbytes + sum(part[0].nbytes for part in parts if part is not None)
    assert predicted.state_per_sequence == states
    assert predicted.page_bytes == pytest.approx(pages, rel=PROMISED)
    assert predicted.pages_of(3 * page_size + 1) == 4
    assert predicted.page_bytes == pytest.approx(memory.page_stride, rel=PROMISED)


def test_a_whole_arena_is_predicted_to_3_percent(tmp_path: Path) -> None:
    """Published proportions of state and page: nothing is lost to slabs."""
    config = load_model_config("kimi-k3.1-pro")
    page, slot = page_layout(config, 64).num_bytes, slot_layout(config).num_bytes
    per_slab = pages_per_slab(page, slot)
    memory = memory_of(config, Split(), page_tokens=64)
    # A slab of the arena is a state or so many pages.
    assert per_slab * memory.page_bytes == pytest.approx(memory.state_per_sequence, rel=PROMISED)


@pytest.mark.parametrize("model", PUBLISHED)
def test_one_rank_of_everything_holds_the_published_bytes(model: str) -> None:
    config = load_model_config(model)
    want = sum(part.nbytes for part in totals(config).values())
    assert memory_of(config, Split(), vision=True).weight_bytes == want


def test_known_numbers_of_k31_pro() -> None:
    config = load_model_config("kimi-k3.1-pro")
    memory = memory_of(config, Split(16, 4, 16), SCHEMES["w4a8"])
    assert memory.weights["routed experts"] == 92 * 14 * 3 * 3072 * 3584 * 4.25 / 8
    assert memory.latent_per_token == 24 * 576 * 2 / 16
    assert memory.index_per_token == 24 * 128 * 2 / 16
    assert memory.recurrent_per_sequence == 69 * 6 * 128 * 128 * 4
    whole = memory_of(config, Split(16, 4, 16), SCHEMES["w4a8"], indexes_whole=True)
    assert whole.index_per_token == 24 * 128 * 2
    assert whole.weights == memory.weights


@given(st.data())
@settings(max_examples=40)
def test_ranks_together_hold_at_least_the_model_and_more_sharing_never_takes_more(
    data: st.DataObject,
) -> None:
    config = load_model_config("kimi-k3.1-pro")
    splits = legal_splits(config, data.draw(st.integers(1, 8)), data.draw(st.sampled_from([1, 2, 8, 16])))
    split = data.draw(st.sampled_from(splits))
    memory, alone = memory_of(config, split), memory_of(config, Split())
    assert memory.weight_bytes * split.devices >= alone.weight_bytes
    assert memory.weight_bytes <= alone.weight_bytes
    assert memory.latent_per_token * split.context == alone.latent_per_token
    assert memory.state_per_sequence * split.tensor == alone.state_per_sequence
    tokens = data.draw(st.integers(0, 2**20))
    assert memory.pages_of(tokens) * memory.page_tokens * split.context >= tokens


@pytest.mark.parametrize(
    ("split", "why"),
    [
        (Split(5), "96 KDA heads over 5"),
        (Split(8, context=3), "DCP 3 does not divide TP 8"),
        (Split(16, 64), "896 experts over 1024"),
    ],
)
def test_a_split_that_cannot_be_is_refused_with_its_reason(split: Split, why: str) -> None:
    with pytest.raises(CapacityError, match=why):
        memory_of(load_model_config("kimi-k3.1-pro"), split)
