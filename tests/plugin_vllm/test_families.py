"""Kimi K3 and Kimi-Linear in vLLM, too."""

from __future__ import annotations

import pytest
from support.cluster_cases import assert_same, embedded_answers, make_prompts
from support.random_checkpoint import write_checkpoint

PROMPTS = [[token % 60 + 1 for token in prompt] for prompt in make_prompts(1, 30, 130)]


@pytest.mark.parametrize("family", ["k3", "kimi-linear"])
def test_answers_are_those_of_the_embedded_engine(family: str, run_vllm, tmp_path) -> None:
    checkpoint = write_checkpoint(tmp_path / family, family, packed=family == "k3")
    got = run_vllm(checkpoint, PROMPTS, max_num_batched_tokens=96, enable_prefix_caching=True)
    assert_same(got.answers[0], embedded_answers(checkpoint, PROMPTS))
