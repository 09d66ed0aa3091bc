from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from longspan.config import load_config
from longspan.memory.layout import allocate_views
from longspan.memory.memory import Memory, SequenceMemory
from longspan.memory.prefix_cache import page_digests
from longspan.ops.batch import ZERO_CODE, KdaView, MlaView, QuantizedKeys


@pytest.fixture(params=["auto", "int8"])
def memory(data_dir: Path, request: pytest.FixtureRequest) -> Memory:
    return new_memory(data_dir, index_key_dtype=request.param, poison=True)


def new_memory(data_dir: Path, num_slabs: int = 9, **options: Any) -> Memory:
    """Slabs of one page of 4 tokens."""
    config = load_config(data_dir / "k31-text")
    given = {"num_slabs": num_slabs, "pages_per_slab": 1, "page_size": 4, "dtype": torch.float32}
    return Memory(config, **(given | options))


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


def write(memory: Memory, pages: list[int], slots: list[int], value: float) -> None:
    for view in memory.views:
        if isinstance(view, KdaView):
            view.state[slots] = view.conv[slots] = value
            continue
        view.latent[pages] = value
        if isinstance(view.index_key, QuantizedKeys):
            view.index_key.codes[pages] = ZERO_CODE + 1
            view.index_key.scale[pages] = value
        else:
            assert view.index_key is not None
            view.index_key[pages] = value


def test_every_layer_gets_the_view_of_its_kind(memory: Memory) -> None:
    kinds = ["mla" if isinstance(view, MlaView) else "kda" for view in memory.views]
    assert kinds == ["kda", "kda", "kda", "mla"] * 2


def test_a_new_sequence_holds_one_slot_and_no_page(memory: Memory) -> None:
    seq = memory.new_sequence()
    assert seq is not None
    assert (seq.pages, seq.num_tokens) == ([], 0)
    assert memory.free_pages == 8


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
    assert memory.grow(first, 24)
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


def test_no_slab_left_means_no_sequence(memory: Memory) -> None:
    held = [memory.new_sequence() for _ in range(9)]
    assert None not in held
    assert memory.new_sequence() is None


def test_all_comes_back_in_one_call(memory: Memory) -> None:
    seq = memory.new_sequence()
    assert seq is not None
    memory.grow(seq, 20)
    memory.free(seq)
    assert memory.free_pages == 9
    memory.check()


def test_freeing_twice_is_an_error_and_changes_nothing(memory: Memory) -> None:
    seq = memory.new_sequence()
    assert seq is not None
    memory.free(seq)
    with pytest.raises(KeyError):
        memory.free(seq)
    memory.check()


def test_poisoned_memory_is_nan_before_first_use_and_after_each(memory: Memory) -> None:
    assert all(rows.isnan().all() for rows in rows_of(memory, list(range(9)), list(range(9))))
    seq = memory.new_sequence()
    assert seq is not None
    memory.grow(seq, 9)
    write(memory, seq.pages, [seq.slot], 1.0)
    pages, slot = list(seq.pages), seq.slot
    memory.free(seq)
    assert all((rows == 1).all() for rows in rows_of(memory, pages, [slot]))  # a step may still read it
    memory.settle()
    assert all(rows.isnan().all() for rows in rows_of(memory, pages, [slot]))


@pytest.mark.parametrize("index_key_dtype", ["auto", "int8"])
def test_scrubbing_leaves_zeros_where_nothing_is_poisoned(index_key_dtype: str, data_dir: Path) -> None:
    memory = new_memory(data_dir, index_key_dtype=index_key_dtype)
    seq = memory.new_sequence()
    assert seq is not None
    memory.grow(seq, 5)
    write(memory, seq.pages, [seq.slot], torch.nan)
    pages, slot = list(seq.pages), seq.slot
    memory.free(seq, scrub=True)
    memory.settle()
    assert all((rows == 0).all() for rows in rows_of(memory, pages, [slot]))


def checkpoint(memory: Memory, seq: SequenceMemory, digests: list[bytes]) -> None:
    """Keeps the state of `seq` after the pages of `digests`."""
    slot = memory.reserve_state()
    assert slot is not None
    memory.kept_up_to(seq, len(digests) * memory.page_size)
    memory.copy_state(seq.slot, slot)
    memory.publish(seq, digests, slot)


def test_a_sequence_goes_on_from_a_checkpoint_with_its_pages_and_a_copy_of_its_state(memory: Memory) -> None:
    digests = page_digests(range(12), 4)
    first = memory.new_sequence()
    assert first is not None
    memory.grow(first, 12)
    write(memory, first.pages, [first.slot], 3.0)
    checkpoint(memory, first, digests[:2])
    second = memory.new_sequence(digests)
    assert second is not None
    assert (second.num_tokens, second.pages) == (8, first.pages[:2])
    memory.settle()
    assert all((rows == 3).all() for rows in rows_of(memory, second.pages, [second.slot]))
    memory.free(first)
    memory.settle()
    assert all((rows == 3).all() for rows in rows_of(memory, second.pages, [second.slot]))
    memory.free(second)
    memory.check()
    assert memory.use().page_bytes_cached == 2 * memory.page_stride


def test_the_cache_gives_way_to_sequences(memory: Memory) -> None:
    seq = memory.new_sequence()
    assert seq is not None
    memory.grow(seq, 12)
    checkpoint(memory, seq, page_digests(range(12), 4))
    memory.free(seq)
    other = memory.new_sequence()
    assert other is not None
    assert memory.grow(other, 32)
    assert memory.cache.num_checkpoints == 0
    memory.check()


def test_who_can_not_have_all_pages_takes_none_from_the_cache(memory: Memory) -> None:
    cached = memory.new_sequence()
    assert cached is not None
    memory.grow(cached, 8)
    checkpoint(memory, cached, page_digests(range(8), 4))
    memory.free(cached)
    running, other = memory.new_sequence(), memory.new_sequence()
    assert running and other and memory.grow(running, 12)
    assert not memory.grow(other, 20)  # of 9 slabs 5 are held
    assert memory.cache.num_checkpoints == 1
    assert memory.grow(other, 16)
    assert memory.cache.num_checkpoints == 0
    memory.check()


def test_states_above_that_of_a_sequence_give_way_to_its_pages(memory: Memory) -> None:
    seq = memory.new_sequence()
    assert seq is not None
    digests = page_digests(range(16), 4)
    for num_pages in (1, 2, 3):
        assert memory.grow(seq, 4 * num_pages)
        checkpoint(memory, seq, digests[:num_pages])
    assert memory.grow(seq, 28)  # 7 pages, its own state and that which it stands on
    assert memory.cache.num_checkpoints == 1
    assert not memory.grow(seq, 32)
    memory.check()


def test_a_checkpoint_in_use_does_not_give_way(memory: Memory) -> None:
    digests = page_digests(range(16), 4)
    seq = memory.new_sequence()
    assert seq is not None
    memory.grow(seq, 12)
    checkpoint(memory, seq, digests[:3])
    memory.free(seq)
    user, other = memory.new_sequence(digests), memory.new_sequence()
    assert user and other
    assert not memory.grow(other, 16)
    assert memory.grow(other, 12)
    memory.check()


@pytest.mark.parametrize("on_a_checkpoint", [False, True])
def test_what_is_swapped_out_comes_back_bit_for_bit(data_dir: Path, on_a_checkpoint: bool) -> None:
    memory = new_memory(data_dir, num_slabs=12, swap_bytes=1 << 30, poison=True)
    digests = page_digests(range(12), 4)
    seq = memory.new_sequence()
    assert seq is not None
    memory.grow(seq, 11)
    write(memory, seq.pages, [seq.slot], 5.0)
    if on_a_checkpoint:
        checkpoint(memory, seq, digests[:1])
    seq.num_tokens = 11
    swapped = memory.swap_out(seq)
    assert swapped is not None
    assert memory.use().state_bytes_running == 0 < memory.use().swap_bytes
    other = memory.new_sequence()
    assert other is not None
    memory.grow(other, 20)
    memory.settle()
    write(memory, other.pages, [other.slot], 1.0)
    back = memory.swap_in(swapped, 12)
    assert back is not None
    memory.settle()
    assert (back.num_tokens, len(back.pages)) == (11, 3)
    assert all((rows == 5).all() for rows in rows_of(memory, back.pages, [back.slot]))
    assert memory.use().swap_bytes == 0
    memory.check()


def test_a_swapped_sequence_is_lost_with_its_checkpoint(data_dir: Path) -> None:
    memory = new_memory(data_dir, swap_bytes=1 << 30)
    seq = memory.new_sequence()
    assert seq is not None
    memory.grow(seq, 8)
    checkpoint(memory, seq, page_digests(range(4), 4))
    seq.num_tokens = 8
    swapped = memory.swap_out(seq)
    assert swapped is not None and not swapped.lost
    memory.cache.clear()
    assert swapped.lost
    with pytest.raises(KeyError):
        memory.swap_in(swapped, 8)


def test_a_full_host_pool_takes_nothing(data_dir: Path) -> None:
    memory = new_memory(data_dir, swap_bytes=100)
    seq = memory.new_sequence()
    assert seq is not None
    assert memory.swap_out(seq) is None
    memory.free(seq)


@pytest.mark.parametrize("index_key_dtype", ["auto", "int8"])
def test_a_number_that_is_none_is_found_wherever_it_is(data_dir: Path, index_key_dtype: str) -> None:
    memory = new_memory(data_dir, index_key_dtype=index_key_dtype)
    write(memory, list(range(9)), list(range(9)), 1.0)
    assert memory.is_finite(3, [1, 2])
    for value in (torch.nan, torch.inf, -torch.inf):
        for view in memory.views:
            if isinstance(view, KdaView):
                places = [(view.state, 3), (view.conv, 3)]
            else:
                keys = view.index_key.scale if isinstance(view.index_key, QuantizedKeys) else view.index_key
                places = [(view.latent, 2), (keys, 2)]
            for tensor, row in places:
                assert tensor is not None
                flat = tensor[row].flatten()
                kept, flat[-1] = flat[-1].clone(), value
                tensor[row] = flat.view(tensor[row].shape)
                assert not memory.is_finite(3, [1, 2])
                flat[-1] = kept
                tensor[row] = flat.view(tensor[row].shape)
    assert memory.is_finite(3, [1, 2])


def test_int8_keys_are_whole_quads_with_a_scale_for_each_key(data_dir: Path) -> None:
    config = load_config(data_dir / "k31-text")
    assert config.indexer
    config = replace(config, indexer=replace(config.indexer, head_dim=6))
    for view in allocate_views(config, 7, 5, 3, torch.bfloat16, "int8", poison=True):
        if isinstance(view, MlaView):
            keys = view.index_key
            assert isinstance(keys, QuantizedKeys) and view.latent.dtype == torch.bfloat16
            assert keys.codes.shape == (7, 2, 5, 4) and keys.codes.dtype == torch.uint8
            assert keys.scale.shape == (7, 5) and keys.scale.dtype == torch.float32
            assert keys.scale.isnan().all()


@pytest.mark.parametrize("poison", [False, True])
@pytest.mark.parametrize("lost", ["page", "slot", "state"])
def test_an_audit_finds_what_is_lost(data_dir: Path, lost: str, poison: bool) -> None:
    memory = new_memory(data_dir, poison=poison)
    seq = memory.new_sequence()
    assert seq is not None
    memory.grow(seq, 8)
    memory.audit()
    if lost == "page":
        seq.own.remove(seq.pages[0])
    elif lost == "slot":
        memory._held.remove(seq)
    else:
        memory._reserved.discard(memory.reserve_state())
    with pytest.raises(RuntimeError, match=r"Of \d+ "):
        memory.audit()
