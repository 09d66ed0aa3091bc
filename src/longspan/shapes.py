"""Models without trained weights: the shapes that `longspan make-checkpoint` writes, as published configs.

`SHAPES` holds the sizes, by the names of the published `text_config`; `published_config` adds what K3 and
K3.1 have in common. All is plain data: a test may shrink it.
"""

from __future__ import annotations

from typing import Any, Literal

Config = dict[str, Any]

ARCHITECTURES = {
    "kimi-linear": "KimiLinearForCausalLM",
    "k3": "KimiK3ForConditionalGeneration",
    "k3.1": "KimiK31ForConditionalGeneration",
}

_MINI: Config = {
    "vocab_size": 16384,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "q_lora_rank": 384,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "attn_res_block_size": 4,
    "num_experts": 40,
    "num_experts_per_token": 4,
    "num_shared_experts": 2,
    "moe_intermediate_size": 448,
    "routed_expert_hidden_size": 512,
    "linear_attn_config": {
        "num_heads": 16,
        "head_dim": 128,
        "full_attn_layers": [4, 8, 12, 16, 20, 24],
    },
    "dsa_config": {"index_n_heads": 16, "index_head_dim": 128, "index_topk": 2048},
}

_SMALL: Config = _MINI | {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_attention_heads": 32,
    "q_lora_rank": 768,
    "num_experts": 64,
    "num_experts_per_token": 8,
    "moe_intermediate_size": 1024,
    "routed_expert_hidden_size": 1024,
    "linear_attn_config": _MINI["linear_attn_config"] | {"num_heads": 32},
    "dsa_config": _MINI["dsa_config"] | {"index_n_heads": 32},
}

# Layer 0 is KDA with the dense feed-forward, layer 1 full attention with experts: every part once.
_REAL_LAYER: Config = _MINI | {
    "hidden_size": 7168,
    "intermediate_size": 33792,
    "num_hidden_layers": 2,
    "num_attention_heads": 96,
    "q_lora_rank": 1536,
    "attn_res_block_size": 12,
    "num_experts": 64,
    "num_experts_per_token": 16,
    "moe_intermediate_size": 3072,
    "routed_expert_hidden_size": 3584,
    "linear_attn_config": {"num_heads": 96, "head_dim": 128, "full_attn_layers": [2]},
    "dsa_config": {"index_n_heads": 32, "index_head_dim": 128, "index_topk": 2048},
}

SHAPES: dict[str, Config] = {"mini": _MINI, "small": _SMALL, "real-layer": _REAL_LAYER}


def published_config(sizes: Config, family: Literal["k3", "k3.1"] = "k3.1") -> Config:
    """config.json of a model of `family` with MXFP4 experts. Layers not full attention are KDA.

    `sizes` as in SHAPES; its dsa_config is left out of a K3.
    """
    attention = sizes["linear_attn_config"]
    full = attention["full_attn_layers"]
    kda = [layer for layer in range(1, sizes["num_hidden_layers"] + 1) if layer not in full]
    text: Config = sizes | {
        "architectures": ["KimiLinearForCausalLM"],
        "model_type": "kimi_linear",
        "num_key_value_heads": sizes["num_attention_heads"],
        "hidden_act": "situ",
        "activation_situ_beta": 4.0,
        "activation_situ_linear_beta": 25.0,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 1048576,
        "tie_word_embeddings": False,
        "mla_use_nope": True,
        "mla_use_output_gate": True,
        "latent_moe_use_norm": True,
        "routed_scaling_factor": 1.0,
        "moe_renormalize": True,
        "moe_router_activation_func": "sigmoid",
        "topk_method": "noaux_tc",
        "num_expert_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "num_nextn_predict_layers": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "linear_attn_config": attention
        | {
            "kda_layers": kda,
            "short_conv_kernel_size": 4,
            "use_full_rank_gate": True,
            "gate_lower_bound": -5.0,
        },
        "quantization_config": MXFP4_EXPERTS,
    }
    if family == "k3":
        del text["dsa_config"]
    return {
        "architectures": [ARCHITECTURES[family]],
        "model_type": "kimi_k3",
        "dtype": "bfloat16",
        "text_config": text,
    }


MXFP4_EXPERTS: Config = {
    "quant_method": "compressed-tensors",
    "format": "mxfp4-pack-quantized",
    "quantization_status": "compressed",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                "num_bits": 4,
                "type": "float",
                "strategy": "group",
                "group_size": 32,
                "symmetric": True,
                "dynamic": False,
                "scale_dtype": "torch.uint8",
            },
        }
    },
    "ignore": [
        "re:.*self_attn.*",
        "re:.*shared_experts.*",
        "re:.*mlp\\.(gate|up|down)_proj.*",
        "re:.*routed_expert_.*",
        "re:.*block_sparse_moe\\.gate.*",
        "lm_head",
    ],
}
