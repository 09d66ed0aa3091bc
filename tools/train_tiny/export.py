"""Writes a trained state as a published-format checkpoint: config.json and model.safetensors.

    python -m train_tiny.export RUN_DIR MODEL_DIR

Routed experts become MXFP4, A_log is padded to 128 entries, what the release keeps in fp32 stays fp32. The
moving average of the weights is exported, not the last step's.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from longspan.formats.mx import dequantize_mxfp4, quantize_mxfp4
from longspan.formats.safetensors import save_file

from .model import Config, TinyK31

A_LOG_LENGTH = 128
FP32 = ("A_log", "dt_bias", "conv1d.weight", "o_norm.weight", "e_score_correction_bias")


def published_tensors(model: TinyK31) -> dict[str, Tensor]:
    """Names, shapes and dtypes of spec and release, from the training model's state dict."""
    tensors: dict[str, Tensor] = {}
    for name, value in model.state_dict().items():
        name = "language_model." + name
        if ".experts.w" in name:
            stem, matrix = name.rsplit(".", 1)
            packed, scale = quantize_mxfp4(value.float())
            for e in range(value.shape[0]):
                tensors[f"{stem}.{e}.{matrix}.weight_packed"] = packed[e].contiguous()
                tensors[f"{stem}.{e}.{matrix}.weight_scale"] = scale[e].contiguous()
        elif name.endswith("A_log"):
            padded = torch.zeros(A_LOG_LENGTH)
            padded[: value.shape[0]] = value
            tensors[name] = padded
        else:
            tensors[name] = value.float() if name.endswith(FP32) else value.bfloat16()
    return {name: value.detach().contiguous() for name, value in tensors.items()}


def load_published(model: TinyK31, tensors: dict[str, Tensor]) -> None:
    """The inverse of `published_tensors`; checks an export, reads other checkpoints of the format."""
    state = {}
    for name, value in model.state_dict().items():
        full = "language_model." + name
        if ".experts.w" in full:
            stem, matrix = full.rsplit(".", 1)
            names = [f"{stem}.{e}.{matrix}" for e in range(value.shape[0])]
            state[name] = torch.stack(
                [dequantize_mxfp4(tensors[n + ".weight_packed"], tensors[n + ".weight_scale"]) for n in names]
            )
        else:
            state[name] = tensors[full][: value.shape[0]].float()
    model.load_state_dict(state)


def config_json(c: Config, n_base: int) -> dict[str, Any]:
    full = [i + 1 for i in sorted(c.full_layers)]
    weights = {
        "num_bits": 4,
        "type": "float",
        "strategy": "group",
        "group_size": 32,
        "symmetric": True,
        "dynamic": False,
        "scale_dtype": "torch.uint8",
        "observer": "minmax",
        "observer_kwargs": {},
        "actorder": None,
        "block_structure": None,
        "zp_dtype": None,
    }
    group = {
        "targets": ["Linear"],
        "format": "mxfp4-pack-quantized",
        "input_activations": None,
        "output_activations": None,
        "weights": weights,
    }
    quantization = {
        "quant_method": "compressed-tensors",
        "format": "mxfp4-pack-quantized",
        "quantization_status": "compressed",
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
        "config_groups": {"group_0": group},
        "ignore": [
            "re:.*self_attn.*",
            "re:.*shared_experts.*",
            r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
            "re:.*lm_head.*",
        ],
    }
    text = {
        "architectures": ["KimiLinearForCausalLM"],
        "model_type": "kimi_linear",
        "dtype": "bfloat16",
        "vocab_size": c.vocab_size,
        "hidden_size": c.hidden,
        "intermediate_size": c.dense_inter,
        "num_hidden_layers": c.layers,
        "num_attention_heads": c.heads,
        "num_key_value_heads": c.heads,
        "hidden_act": "situ",
        "activation_situ_beta": 4.0,
        "activation_situ_linear_beta": 25.0,
        "rms_norm_eps": c.eps,
        "initializer_range": 0.02,
        "max_position_embeddings": 1048576,
        "tie_word_embeddings": False,
        "use_cache": True,
        "q_lora_rank": c.q_lora,
        "kv_lora_rank": c.kv_lora,
        "qk_nope_head_dim": c.nope,
        "qk_rope_head_dim": c.rope,
        "v_head_dim": c.v_dim,
        "mla_use_nope": True,
        "mla_use_output_gate": True,
        "attn_res_block_size": c.res_block,
        "num_experts": c.experts,
        "num_experts_per_token": c.topk,
        "num_shared_experts": c.shared,
        "moe_intermediate_size": c.moe_inter,
        "routed_expert_hidden_size": c.latent,
        "latent_moe_use_norm": True,
        "routed_scaling_factor": 1.0,
        "moe_renormalize": True,
        "moe_router_activation_func": "sigmoid",
        "topk_method": "noaux_tc",
        "use_grouped_topk": True,
        "num_expert_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "num_nextn_predict_layers": 0,
        "bos_token_id": n_base,
        "eos_token_id": n_base + 2,
        "pad_token_id": n_base + 255,
        "linear_attn_config": {
            "head_dim": c.kda_dim,
            "num_heads": c.kda_heads,
            "short_conv_kernel_size": c.conv,
            "use_full_rank_gate": True,
            "gate_lower_bound": c.gate_lower_bound,
            "full_attn_layers": full,
            "kda_layers": [i for i in range(1, c.layers + 1) if i not in full],
        },
        "dsa_config": {
            "index_n_heads": c.index_heads,
            "index_head_dim": c.index_dim,
            "index_topk": c.index_topk,
            "dsa_layers": full,
        },
        "quantization_config": quantization,
    }
    return {
        "architectures": ["KimiK31ForConditionalGeneration"],
        "model_type": "kimi_k3",
        "dtype": "bfloat16",
        "text_config": text,
    }


def export(model: TinyK31, directory: Path) -> None:
    n_base = model.c.vocab_size - 256
    (directory / "config.json").write_text(json.dumps(config_json(model.c, n_base), indent=1) + "\n")
    save_file(published_tensors(model), directory / "model.safetensors", {"format": "pt"})


def averaged(state_file: Path) -> TinyK31:
    """The model of a training state, with averaged weights."""
    state = torch.load(state_file, weights_only=True)
    model = TinyK31(Config(vocab_size=state["model"]["lm_head.weight"].shape[0]))
    weights = state["model"] | state["average"]
    model.load_state_dict(weights | {"lm_head.weight": weights["model.embed_tokens.weight"]})
    return model


def main() -> None:
    run, directory = Path(sys.argv[1]), Path(sys.argv[2])
    export(averaged(run / "state.pt"), directory)
    size = (directory / "model.safetensors").stat().st_size
    print(f"model.safetensors: {size / 2**20:.2f} MiB")


if __name__ == "__main__":
    main()
