"""What `longspan bench` says a step must move and compute, counted by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
from support.random_checkpoint import TOP_K, published_config

from longspan.bench.workload import Step, Work, work_of
from longspan.config import ModelConfig, parse_config
from longspan.formats.inventory import EMBEDDING, ROUTED, active_parameters, totals

KDA_LAYERS, FULL_LAYERS, MOE_LAYERS = 3, 2, 4
EXPERT = 3 * (32 * 16 + 32)  # three matrices of 32 x 32, nibbles and scales


def config_of(family: str = "k3.1", **changes: Any) -> ModelConfig:
    return parse_config(published_config(family, packed=family != "kimi-linear", **changes))


def work(sequences: int, rows: int, context: int, family: str = "k3.1", **options: Any) -> Work:
    return work_of(config_of(family), Step(sequences, rows, context), **options)


@pytest.mark.parametrize("element", [2, 4])
def test_weights_are_every_matrix_once(element: int) -> None:
    """Hidden 36, KDA 3 x 6 = 18, MLA 3 x (6 + 4, 5) rank 10 and 14, indexer 3 x 6, experts 32 x 32."""
    kda = 5 * 18 * 36 + 6 * 36 + 18 * 6 + 3 * 36
    kda_wide = 3 * 18 * 4 + 128 + 18 + 6
    mla = 14 * 36 + 10 + 33 * 10 + 36 * 15 + 14 * 36 + 14 + 30 * 14 + 15 * 36
    indexer = 18 * 14 + 6 * 36 + 3 * 36 + 6 + 6
    moe = 6 * 36 + 2 * 32 * 36 + 32 + 3 * 64 * 36
    norms = 5 * (2 * 36 + 2 * 72) + 36 + 72
    narrow = KDA_LAYERS * kda + FULL_LAYERS * (mla + indexer) + MOE_LAYERS * moe + 3 * 50 * 36 + norms
    narrow += 61 * 36  # lm_head
    wide = KDA_LAYERS * kda_wide + MOE_LAYERS * 6
    for tokens in (1, 5):
        found = work(1, tokens, 20, element_bytes=element).weight_bytes
        assert found == element * (narrow + tokens * 36) + 4 * wide


@pytest.mark.parametrize("family", ["kimi-linear", "k3", "k3.1"])
def test_weights_and_all_experts_are_the_file_without_the_embedding_table(family: str) -> None:
    config = config_of(family)
    sums = totals(config)
    found = work(1, 10**4, 0, family)
    assert found.weight_bytes + round(found.expert_bytes) == (
        sum(part.nbytes for part in sums.values()) - sums[EMBEDDING].nbytes + 10**4 * 36 * 2
    )
    assert round(found.expert_bytes) == sums[ROUTED].nbytes


def test_a_tied_embedding_is_read_once_and_computes_the_logits() -> None:
    config, tied = config_of("k3"), config_of("k3", tie_word_embeddings=True)
    step = Step(1, 3, 0)
    assert work_of(tied, step).weight_bytes == work_of(config, step).weight_bytes - 3 * 36 * 2
    assert work_of(tied, step).weight_operations == work_of(config, step).weight_operations


def test_a_token_reads_the_experts_it_chose_and_more_tokens_what_they_hit_on_average() -> None:
    assert math.isclose(work(1, 1, 0).expert_bytes, MOE_LAYERS * 2 * EXPERT)
    assert math.isclose(work(3, 1, 0).expert_bytes, MOE_LAYERS * 6 * (1 - (2 / 3) ** 3) * EXPERT)
    assert math.isclose(work(1, 1, 0, element_bytes=4).expert_bytes, MOE_LAYERS * 2 * EXPERT)


@pytest.mark.parametrize(
    ("context", "attended", "keys"),
    [(0, 1, 0), (TOP_K - 2, TOP_K - 1, 0), (TOP_K - 1, TOP_K, 0), (TOP_K, TOP_K, TOP_K + 1), (20, TOP_K, 21)],
)
def test_a_decode_step_reads_all_index_keys_and_the_chosen_latents(
    context: int, attended: int, keys: int
) -> None:
    found = work(1, 1, context)
    assert found.cache_bytes == FULL_LAYERS * (attended * 14 * 2 + keys * 6 * 2)
    assert work(3, 1, context).cache_bytes == 3 * found.cache_bytes
    quantized = work(1, 1, context, index_key_dtype="int8")
    assert quantized.cache_bytes == FULL_LAYERS * (attended * 14 * 2 + keys * (8 + 4))
    kda = KDA_LAYERS * 7 * 3 * 36
    assert found.attention_operations == FULL_LAYERS * attended * 2 * 3 * (10 + 10 + 4) + kda
    assert found.index_operations == FULL_LAYERS * keys * 2 * 3 * (6 + 1)


def test_without_an_indexer_all_latents_are_read() -> None:
    found = work(1, 1, 20, "k3")
    assert found.cache_bytes == FULL_LAYERS * 21 * 14 * 2
    assert found.index_operations == 0


def test_rows_of_a_chunk_share_what_they_read_but_compute_each_their_own() -> None:
    """Rows that see 6, 7, 8 and 9 tokens: the last two choose 7 of them."""
    found = work(1, 4, 5)
    assert found.cache_bytes == FULL_LAYERS * (9 * 14 * 2 + 9 * 6 * 2)
    attended, scored = 6 + 7 + 7 + 7, 8 + 9
    kda = KDA_LAYERS * 4 * 7 * 3 * 36
    assert found.attention_operations == FULL_LAYERS * attended * 2 * 3 * (10 + 10 + 4) + kda
    assert found.index_operations == FULL_LAYERS * scored * 2 * 3 * (6 + 1)


def test_a_state_is_read_and_written_and_at_first_only_written() -> None:
    state = KDA_LAYERS * (3 * 6 * 6 * 4 + 3 * 3 * 18 * 2)
    assert work(1, 1, 0).state_bytes == state
    assert work(1, 1, 1).state_bytes == 2 * state
    assert work(4, 1, 1).state_bytes == 8 * state


def test_operations_are_twice_the_active_parameters_and_logits_are_of_one_row() -> None:
    config = config_of()
    assert work(1, 1, 0).weight_operations == 2 * active_parameters(config)
    assert work(5, 1, 0).weight_operations == 5 * 2 * active_parameters(config)
    assert work(1, 5, 0).weight_operations == 5 * 2 * active_parameters(config) - 4 * 2 * 61 * 36
