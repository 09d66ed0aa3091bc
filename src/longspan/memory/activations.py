"""Upper bound of what one step of the model holds for a moment, from the config alone.

The operators work in blocks of fixed sizes, so nothing here grows with the context; what grows is named. They
are imported, and torch with them, where a bound is worked out: a process that only holds plans does without.
"""

from __future__ import annotations

from longspan.config import ModelConfig

WIDE = 4  # bytes of float32
LOGIT_COPIES = 8  # float32 equivalents per logit while sampling: raw, edited, sorted, float64 masses


def activation_bytes(config: ModelConfig, num_tokens: int, num_logit_rows: int, element_bytes: int) -> int:
    """Bytes of a step of `num_tokens` tokens that gives `num_logit_rows` rows of logits."""
    size = config.attn_res_block_size
    num_sources = 2 if size is None else config.num_layers // size + 2
    stream = num_tokens * config.hidden_size * (num_sources * (element_bytes + 2 * WIDE) + 4 * WIDE)
    layer = max(
        _kda(config, num_tokens, element_bytes),
        _mla(config, num_tokens, element_bytes),
        _ffn(config, num_tokens, element_bytes),
    )
    logits = num_logit_rows * config.vocab_size * WIDE * LOGIT_COPIES
    return stream + max(layer, logits)


def _kda(config: ModelConfig, num_tokens: int, element_bytes: int) -> int:
    from longspan.ops.kda import SEGMENT, TILE

    width = config.kda.num_heads * config.kda.head_dim
    rows = num_tokens * width * (11 * element_bytes + 20 * WIDE)
    inside_tiles = min(num_tokens, SEGMENT) * width * (TILE * 7 + 24) * WIDE
    return rows + inside_tiles


def _mla(config: ModelConfig, num_tokens: int, element_bytes: int) -> int:
    from longspan.ops.indexer import INDEX_KEY_BLOCK, INDEX_QUERY_BLOCK
    from longspan.ops.sparse_attention import DENSE_KEY_BLOCK, DENSE_QUERY_BLOCK, GATHER_ELEMENTS

    mla = config.mla
    width = mla.num_heads * (mla.kv_lora_rank + mla.qk_rope_head_dim)
    rows = num_tokens * width * (2 * element_bytes + 4 * WIDE)
    attend = max(GATHER_ELEMENTS, DENSE_QUERY_BLOCK * DENSE_KEY_BLOCK * mla.num_heads) * 4 * WIDE
    if config.indexer is None:
        return rows + attend
    choose = INDEX_QUERY_BLOCK * INDEX_KEY_BLOCK * (config.indexer.num_heads + 8) * 3 * WIDE
    return rows + num_tokens * config.indexer.top_k * 3 * 8 + max(attend, choose)


def _ffn(config: ModelConfig, num_tokens: int, element_bytes: int) -> int:
    moe = config.moe
    expert_input = moe.latent_size or config.hidden_size
    dense = max(config.intermediate_size, moe.num_shared_experts * moe.intermediate_size)
    per_token = dense * (3 * element_bytes + 4 * WIDE)
    per_token += moe.intermediate_size * (3 * element_bytes + 4 * WIDE)
    per_token += (expert_input + config.hidden_size) * 4 * WIDE
    matrix = moe.intermediate_size * expert_input * 6 * WIDE  # an expert's, while it is unpacked
    return num_tokens * per_token + matrix
