"""Several ranks give the embedded engine's answers."""

from __future__ import annotations

import pytest
from support.cluster_cases import assert_same, embedded_answers, make_prompts

RANKS = {
    "TP 2": {"tensor_parallel_size": 2},
    "EP 2": {"tensor_parallel_size": 2, "enable_expert_parallel": True},
    "DCP 2, token by token": {"tensor_parallel_size": 2, "decode_context_parallel_size": 2},
    "DCP 2, page by page": {
        "tensor_parallel_size": 2,
        "decode_context_parallel_size": 2,
        "cp_kv_cache_interleave_size": 16,
        "block_size": 16,
    },
}


@pytest.mark.parametrize("ranks", RANKS)
def test_answers_are_those_of_one_rank(vllm, checkpoint, ranks: str) -> None:
    """Ragged batches, chunks, and what a second round finds in the prefix cache."""
    first, tail, other = make_prompts(300, 40, 90)
    rounds = [[first, *make_prompts(1, 16, 17, 65, seed=1)], [first, first[:200] + tail, other]]
    got = vllm(*rounds, enable_prefix_caching=True, max_num_batched_tokens=160, **RANKS[ranks])
    assert got.cached[1][0] > 0, "nothing came from the cache"
    for answers, prompts in zip(got.answers, rounds, strict=True):
        assert_same(answers, embedded_answers(checkpoint, prompts))
