"""Bytes one rank moves for each decoded token, at the least, and what a request moves between servers.

From memory, in a step of b sequences of a replica with n tokens each (a step is b tokens of each replica):

    weights    all of the rank's but routed experts and vision, of the embedding the rows looked up; once
    experts    those hit: T = b R tokens that choose k of E hit E (1 - (1 - k/E)^T), of which this rank has
               its part; R replicas where experts are dealt over data too, else 1
    index      keys of all n tokens, if they are more than top_k: n / D of each sequence, or n where a rank
               keeps them all
    latent     of the min(n, top_k) tokens attended to, 1/D on average; of n / D without an indexer
    state      KDA state and window of the rank's heads, read and written

Over the network, received, for each token (what `longspan.parallel` counts; its docstrings have the why):

    tensor     2 all-reduces a layer and one of the embedding, as a ring: 2 (T-1)/T hidden e; logits
               gathered: (T-1) ceil(vocabulary / T) 4
    experts    over T alone: an all-reduce of the float32 sums, 2 (T-1)/T latent 4 a layer. Over all X = T R:
               the latent, experts and weights of a token, 8 k + latent e, to each other rank that has one of
               its experts, X (1 - (1 - 1/X)^k) of X, and float32 sums back; each of the T ranks sends for 1/T
               of the tokens; then the results are gathered: (T-1)/T latent e
    candidates (D-1) min(top_k, ceil(n / D)) 8 a full-attention layer: every rank's best keys, packed; none
               while n is at most top_k
    outputs    (D-1)/D H (rank + 1) 4 a full-attention layer: H heads of the DCP group, partial sums and LSE

Between prefill and decode: state and n tokens of latents and index keys of one request.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from math import ceil

from longspan.config import ModelConfig
from longspan.memory.sizes import bytes_per_sequence, bytes_per_token
from longspan.planning.hardware import Hardware
from longspan.planning.memory import RankMemory
from longspan.planning.split import Split

CANDIDATE_BYTES = 8  # score and position in one int64
WIDE = 4  # bytes of float32
FIELDS = 8  # an expert's number and its weight


@dataclass(frozen=True)
class MemoryTraffic:
    """Bytes a rank reads from its memory in one decode step."""

    weights: float
    experts: float
    index: float
    latent: float
    state: float

    @property
    def total(self) -> float:
        return sum(getattr(self, part.name) for part in fields(self))


@dataclass(frozen=True)
class NetworkTraffic:
    """Bytes a rank receives for one token."""

    tensor: float
    experts: float
    candidates: float
    outputs: float

    @property
    def total(self) -> float:
        return sum(getattr(self, part.name) for part in fields(self))


def decode_reads(
    config: ModelConfig,
    split: Split,
    memory: RankMemory,
    *,
    sequences: int,
    context: int,
    element_bytes: int = 2,
) -> MemoryTraffic:
    """Of a step with `sequences` sequences of `context` tokens in each replica."""
    moe = config.moe
    layers = len(config.full_attention_layers)
    tokens = sequences * (split.data if split.experts_over_data else 1)
    hit = 1 - (1 - moe.top_k / moe.num_experts) ** tokens
    routed = memory.weights.get("routed experts", 0)
    embedding = memory.weights["embedding and head"] // (1 if config.tie_word_embeddings else 2)
    skipped = routed + memory.weights.get("vision", 0) + embedding
    top_k = config.indexer.top_k if config.indexer else context
    width = config.mla.kv_lora_rank + config.mla.qk_rope_head_dim
    latent = layers * width * element_bytes * min(context, top_k) / split.context
    index = memory.index_per_token * context if context > top_k else 0.0
    return MemoryTraffic(
        weights=memory.weight_bytes - skipped + sequences * config.hidden_size * element_bytes,
        experts=routed * hit,
        index=sequences * index,
        latent=sequences * latent,
        state=2.0 * sequences * memory.state_per_sequence,
    )


def received_per_token(
    config: ModelConfig, split: Split, context: int, element_bytes: int = 2
) -> NetworkTraffic:
    """Of a token that sees `context` tokens."""
    tensor, data, dcp = split.tensor, split.data, split.context
    layers = len(config.full_attention_layers)
    ring = 2 * (tensor - 1) / tensor * config.hidden_size * element_bytes
    reduces = 2 * config.num_layers + 1
    logits = (tensor - 1) * ceil(config.vocab_size / tensor) * WIDE
    candidates = 0.0
    if config.indexer and context > config.indexer.top_k:
        candidates = layers * (dcp - 1) * min(config.indexer.top_k, ceil(context / dcp)) * CANDIDATE_BYTES
    heads = config.mla.num_heads * dcp / tensor
    outputs = layers * (dcp - 1) / dcp * heads * (config.mla.kv_lora_rank + 1) * WIDE
    moe = config.moe
    latent = moe.latent_size or config.hidden_size
    if split.experts_over_data and data > 1:
        hit = split.expert * (1 - (1 - 1 / split.expert) ** moe.top_k) * (1 - 1 / split.expert)
        row = FIELDS * moe.top_k + latent * (element_bytes + WIDE)
        experts = hit * row / tensor + (tensor - 1) / tensor * latent * element_bytes
    else:
        experts = 2 * (tensor - 1) / tensor * latent * WIDE
    experts *= len(config.moe_layers)
    return NetworkTraffic(
        tensor=reduces * ring + logits, experts=experts, candidates=candidates, outputs=outputs
    )


def handoff_bytes(
    config: ModelConfig, tokens: int, element_bytes: int = 2, index_key_dtype: str = "auto"
) -> tuple[int, int]:
    """(state, cache) of one request that prefill hands to decode, over all ranks of a replica together."""
    token = bytes_per_token(config, element_bytes, index_key_dtype)
    return bytes_per_sequence(config, element_bytes).total, token.total * tokens


def step_seconds(
    hardware: Hardware, split: Split, reads: MemoryTraffic, received: NetworkTraffic, sequences: int
) -> float:
    """Of a decode step, if reads and messages run at the machine's rates, one after the other."""
    inside = received.tensor + received.candidates + received.outputs
    outside = received.experts * max(0.0, 1 - hardware.devices / split.expert)
    near = inside + received.experts - outside
    network = near / hardware.link_gb_s.value + outside / hardware.network_gb_s.value
    return (reads.total / hardware.memory_gb_s.value + sequences * network) / 1e9
