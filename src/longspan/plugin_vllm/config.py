"""A published config.json as vLLM wants to see it: a flat object with the names it asks for.

Our own reader decides what the fields mean, so both hosts refuse the same files with the same words. The
published fields themselves stay in `published`: an attribute of theirs would override what is computed here.
"""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig

from longspan.config import ModelConfig, parse_config
from longspan.plugin_vllm.policy import ARCHITECTURE, MODEL_TYPE

TRANSFORMERS_FIELDS = ("dtype", "torch_dtype", "transformers_version", "name_or_path", "_name_or_path")


class LongspanConfig(PreTrainedConfig):
    """Any model of the family. `published` is the content of config.json."""

    def __init__(self, published: dict[str, Any] | None = None, **fields: Any) -> None:
        kept = {name: fields.pop(name) for name in TRANSFORMERS_FIELDS if name in fields}
        if published is None:
            published = {**fields, "model_type": type(self).model_type}
        super().__init__(**kept)
        if not fields and "vocab_size" not in published and "text_config" not in published:
            return  # transformers makes an empty one to find out what differs from the default
        self.published = published
        self.dtype = kept.get("dtype") or published.get("text_config", {}).get("dtype")
        self.architectures = [ARCHITECTURE]
        self.model_type = MODEL_TYPE  # pyright: ignore[reportAttributeAccessIssue]
        config = self.model_config()
        width = config.mla.kv_lora_rank + config.mla.qk_rope_head_dim
        if config.indexer:
            width += config.indexer.head_dim
        self.vocab_size = config.vocab_size
        self.hidden_size = config.hidden_size
        self.intermediate_size = config.intermediate_size
        self.num_hidden_layers = config.num_layers
        self.num_attention_heads = config.mla.num_heads
        self.num_key_value_heads = 1
        self.head_dim = width // 2  # vLLM takes a token's bytes for 2 * heads * head_dim elements
        self.max_position_embeddings = config.max_position
        self.layer_types = [
            "full_attention" if config.is_full_attention(layer) else "linear_attention"
            for layer in range(config.num_layers)
        ]
        if config.moe_layers:
            self.num_experts = config.moe.num_experts
            self.num_experts_per_tok = config.moe.top_k
        self.tie_word_embeddings = config.tie_word_embeddings
        self.bos_token_id = config.bos_token_id
        self.eos_token_id = list(config.eos_token_ids)
        self.pad_token_id = config.pad_token_id

    def model_config(self) -> ModelConfig:
        """What our own reader makes of it. Raises ConfigError."""
        return parse_config(self.published)


# transformers writes an __init__ for a config class that states none of its own.
class KimiK3Config(LongspanConfig):
    model_type = "kimi_k3"
    __init__ = LongspanConfig.__init__


class KimiLinearConfig(LongspanConfig):
    model_type = "kimi_linear"
    __init__ = LongspanConfig.__init__
