"""What one step must move and compute at the least, from the config alone.

Bytes: each once, whatever the kernel does. Activations and rows written to the cache are few: left out.

    weights   all that a token passes through, each matrix once however many rows share it; of the embedding
              table the rows looked up
    experts   those hit: of E experts with k a token, T tokens hit E (1 - (1 - k/E)^T) on average, as many
              choices are even
    cache     of each sequence, index keys of all it sees if any of its rows must choose; latents of all that
              its rows attend to, at most min(n, top_k) a row with an indexer
    state     KDA state and convolution window, read and written; the first step of a sequence only writes

Operations: a multiply-accumulate is two.

    weights     2 x active parameters x tokens; lm_head only for rows whose logits are wanted
    attention   a row that attends to n tokens: 2 n heads (2 rank + rope); KDA 7 heads dim^2 (the recurrence:
                decay 1, read of the decayed state 2, update 2, output 2), also where chunks compute it
    index       a row that chooses among n tokens: 2 n heads (dim + 1); a row that sees no more than top_k
                chooses nothing
"""

from __future__ import annotations

from dataclasses import dataclass

from longspan.config import ModelConfig
from longspan.formats.inventory import (
    EMBEDDING,
    LM_HEAD,
    VISION,
    active_parameters,
    common_specs,
    expert_specs,
    totals,
)
from longspan.memory.sizes import bytes_per_sequence, bytes_per_token

KDA_OPERATIONS = 7  # a value of the state and a token


@dataclass(frozen=True)
class Step:
    """`sequences` sequences with `context` tokens in memory, each `rows` new tokens and one row of logits."""

    sequences: int
    rows: int
    context: int

    @property
    def tokens(self) -> int:
        return self.sequences * self.rows

    @property
    def visible(self) -> range:
        """How many tokens each row of one sequence sees, itself included."""
        return range(self.context + 1, self.context + self.rows + 1)


@dataclass(frozen=True)
class Work:
    """What a step costs."""

    weight_bytes: int
    expert_bytes: float
    cache_bytes: int
    state_bytes: int
    weight_operations: int
    attention_operations: int
    index_operations: int

    @property
    def total_bytes(self) -> float:
        return self.weight_bytes + self.expert_bytes + self.cache_bytes + self.state_bytes

    @property
    def total_operations(self) -> int:
        return self.weight_operations + self.attention_operations + self.index_operations


def work_of(config: ModelConfig, step: Step, element_bytes: int = 2, index_key_dtype: str = "auto") -> Work:
    """`element_bytes` of the model's dtype, in which published bfloat16 weights are held."""
    attended, chosen_among = _attended(config, step)
    attention, index = _attention_operations(config, step, attended, chosen_among)
    return Work(
        weight_bytes=_weight_bytes(config, step, element_bytes),
        expert_bytes=_expert_bytes(config, step),
        cache_bytes=_cache_bytes(config, step, attended, chosen_among, element_bytes, index_key_dtype),
        state_bytes=step.sequences
        * bytes_per_sequence(config, element_bytes).total
        * (2 if step.context else 1),
        weight_operations=_weight_operations(config, step),
        attention_operations=attention,
        index_operations=index,
    )


def _attended(config: ModelConfig, step: Step) -> tuple[int, int]:
    """Of one sequence and layer, summed over rows: tokens attended to, and tokens scored to choose from."""
    if config.indexer is None:
        return sum(step.visible), 0
    top_k = config.indexer.top_k
    return sum(min(n, top_k) for n in step.visible), sum(n for n in step.visible if n > top_k)


def _weight_bytes(config: ModelConfig, step: Step, element_bytes: int) -> int:
    total = 0
    for _, spec in common_specs(config):
        held = spec.parameters * element_bytes if spec.dtypes[0] == "BF16" else spec.nbytes
        if spec.part == VISION:
            continue
        if spec.part == EMBEDDING:
            total += held if config.tie_word_embeddings else step.tokens * spec.shape[1] * element_bytes
        else:
            total += held
    return total


def _expert_bytes(config: ModelConfig, step: Step) -> float:
    experts = config.moe.num_experts
    hit = experts * (1 - (1 - config.moe.top_k / experts) ** step.tokens)
    one = sum(spec.nbytes for spec in expert_specs(config, config.experts_packed).values())
    return len(config.moe_layers) * hit * one


def _cache_bytes(
    config: ModelConfig,
    step: Step,
    attended: int,
    chosen_among: int,
    element_bytes: int,
    index_key_dtype: str,
) -> int:
    token = bytes_per_token(config, element_bytes, index_key_dtype)
    end = step.context + step.rows
    keys = end if chosen_among else 0
    return step.sequences * (keys * token.index_key + min(end, attended) * token.latent)


def _weight_operations(config: ModelConfig, step: Step) -> int:
    sums = totals(config)
    head = sums[EMBEDDING if config.tie_word_embeddings else LM_HEAD].parameters
    return 2 * ((active_parameters(config) - head) * step.tokens + head * step.sequences)


def _attention_operations(
    config: ModelConfig, step: Step, attended: int, chosen_among: int
) -> tuple[int, int]:
    mla, kda, indexer = config.mla, config.kda, config.indexer
    full = len(config.full_attention_layers)
    latent = 2 * mla.num_heads * (2 * mla.kv_lora_rank + mla.qk_rope_head_dim)
    state = KDA_OPERATIONS * kda.num_heads * kda.head_dim**2
    attention = full * attended * latent + (config.num_layers - full) * step.rows * state
    index = full * chosen_among * 2 * indexer.num_heads * (indexer.head_dim + 1) if indexer else 0
    return step.sequences * attention, step.sequences * index
