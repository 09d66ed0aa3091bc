from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from longspan.config import load_config
from longspan.memory.layout import allocate_views
from longspan.memory.memory import Memory
from longspan.memory.pool import Pool
from longspan.ops.batch import ZERO_CODE, KdaView, MlaView, QuantizedKeys


@pytest.fixture(params=["auto", "int8"])
def memory(data_dir: Path, request: pytest.FixtureRequest) -> Memory:
    return Memory(load_config(data_dir / "k31-text"), 6, 4, 3, torch.float32, request.param, poison=True)


def rows_of(memory: Memory, pages: list[int], slots: list[int]) -> list[torch.Tensor]:
    """Everything that these pages and slots hold in all layers; of int8 keys their dequantised values."""
    rows = []
    for view in memory.views:
        if isinstance(view, KdaView):
            rows += [view.state[slots], view.conv[slots]]
        else:
            rows += [view.latent[pages], key_values(view)[pages]]
    return rows


def key_values(view: MlaView) -> torch.Tensor:
    keys = view.index_key
    assert keys is not None
    if isinstance(keys, torch.Tensor):
        return keys
    return keys.scale[:, None, :, None] * (keys.codes.float() - ZERO_CODE)


def write(memory: Memory, value: float) -> None:
    for view in memory.views:
        if isinstance(view, KdaView):
            view.state.fill_(value)
            view.conv.fill_(value)
            continue
        view.latent.fill_(value)
        if isinstance(view.index_key, QuantizedKeys):
            view.index_key.codes.fill_(ZERO_CODE + 1)
            view.index_key.scale.fill_(value)
        else:
            assert view.index_key is not None
            view.index_key.fill_(value)


def test_every_layer_gets_the_view_of_its_kind(memory: Memory) -> None:
    kinds = ["mla" if isinstance(view, MlaView) else "kda" for view in memory.views]
    assert kinds == ["kda", "kda", "kda", "mla"] * 2


def test_a_new_sequence_holds_one_slot_and_no_page(memory: Memory) -> None:
    seq = memory.new_sequence()
    assert seq is not None
    assert (seq.pages, seq.num_tokens) == ([], 0)
    assert (memory.free_pages, memory.free_slots) == (6, 2)


@pytest.mark.parametrize(("tokens", "pages"), [(0, 0), (1, 1), (3, 1), (4, 1), (5, 2), (24, 6)])
def test_growing_takes_as_many_pages_as_the_tokens_need(memory: Memory, tokens: int, pages: int) -> None:
    seq = memory.new_sequence()
    assert seq is not None
    assert memory.grow(seq, tokens)
    assert len(seq.pages) == pages
    memory.check()


def test_growing_beyond_what_is_free_takes_nothing(memory: Memory) -> None:
    first, second = memory.new_sequence(), memory.new_sequence()
    assert first and second
    assert memory.grow(first, 17)
    assert not memory.grow(second, 5)
    assert (second.pages, memory.free_pages) == ([], 1)
    assert memory.grow(second, 4)


def test_growing_to_less_than_before_changes_nothing(memory: Memory) -> None:
    seq = memory.new_sequence()
    assert seq is not None
    memory.grow(seq, 9)
    pages = list(seq.pages)
    assert memory.grow(seq, 2)
    assert seq.pages == pages


def test_no_slot_left_means_no_sequence(memory: Memory) -> None:
    held = [memory.new_sequence() for _ in range(3)]
    assert None not in held
    assert memory.new_sequence() is None


def test_all_comes_back_in_one_call(memory: Memory) -> None:
    seq = memory.new_sequence()
    assert seq is not None
    memory.grow(seq, 20)
    memory.free(seq)
    assert (memory.free_pages, memory.free_slots) == (6, 3)
    memory.check()


def test_freeing_twice_is_an_error_and_changes_nothing(memory: Memory) -> None:
    seq = memory.new_sequence()
    assert seq is not None
    memory.free(seq)
    with pytest.raises(KeyError):
        memory.free(seq)
    memory.check()


def test_poisoned_memory_is_nan_before_first_use_and_after_each(memory: Memory) -> None:
    assert all(rows.isnan().all() for rows in rows_of(memory, list(range(6)), list(range(3))))
    seq = memory.new_sequence()
    assert seq is not None
    memory.grow(seq, 9)
    write(memory, 1.0)
    pages, slot = list(seq.pages), seq.slot
    memory.free(seq)
    assert all(rows.isnan().all() for rows in rows_of(memory, pages, [slot]))
    others = [page for page in range(6) if page not in pages]
    assert all((rows == 1).all() for rows in rows_of(memory, others, [s for s in range(3) if s != slot]))


@pytest.mark.parametrize("index_key_dtype", ["auto", "int8"])
def test_scrubbing_leaves_zeros_where_nothing_is_poisoned(index_key_dtype: str, data_dir: Path) -> None:
    memory = Memory(load_config(data_dir / "k31-text"), 4, 4, 2, torch.float32, index_key_dtype)
    seq = memory.new_sequence()
    assert seq is not None
    memory.grow(seq, 5)
    write(memory, torch.nan)
    pages, slot = list(seq.pages), seq.slot
    memory.free(seq, scrub=True)
    assert all((rows == 0).all() for rows in rows_of(memory, pages, [slot]))


def test_int8_keys_are_whole_quads_with_a_scale_for_each_key(data_dir: Path) -> None:
    config = load_config(data_dir / "k31-text")
    assert config.indexer
    config = replace(config, indexer=replace(config.indexer, head_dim=6))
    for view in allocate_views(config, 7, 5, 3, torch.bfloat16, "int8", fill=torch.nan):
        if isinstance(view, MlaView):
            keys = view.index_key
            assert isinstance(keys, QuantizedKeys) and view.latent.dtype == torch.bfloat16
            assert keys.codes.shape == (7, 2, 5, 4) and keys.codes.dtype == torch.uint8
            assert keys.scale.shape == (7, 5) and keys.scale.dtype == torch.float32
            assert (keys.codes == ZERO_CODE).all() and keys.scale.isnan().all()


def test_a_pool_gives_out_what_was_used_last() -> None:
    pool = Pool("page", 8)
    assert pool.take(3) == [0, 1, 2]
    pool.give_back([0, 1, 2])
    assert pool.take(2) == [0, 1]


@pytest.mark.parametrize(
    ("held", "message"), [([0, 1], "lost: \\[2\\]"), ([0, 1, 2, 3], "two places: \\[3\\]")]
)
def test_a_pool_notices_what_is_lost_or_in_two_places(held: list[int], message: str) -> None:
    pool = Pool("page", 5)
    pool.take(3)
    with pytest.raises(RuntimeError, match=message):
        pool.check(held)
