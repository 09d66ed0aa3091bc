"""Kimi-Linear against transformers' own implementation, on random small configs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from support.batches import Host
from support.random_checkpoint import published_config, random_tensors
from torch import Tensor

import longspan
from longspan.formats.safetensors import save_checkpoint

transformers = pytest.importorskip("transformers", minversion="5.23")

CONFIGS = {
    "as published": {},
    "expert groups": {"num_expert_group": 3, "topk_group": 2, "num_experts_per_token": 3},
    "weights not renormalised": {"moe_renormalize": False, "num_shared_experts": 2},
    "two dense layers": {"first_k_dense_replace": 2, "num_attention_heads": 2, "num_key_value_heads": 2},
    "q-lora": {"q_lora_rank": 14},
}


def reference(values: dict, tensors: dict[str, Tensor], dtype: torch.dtype):
    """transformers' model with the same weights, under the names it uses in memory."""
    config = transformers.KimiLinearConfig(**{k: v for k, v in values.items() if k != "architectures"})
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    model = transformers.KimiLinearForCausalLM(config).eval()
    renamed: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        for part in ("f_a_proj", "f_b_proj", "dt_bias", "A_log"):
            name = name.replace(f"self_attn.{part}", f"self_attn.forget_gate.{part}")
        name = name.replace(".block_sparse_moe.", ".mlp.")
        if ".experts." not in name and "_conv1d" not in name:
            renamed[name] = tensor
    for layer in range(values["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        if f"{prefix}.self_attn.q_conv1d.weight" in tensors:
            conv = [tensors[f"{prefix}.self_attn.{x}_conv1d.weight"] for x in "qkv"]
            renamed[f"{prefix}.self_attn.conv1d.weight"] = torch.cat(conv)
        if f"{prefix}.block_sparse_moe.gate.weight" in tensors:
            expert = f"{prefix}.block_sparse_moe.experts"
            w1, w2, w3 = (
                torch.stack([tensors[f"{expert}.{e}.{w}.weight"] for e in range(values["num_experts"])])
                for w in ("w1", "w2", "w3")
            )
            renamed[f"{prefix}.mlp.experts.gate_up_proj"] = torch.cat([w1, w3], 1)
            renamed[f"{prefix}.mlp.experts.down_proj"] = w2
    wanted = model.state_dict()
    model.load_state_dict({name: t.float().reshape(wanted[name].shape) for name, t in renamed.items()})
    return model.to(dtype)


def setup(tmp_path: Path, changes: dict, seed: int) -> tuple[Path, dict, dict[str, Tensor]]:
    values = published_config("kimi-linear", **changes)
    tensors = random_tensors(values, seed)
    (tmp_path / "config.json").write_text(json.dumps(values))
    save_checkpoint(tensors, tmp_path)
    return tmp_path, values, tensors


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    path, values, tensors = setup(tmp_path, CONFIGS[name], seed=list(CONFIGS).index(name))
    model = longspan.load_model(path, dtype="float32")
    theirs = reference(values, tensors, torch.float32)
    ids = torch.randint(0, values["vocab_size"], (90,), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        want = theirs(ids[None]).logits[0]
    torch.testing.assert_close(model.forward(ids), want, atol=2e-3, rtol=0)
    torch.testing.assert_close(Host(model, 1, 90).feed(0, ids.tolist(), 13), want, atol=2e-3, rtol=0)


def test_bfloat16_is_as_near_to_float32_as_transformers_is(tmp_path: Path) -> None:
    """Experts are all chosen, so that no rounding can flip a choice."""
    changes = {"num_experts": 2, "num_experts_per_token": 2}
    path, values, tensors = setup(tmp_path, changes, seed=7)
    ids = torch.randint(0, values["vocab_size"], (60,), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        exact = reference(values, tensors, torch.float32)(ids[None]).logits[0]
        theirs = reference(values, tensors, torch.bfloat16)(ids[None]).logits[0].float()
    ours = longspan.load_model(path, dtype="bfloat16").forward(ids)
    assert (ours - exact).square().mean() < 1.5 * (theirs - exact).square().mean()
