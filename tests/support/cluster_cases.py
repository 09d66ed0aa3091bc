"""Prompts for the cluster host, what the embedded engine answers to them, and how answers are compared."""

from __future__ import annotations

import random
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.random_checkpoint import write_checkpoint
from support.serving import make_engine, make_request, run
from support.tiny_chat import BUNDLED, END_OF_MESSAGE, VOCAB_SIZE

from longspan.model.loader import load_model

VOCABULARY = 96
NEW_TOKENS = 24
TOLERANCE = 1e-4


@dataclass(frozen=True)
class Answer:
    """Greedy tokens and the log-probability of each."""

    token_ids: list[int]
    logprobs: list[float]


def write_small_k31(directory: Path, **changes: Any) -> Path:
    """8 layers, full attention at 4 and 8, a choice of 16 keys, 7 packed experts: no size is even for all."""
    text: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "kv_lora_rank": 24,
        "q_lora_rank": 20,
        "qk_nope_head_dim": 12,
        "qk_rope_head_dim": 8,
        "v_head_dim": 12,
        "attn_res_block_size": 4,
        "num_experts": 7,
        "num_experts_per_token": 3,
        "moe_intermediate_size": 32,
        "routed_expert_hidden_size": 32,
        "linear_attn_config": {
            "head_dim": 16,
            "num_heads": 4,
            "short_conv_kernel_size": 4,
            "full_attn_layers": [4, 8],
            "kda_layers": [1, 2, 3, 5, 6, 7],
            "use_full_rank_gate": True,
            "gate_lower_bound": -5.0,
        },
        "dsa_config": {"index_n_heads": 3, "index_head_dim": 8, "index_topk": 16},
    }
    return write_checkpoint(directory, "k3.1", packed=True, seed=3, **(text | changes))


def write_chatting_k31(directory: Path) -> Path:
    """The same with the tokenizer of the bundled checkpoint: servers of text and routers need one."""
    write_small_k31(directory, vocab_size=VOCAB_SIZE, eos_token_id=END_OF_MESSAGE)
    for name in ("tiktoken.model", "tokenizer_config.json"):
        shutil.copy(BUNDLED / name, directory)
    return directory


def make_prompts(*lengths: int, seed: int = 0) -> list[list[int]]:
    """Random token ids, special ones left out."""
    rng = random.Random(seed)
    return [[rng.randrange(3, VOCABULARY) for _ in range(length)] for length in lengths]


def embedded_answers(
    checkpoint: Path, prompts: list[list[int]], max_tokens: int = NEW_TOKENS
) -> list[Answer]:
    """Each prompt alone, uncached, in one chunk: the answers that no scheduling may change."""
    model = load_model(checkpoint, "float32")
    answers = []
    for prompt in prompts:
        engine = make_engine(model, num_pages=64, page_size=64, num_slots=1, chunk=4096)
        answer = run(engine, make_request("r", prompt, max_tokens=max_tokens, logprobs=0))["r", 0]
        logprobs = [of[token].logprob for token, of in zip(answer.token_ids, answer.logprobs, strict=True)]
        answers.append(Answer(answer.token_ids, logprobs))
    return answers


def assert_same(got: list[Answer], want: list[Answer]) -> None:
    """Tokens equal, log-probabilities within TOLERANCE."""
    assert len(got) == len(want)
    for i, (ours, theirs) in enumerate(zip(got, want, strict=True)):
        assert ours.token_ids == theirs.token_ids, f"answer {i}"
        worst = max(abs(a - b) for a, b in zip(ours.logprobs, theirs.logprobs, strict=True))
        assert worst < TOLERANCE, f"log-probabilities of answer {i} differ by {worst}"
