"""Random checkpoints in the published format, with odd sizes: what fits only round numbers shows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch import Tensor

from longspan import make_checkpoint
from longspan.config import parse_config
from longspan.formats.safetensors import save_checkpoint
from longspan.shapes import ARCHITECTURES, MXFP4_EXPERTS

TOP_K = 7


def published_config(family: str, packed: bool = False, **changes: Any) -> dict[str, Any]:
    """config.json of 5 layers, full attention at 3 and 5 (1-based). `changes` go to text_config."""
    text: dict[str, Any] = {
        "architectures": ["KimiLinearForCausalLM"],
        "model_type": "kimi_linear",
        "vocab_size": 61,
        "hidden_size": 36,
        "intermediate_size": 50,
        "num_hidden_layers": 5,
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "kv_lora_rank": 10,
        "q_lora_rank": None,
        "qk_nope_head_dim": 6,
        "qk_rope_head_dim": 4,
        "v_head_dim": 5,
        "mla_use_nope": True,
        "num_experts": 6,
        "num_experts_per_token": 2,
        "num_shared_experts": 1,
        "moe_intermediate_size": 32,
        "moe_renormalize": True,
        "moe_router_activation_func": "sigmoid",
        "num_expert_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 2.446,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "tie_word_embeddings": False,
        "max_position_embeddings": 4096,
        "num_nextn_predict_layers": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "dtype": "bfloat16",
        "linear_attn_config": {
            "head_dim": 6,
            "num_heads": 3,
            "short_conv_kernel_size": 4,
            "full_attn_layers": [3, 5],
            "kda_layers": [1, 2, 4],
        },
    }
    if family == "kimi-linear":
        return text | changes
    text |= {
        "hidden_act": "situ",
        "activation_situ_beta": 4.0,
        "activation_situ_linear_beta": 25.0,
        "q_lora_rank": 14,
        "mla_use_output_gate": True,
        "attn_res_block_size": 2,
        "num_shared_experts": 2,
        "routed_expert_hidden_size": 32,
        "latent_moe_use_norm": True,
        "routed_scaling_factor": 1.0,
    }
    text["linear_attn_config"] |= {"use_full_rank_gate": True, "gate_lower_bound": -5.0}
    if family == "k3.1":
        text["dsa_config"] = {"index_n_heads": 3, "index_head_dim": 6, "index_topk": TOP_K}
    if packed:
        text["quantization_config"] = MXFP4_EXPERTS
    top = {"architectures": [ARCHITECTURES[family]], "model_type": "kimi_k3", "dtype": "bfloat16"}
    return top | {"text_config": text | changes}


def random_tensors(values: dict[str, Any], seed: int = 0) -> dict[str, Tensor]:
    """A tensor for each that the config asks for, by canonical name."""
    return make_checkpoint.random_tensors(parse_config(values), seed)


def write_checkpoint(
    directory: Path,
    family: str,
    packed: bool = False,
    seed: int = 0,
    prefix: str | None = None,
    **changes: Any,
) -> Path:
    """Writes config.json and weights. K3 names carry `language_model.` unless `prefix` says otherwise."""
    values = published_config(family, packed, **changes)
    if prefix is None:
        prefix = "" if family == "kimi-linear" else "language_model."
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(values))
    tensors = {prefix + name: tensor for name, tensor in random_tensors(values, seed).items()}
    save_checkpoint(tensors, directory)
    return directory
