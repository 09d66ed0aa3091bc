from __future__ import annotations

import argparse

import pytest

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
    words += " --max-num-batched-tokens 128 --block-size 16 --cache-gib 0.5 --seed 7"
    assert parse(*words.split()) == EngineOptions("float32", "torch", 4096, 8, 128, 16, 0.5, 7)


def test_page_size_and_cache_have_two_names() -> None:
    assert parse("--page-size", "16").page_size == 16
    assert parse("--kv-cache-memory-gib", "2").cache_gib == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "float16"}, "Choose one of: bfloat16, float32"),
        ({"max_num_seqs": 0}, "max_num_seqs is 0. It must be greater than 0"),
        ({"page_size": -1}, "page_size is -1"),
        ({"cache_gib": 0.0}, r"cache_gib is 0\.0"),
        ({"cache_gib": float("nan")}, "cache_gib is nan"),
        ({"max_num_batched_tokens": 0}, "max_num_batched_tokens is 0"),
        ({"max_model_len": 1}, "at least 2"),
    ],
)
def test_options_that_mean_nothing_are_refused(options: dict, message: str) -> None:
    with pytest.raises(CapacityError, match=message):
        EngineOptions(**options)
