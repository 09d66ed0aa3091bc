"""What `longspan plan` says ranks receive is what they receive."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import rank_cases
from support.ranks import Ranks

from longspan.config import load_config
from longspan.planning.split import Split
from longspan.planning.traffic import received_per_token

TOKENS = 12  # of which the last 5 see more than the 7 that are chosen
KINDS = {
    "tensor": ("sums", "embeddings", "logits"),
    "experts": ("experts",),
    "candidates": ("candidates",),
    "outputs": ("outputs",),
}


@pytest.mark.parametrize(("tensor", "context"), [(2, 1), (4, 2), (4, 4)])
def test_bytes_received_are_those_of_the_plan(
    tensor: int, context: int, ranks: Ranks, checkpoint: Path
) -> None:
    """One sequence, token by token, in float32."""
    config = load_config(checkpoint)
    script = rank_cases.Script([{0: [n + 1]} for n in range(TOKENS)], num_seqs=1, max_tokens=TOKENS)
    split = rank_cases.Split(tensor, context=context)
    planned = [received_per_token(config, Split(tensor, context=context), n + 1, 4) for n in range(TOKENS)]
    for trace in ranks.run(split.size, rank_cases.run_split, checkpoint, split, [script]):
        for kind, counted in KINDS.items():
            received = sum(trace.traffic.nbytes[name] for name in counted)
            assert received == pytest.approx(sum(getattr(each, kind) for each in planned), rel=0.001), kind
