from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.random_checkpoint import write_checkpoint
from support.serving import make_engine, make_request, run
from support.tensor_meter import TensorMeter

from longspan.config import ModelConfig, load_config
from longspan.errors import CapacityError
from longspan.memory.activations import activation_bytes
from longspan.memory.memory import Memory
from longspan.memory.plan import GIB, MemoryPlan, available_memory, left_in_container, plan_memory, show_bytes
from longspan.memory.sizes import ALIGNMENT, bytes_per_sequence
from longspan.model.loader import load_model
from longspan.ops.batch import KdaView, QuantizedKeys


@pytest.fixture(scope="module")
def config(data_dir: Path) -> ModelConfig:
    return load_config(data_dir / "k31-text")


def plan(config: ModelConfig, **options: Any) -> MemoryPlan:
    given = {"element_bytes": 2, "page_size": 64, "max_num_batched_tokens": 512, "available_bytes": 8 * GIB}
    return plan_memory(config, **(given | options))


def slab_of(config: ModelConfig) -> tuple[int, int]:
    """Bytes of a slab, and its tokens."""
    made = plan(config)
    return made.slab_bytes, made.pages_per_slab * made.page_size


def test_what_is_asked_for_is_met_within_the_budget(config: ModelConfig) -> None:
    made = plan(config, max_num_seqs=10, max_model_len=1000, cache_gib=0.01)
    assert (made.max_num_seqs, made.max_model_len) == (10, 1000)
    assert made.num_slabs >= 10 + 1000 / (made.pages_per_slab * made.page_size)
    assert made.cache_bytes <= 0.01 * GIB


@pytest.mark.parametrize("index_key_dtype", ["auto", "int8"])
@pytest.mark.parametrize("head_dim", [1, 4, 6])
def test_the_bytes_are_those_of_the_tensors(config: ModelConfig, index_key_dtype: str, head_dim: int) -> None:
    assert config.indexer
    config = replace(config, indexer=replace(config.indexer, head_dim=head_dim))
    options = {"page_size": 16, "element_bytes": 4, "index_key_dtype": index_key_dtype}
    made = plan(config, max_num_seqs=3, max_model_len=256, cache_gib=0.001, **options)
    memory = Memory(
        config,
        num_slabs=made.num_slabs,
        pages_per_slab=made.pages_per_slab,
        page_size=16,
        dtype=torch.float32,
        index_key_dtype=index_key_dtype,
    )
    assert (made.cache_bytes, made.slab_bytes) == (memory.total_bytes, memory.slab_bytes)
    page, slot = 0, 0
    for view in memory.views:
        if isinstance(view, KdaView):
            slot += view.state[0].nbytes + view.conv[0].nbytes
        elif isinstance(view.index_key, QuantizedKeys):
            page += view.latent[0].nbytes + view.index_key.codes[0].nbytes + view.index_key.scale[0].nbytes
        else:
            assert view.index_key is not None
            page += view.latent[0].nbytes + view.index_key[0].nbytes
    parts = 3 * config.num_layers * ALIGNMENT
    assert page <= memory.page_stride <= page + parts
    assert slot <= memory.slab_bytes <= slot + parts + memory.page_stride


def test_int8_keys_of_a_model_without_an_indexer_are_refused(config: ModelConfig) -> None:
    with pytest.raises(CapacityError, match=r"'int8'.*no sparse indexer.*--index-key-dtype"):
        plan(replace(config, indexer=None), index_key_dtype="int8")
    tokens = [slab_of(replace(config, indexer=None))[1], slab_of(config)[1]]
    assert tokens[0] > tokens[1]


def test_more_sequences_than_states_fit_are_refused_with_the_largest_number(config: ModelConfig) -> None:
    slab, tokens = slab_of(config)
    gib = (10 + 4.5) * slab / GIB
    with pytest.raises(CapacityError, match="lower --max-num-seqs to 10") as caught:
        plan(config, max_num_seqs=1000, max_model_len=4 * tokens, cache_gib=gib)
    assert "--cache-gib" in str(caught.value)
    assert plan(config, max_num_seqs=10, max_model_len=4 * tokens, cache_gib=gib).max_num_seqs == 10
    with pytest.raises(CapacityError):
        plan(config, max_num_seqs=11, max_model_len=4 * tokens, cache_gib=gib)


def test_without_a_number_as_many_sequences_run_as_fit(config: ModelConfig) -> None:
    slab, tokens = slab_of(config)
    assert plan(config, max_model_len=4 * tokens, cache_gib=(10 + 4.1) * slab / GIB).max_num_seqs == 10
    assert plan(config, max_model_len=4 * tokens, cache_gib=1).max_num_seqs == 64


def test_a_longer_sequence_than_fits_is_refused_with_the_longest(config: ModelConfig) -> None:
    slab, tokens = slab_of(config)
    gib = (2 + 7.1) * slab / GIB
    with pytest.raises(CapacityError, match=f"lower --max-model-len to {7 * tokens}"):
        plan(config, max_num_seqs=2, max_model_len=7 * tokens + 1, cache_gib=gib)
    assert plan(config, max_num_seqs=2, max_model_len=7 * tokens, cache_gib=gib).num_slabs == 9


def test_without_a_length_sequences_may_be_as_long_as_fits(config: ModelConfig) -> None:
    slab, tokens = slab_of(config)
    assert plan(config, max_num_seqs=1, cache_gib=(1 + 7.1) * slab / GIB).max_model_len == 7 * tokens
    assert plan(config, cache_gib=4).max_model_len == config.max_position


def test_preempted_sequences_have_a_pool_of_a_quarter_of_the_cache_or_as_asked_for(
    config: ModelConfig,
) -> None:
    made = plan(config, cache_gib=1)
    assert made.swap_bytes == made.cache_bytes // 4
    assert plan(config, cache_gib=1, swap_gib=0.5).swap_bytes == GIB // 2
    assert plan(config, cache_gib=1, swap_gib=0).swap_bytes == 0
    with pytest.raises(CapacityError, match=r"host pool of 10\.0 GiB"):
        plan(config, cache_gib=1, swap_gib=10)


def test_a_longer_sequence_than_the_model_allows_is_refused(config: ModelConfig) -> None:
    with pytest.raises(CapacityError, match=f"Ask for at most {config.max_position}"):
        plan(config, max_model_len=config.max_position + 1)


def test_a_budget_for_nothing_is_refused_with_one_that_is_enough(config: ModelConfig) -> None:
    with pytest.raises(CapacityError, match=r"give --cache-gib 0\.0"):
        plan(config, cache_gib=1e-6)


def test_a_small_model_leaves_most_of_the_machine_alone(config: ModelConfig) -> None:
    assert plan(config, available_bytes=1000 * GIB).cache_bytes < 1.1 * GIB


def test_the_default_never_takes_more_than_half_of_what_the_weights_leave(config: ModelConfig) -> None:
    big = replace(config, mla=replace(config.mla, kv_lora_rank=4096))
    made = plan(big, weight_bytes=6 * GIB)
    assert made.cache_bytes <= GIB
    assert made.max_model_len < config.max_position


def suggested(error: CapacityError, flag: str) -> float:
    found = re.search(rf"--{flag} (?:to )?([0-9.]+)", error.remedy.removesuffix("."))
    assert found, error.remedy
    return float(found[1].rstrip("."))


@pytest.mark.parametrize("available", [GIB, 8 * GIB])
@pytest.mark.parametrize("weights", [0, GIB // 2, 100 * GIB])
@pytest.mark.parametrize("gib", [9, 1e6, 2e9])
def test_a_larger_cache_than_the_machine_has_is_refused_with_the_largest(
    config: ModelConfig, available: int, weights: int, gib: float
) -> None:
    given = {"available_bytes": available, "weight_bytes": weights}
    with pytest.raises(CapacityError, match="don't fit") as caught:
        plan(config, cache_gib=gib, **given)
    largest = suggested(caught.value, "cache-gib")
    made = plan(config, cache_gib=largest, **given)
    assert made.cache_bytes + made.activation_bytes <= max(available - weights, available // 4)
    with pytest.raises(CapacityError):
        plan(config, cache_gib=largest + 0.02, **given)


@pytest.mark.parametrize("cache_gib", [None, 0.01])
@pytest.mark.parametrize("tokens", [10**7, 10**9, 2**31 - 1])
def test_a_larger_step_than_the_machine_holds_is_refused_with_the_largest(
    config: ModelConfig, cache_gib: float | None, tokens: int
) -> None:
    with pytest.raises(CapacityError, match="don't fit") as caught:
        plan(config, cache_gib=cache_gib, max_num_batched_tokens=tokens)
    largest = int(suggested(caught.value, "max-num-batched-tokens"))
    assert largest > 512
    assert plan(config, cache_gib=cache_gib, max_num_batched_tokens=largest).activation_bytes <= 8 * GIB
    with pytest.raises(CapacityError):
        plan(config, cache_gib=cache_gib, max_num_batched_tokens=largest + 1)


def test_no_remedy_asks_for_more_than_the_machine_has(config: ModelConfig) -> None:
    with pytest.raises(CapacityError, match="can't hold") as caught:
        plan(config, cache_gib=1e6, max_num_seqs=2**31 - 1)
    assert "--cache-gib" not in caught.value.remedy
    most = int(suggested(caught.value, "max-num-seqs"))
    assert most * bytes_per_sequence(config, 2).total < 8 * GIB
    with pytest.raises(CapacityError, match="free some memory"):
        plan(config, available_bytes=1000)


def test_a_container_has_its_limit_less_what_is_in_use_but_for_cached_files(tmp_path: Path) -> None:
    for name, text in {
        "max": "1000\n",
        "current": "700\n",
        "stat": "anon 400\nfile 300\nactive_file 50\ninactive_file 150\nshmem 100\n",
    }.items():
        (tmp_path / f"memory.{name}").write_text(text)
    assert left_in_container(tmp_path) == 1000 - 700 + 200


def test_the_plan_can_be_read(config: ModelConfig) -> None:
    made = plan(config, max_num_seqs=4, max_model_len=1000, cache_gib=0.01, weight_bytes=3 * GIB)
    lines = {what: (size, remark) for what, size, remark in made.lines()}
    assert lines["weights"][0] == "3.0 GiB"
    assert "each a KDA state or" in lines["cache"][1] and "4 running sequences" in lines["cache"][1]
    assert lines["total, at most"] == (show_bytes(made.total_bytes), "sequences of up to 1000 tokens")


def test_the_machine_says_how_much_is_free() -> None:
    assert 0 < available_memory() < 2**50


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (5 * 2**40, "5.0 TiB")]
)
def test_bytes_are_shown_in_the_largest_unit(count: int, text: str) -> None:
    assert show_bytes(count) == text


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of the operators far smaller than the prompts here, as they are in earnest."""
    for module, names in (
        ("indexer", {"INDEX_QUERY_BLOCK": 8, "INDEX_KEY_BLOCK": 16}),
        ("sparse_attention", {"GATHER_ELEMENTS": 512, "DENSE_QUERY_BLOCK": 8, "DENSE_KEY_BLOCK": 16}),
    ):
        for name, value in names.items():
            monkeypatch.setattr(f"longspan.ops.{module}.{name}", value)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("family", ["kimi-linear", "k3", "k3.1"])
@pytest.mark.parametrize("chunk", [8, 60])
def test_a_step_holds_no_more_than_the_plan_says(tmp_path: Path, family: str, chunk: int) -> None:
    # The reference holds most: what native operators need beside their results is less, and not torch's.
    model = load_model(write_checkpoint(tmp_path, family), dtype="float32", backend="torch")
    engine = make_engine(model, num_pages=10, page_size=16, chunk=chunk)
    with TensorMeter() as meter:
        run(engine, make_request("a", [3] * 120, max_tokens=2, temperature=1.0, top_p=0.9, logprobs=5))
    assert meter.peak <= activation_bytes(model.config, chunk, 8, 4) < 10 * meter.peak


@pytest.mark.usefixtures("small_blocks")
def test_what_a_step_holds_does_not_grow_with_the_prompt(tmp_path: Path) -> None:
    model = load_model(write_checkpoint(tmp_path, "k3.1"), dtype="float32", backend="torch")
    peaks = []
    for chunks in (2, 10):
        engine = make_engine(model, num_pages=11, page_size=16, chunk=16)
        with TensorMeter() as meter:
            run(engine, make_request("a", [3] * (16 * chunks), max_tokens=1))
        peaks.append(meter.peak)
    assert peaks[1] < 1.5 * peaks[0]
