from __future__ import annotations

import argparse
import math
from typing import Any

import pytest
import torch

from longspan.engine.options import EngineOptions, add_engine_arguments
from longspan.errors import CapacityError


def parse(*words: str) -> EngineOptions:
    parser = argparse.ArgumentParser()
    add_engine_arguments(parser)
    return EngineOptions.from_args(parser.parse_args(words))


def test_no_flags_give_the_defaults() -> None:
    assert parse() == EngineOptions()


def test_every_option_has_its_flag() -> None:
    words = "--dtype float32 --backend torch --max-model-len 4096 --max-num-seqs 8"
    words += " --max-num-batched-tokens 128 --block-size 16 --cache-gib 0.5 --index-key-dtype int8"
    words += " --threads 3 --cpus 0,2-3 --seed 7 --no-enable-prefix-caching --snapshot-interval 1024"
    words += " --swap-gib 0.25 --max-itl-ms 100 --no-async-scheduling"
    assert parse(*words.split()) == EngineOptions(
        dtype="float32",
        backend="torch",
        max_model_len=4096,
        max_num_seqs=8,
        max_num_batched_tokens=128,
        page_size=16,
        cache_gib=0.5,
        index_key_dtype="int8",
        enable_prefix_caching=False,
        snapshot_interval=1024,
        swap_gib=0.25,
        max_itl_ms=100,
        async_scheduling=False,
        threads=3,
        cpus=(0, 2, 3),
        seed=7,
    )


def test_page_size_and_cache_have_two_names() -> None:
    assert parse("--page-size", "16").page_size == 16
    assert parse("--kv-cache-memory-gib", "2").cache_gib == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "float16"}, "dtype is 'float16'. Legal is one of auto, bfloat16, float32"),
        ({"dtype": None}, "dtype is None"),
        ({"snapshot_interval": 0}, "snapshot_interval is 0. Legal is an integer from 1 to"),
        ({"swap_gib": -1}, "swap_gib is -1. Legal is a number at least 0 and below"),
        ({"max_itl_ms": None}, "max_itl_ms is None. Legal is a number at least 0"),
        ({"async_scheduling": 1}, "async_scheduling is 1. Legal is True, False or None"),
        ({"index_key_dtype": "fp8"}, "index_key_dtype is 'fp8'. Legal is one of auto, int8"),
        ({"threads": 0}, "threads is 0. Legal is an integer from 1 to 1024"),
        ({"cpus": "3-1"}, "cpus is '3-1'. Legal is a list like 0,2-5"),
        ({"cpus": "a"}, "cpus is 'a'"),
        ({"cpus": "0-"}, "cpus is '0-'"),
        ({"cpus": "0,,1"}, "cpus is '0,,1'"),
        ({"cpus": "0-9999999999"}, "cpus is '0-9999999999'"),
        ({"cpus": ("a",)}, "cpus is"),
        ({"cpus": (True,)}, "cpus is"),
        ({"backend": 3}, "backend is 3"),
        ({"max_num_seqs": 0}, "max_num_seqs is 0. Legal is an integer from 1 to"),
        ({"page_size": -1}, "page_size is -1"),
        ({"cache_gib": 0.0}, r"cache_gib is 0\.0"),
        ({"cache_gib": float("nan")}, "cache_gib is nan"),
        ({"max_num_batched_tokens": 0}, "max_num_batched_tokens is 0"),
        ({"cache_gib": "2"}, "cache_gib is '2'"),
        ({"max_model_len": 1}, "from 2 to"),
        ({"page_size": None}, "page_size is None"),
        ({"max_num_batched_tokens": None}, "max_num_batched_tokens is None"),
    ],
)
def test_options_that_mean_nothing_are_refused(options: dict, message: str) -> None:
    with pytest.raises(CapacityError, match=message):
        EngineOptions(**options)


@pytest.mark.parametrize(
    "name", ["max_model_len", "max_num_seqs", "max_num_batched_tokens", "page_size", "cache_gib", "seed"]
)
@pytest.mark.parametrize(
    "value", [math.inf, -math.inf, math.nan, -1.5, 10**400, -(10**30), True, "7", [7], 1.5]
)
def test_a_number_of_the_wrong_kind_or_size_is_refused_by_name(name: str, value: Any) -> None:
    if name == "cache_gib" and value == 1.5:
        assert EngineOptions(cache_gib=value).cache_gib == 1.5
        return
    with pytest.raises(CapacityError, match=f"^{name} is ") as caught:
        EngineOptions(**{name: value})
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize("dtype", ["auto", "bfloat16", torch.bfloat16])
def test_the_dtype_is_that_of_the_checkpoint_unless_another_is_named(dtype: Any) -> None:
    assert EngineOptions(dtype=dtype) == EngineOptions() == parse("--dtype", "auto")
    assert EngineOptions(dtype=torch.float32).dtype == "float32"  # type: ignore[arg-type]
