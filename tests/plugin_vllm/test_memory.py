"""A plan predicts what vLLM's workers hold."""

from __future__ import annotations

import pytest
from support.cluster_cases import make_prompts

from longspan.config import load_config
from longspan.planning.memory import memory_of
from longspan.planning.split import Split

PROMISED = 0.03
PAGE = 32


@pytest.mark.parametrize("split", [Split(), Split(tensor=2, context=2)], ids=str)
def test_weights_pages_and_states_are_predicted(vllm, checkpoint, split: Split) -> None:
    got = vllm(
        make_prompts(5),
        max_tokens=2,
        block_size=PAGE,
        tensor_parallel_size=split.tensor,
        decode_context_parallel_size=split.context,
    )
    plan = memory_of(load_config(checkpoint), split, element_bytes=4, page_tokens=PAGE)
    assert plan.weight_bytes == pytest.approx(max(rank["weights"] for rank in got.held), rel=PROMISED)
    for rank in got.held:
        assert plan.page_bytes == pytest.approx(rank["block"], rel=PROMISED)
        assert plan.state_per_sequence == pytest.approx(rank["state"], rel=PROMISED)
