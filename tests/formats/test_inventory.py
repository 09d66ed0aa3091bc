"""The tensors a checkpoint must have, and what is said when it has others."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from longspan.config import ModelConfig, load_config, parse_config
from longspan.errors import CheckpointError
from longspan.formats import mx
from longspan.formats.check import compare, require_text_model
from longspan.formats.inventory import (
    VISION,
    active_parameters,
    expected_tensors,
    resolve_names,
    totals,
    vision_specs,
)
from longspan.formats.safetensors import DTYPES, Checkpoint, open_checkpoint, save_checkpoint, save_file

CONFIGS = Path(__file__).parent.parent / "data" / "configs"
MOE = "model.layers.1.block_sparse_moe"


@pytest.fixture(scope="module")
def k3() -> ModelConfig:
    return load_config(CONFIGS / "k3.json")


@pytest.fixture(scope="module")
def linear() -> ModelConfig:
    return load_config(CONFIGS / "kimi-linear.json")


@pytest.mark.parametrize(
    ("name", "tensors", "text_billions", "active_billions"),
    [("k3", 497_220, 2779.5, 104.2), ("k31-pro", 497_340, 2779.7, 104.4), ("kimi-linear", 20_493, 49.1, 3.1)],
)
def test_published_models_have_their_published_size(name, tensors, text_billions, active_billions):
    config = load_config(CONFIGS / f"{name}.json")
    parts = totals(config)
    assert sum(part.tensors for part in parts.values()) == tensors == len(expected_tensors(config))
    text = sum(part.parameters for key, part in parts.items() if key != VISION)
    assert round(text / 1e9, 1) == text_billions
    assert round(active_parameters(config) / 1e9, 1) == active_billions


def test_the_formula_equals_the_sum_over_all_names(data_dir):
    for folder in ("k3-text", "k31-text"):
        config = load_config(data_dir / folder)
        specs = expected_tensors(config)
        for part, total in totals(config).items():
            mine = [spec for spec in specs.values() if spec.part == part]
            assert total.tensors == len(mine)
            assert total.parameters == sum(spec.parameters for spec in mine)
            assert total.nbytes == sum(spec.nbytes for spec in mine)


def test_k3_storage_is_1561_gigabytes(k3):
    parts = totals(k3)
    assert round(sum(part.nbytes for part in parts.values()) / 1e9) == 1561
    assert parts["routed experts"].nbytes == 92 * 896 * 17_547_264
    assert parts["vision"].tensors == 168
    assert round(parts["kda"].parameters / 69 / 1e6, 1) == 443.7
    assert round(parts["mla"].parameters / 24 / 1e6, 1) == 232.2


@pytest.mark.parametrize(
    ("name", "shape", "dtype"),
    [
        ("model.embed_tokens.weight", [163840, 7168], "BF16"),
        ("lm_head.weight", [163840, 7168], "BF16"),
        ("model.output_attn_res_proj.weight", [1, 7168], "BF16"),
        ("model.layers.92.self_attention_res_norm.weight", [7168], "BF16"),
        ("model.layers.0.mlp_res_proj.weight", [1, 7168], "BF16"),
        ("model.layers.0.mlp.down_proj.weight", [7168, 33792], "BF16"),
        ("model.layers.0.self_attn.g_proj.weight", [12288, 7168], "BF16"),
        ("model.layers.0.self_attn.b_proj.weight", [96, 7168], "BF16"),
        ("model.layers.0.self_attn.f_b_proj.weight", [12288, 128], "BF16"),
        ("model.layers.0.self_attn.q_conv1d.weight", [12288, 1, 4], "F32"),
        ("model.layers.0.self_attn.A_log", [128], "F32"),
        ("model.layers.0.self_attn.dt_bias", [12288], "F32"),
        ("model.layers.0.self_attn.o_norm.weight", [128], "F32"),
        ("model.layers.3.self_attn.q_b_proj.weight", [18432, 1536], "BF16"),
        ("model.layers.3.self_attn.kv_a_proj_with_mqa.weight", [576, 7168], "BF16"),
        ("model.layers.3.self_attn.kv_b_proj.weight", [24576, 512], "BF16"),
        ("model.layers.3.self_attn.g_proj.weight", [12288, 7168], "BF16"),
        ("model.layers.3.self_attn.o_proj.weight", [7168, 12288], "BF16"),
        (f"{MOE}.gate.weight", [896, 7168], "BF16"),
        (f"{MOE}.gate.e_score_correction_bias", [896], "F32"),
        (f"{MOE}.routed_expert_down_proj.weight", [3584, 7168], "BF16"),
        (f"{MOE}.shared_experts.down_proj.weight", [7168, 6144], "BF16"),
        (f"{MOE}.experts.895.w1.weight_packed", [3072, 1792], "U8"),
        (f"{MOE}.experts.895.w3.weight_scale", [3072, 112], "U8"),
        (f"{MOE}.experts.0.w2.weight_packed", [3584, 1536], "U8"),
        (f"{MOE}.experts.0.w2.weight_scale", [3584, 96], "U8"),
        ("vision_tower.patch_embed.proj.weight", [1024, 3, 14, 14], "BF16"),
        ("vision_tower.encoder.blocks.26.wqkv.weight", [4608, 1024], "BF16"),
        ("mm_projector.proj.0.weight", [4096, 4096], "BF16"),
        ("mm_projector.proj.2.weight", [7168, 4096], "BF16"),
    ],
)
def test_k3_tensors_have_their_published_shape_and_dtype(k3, name, shape, dtype):
    spec = expected_tensors(k3)[name]
    assert (list(spec.shape), spec.dtypes[0]) == (shape, dtype)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("model.layers.0.self_attn.g_a_proj.weight", [128, 2304]),
        ("model.layers.0.self_attn.g_b_proj.weight", [4096, 128]),
        ("model.layers.0.self_attn.A_log", [1, 1, 32, 1]),
        ("model.layers.3.self_attn.q_proj.weight", [6144, 2304]),
        ("model.layers.3.self_attn.kv_b_proj.weight", [8192, 512]),
        (f"{MOE}.experts.255.w2.weight", [2304, 1024]),
        (f"{MOE}.shared_experts.up_proj.weight", [1024, 2304]),
    ],
)
def test_kimi_linear_tensors_have_their_published_shape(linear, name, shape):
    assert list(expected_tensors(linear)[name].shape) == shape


def test_kimi_linear_lacks_what_k3_added(linear):
    names = "\n".join(expected_tensors(linear))
    for absent in ("_res_", "routed_expert_", "self_attn.g_proj", "packed", "indexer", "vision"):
        assert absent not in names


def test_tied_embeddings_have_no_head_but_count_as_active(linear):
    tied = dataclasses.replace(linear, tie_word_embeddings=True)
    assert "lm_head.weight" not in expected_tensors(tied)
    assert active_parameters(tied) == active_parameters(linear)


def test_vision_tensors_follow_the_config(k3):
    assert k3.vision is not None
    small = dataclasses.replace(
        k3.vision,
        num_layers=1,
        hidden_size=64,
        qkv_hidden_size=96,
        intermediate_size=128,
        pos_emb_height=8,
        pos_emb_width=9,
        text_hidden_size=128,
    )
    block = "vision_tower.encoder.blocks.0"
    assert {name: list(spec.shape) for name, spec in vision_specs(small).items()} == {
        "mm_projector.post_norm.weight": [128],
        "mm_projector.proj.0.weight": [256, 256],
        "mm_projector.proj.2.weight": [128, 256],
        f"{block}.mlp.fc0.weight": [128, 64],
        f"{block}.mlp.fc1.weight": [64, 128],
        f"{block}.norm0.weight": [64],
        f"{block}.norm1.weight": [64],
        f"{block}.wo.weight": [64, 96],
        f"{block}.wqkv.weight": [288, 64],
        "vision_tower.encoder.final_layernorm.weight": [64],
        "vision_tower.patch_embed.pos_emb.weight": [8, 9, 64],
        "vision_tower.patch_embed.proj.weight": [64, 3, 14, 14],
    }


def test_counts_grow_with_the_config_without_a_cap(k3):
    """G35."""
    moe = dataclasses.replace(k3.moe, num_experts=1024)
    bigger = dataclasses.replace(
        k3, moe=moe, num_layers=130, moe_layers=tuple(range(130)), full_attention_layers=(1,)
    )
    assert totals(bigger)["routed experts"].tensors == 130 * 1024 * 6


# --- spellings ---


def test_all_three_spellings_mean_the_same():
    for spelled in ("language_model.model.norm.weight", "model.norm.weight", "language_model.norm.weight"):
        assert resolve_names([spelled]) == {"model.norm.weight": spelled}
    for spelled in ("language_model.lm_head.weight", "lm_head.weight"):
        assert resolve_names([spelled]) == {"lm_head.weight": spelled}
    assert resolve_names(["vision_tower.x"]) == {"vision_tower.x": "vision_tower.x"}


def test_one_tensor_spelled_twice_is_refused():
    with pytest.raises(CheckpointError, match="two spellings of one tensor"):
        resolve_names(["model.norm.weight", "language_model.model.norm.weight"])


# --- comparing ---


def golden(data_dir: Path, folder: str = "k3-text") -> tuple[ModelConfig, dict[str, torch.Tensor]]:
    checkpoint = open_checkpoint(data_dir / folder)
    return load_config(data_dir / folder), {name: checkpoint.tensor(name) for name in checkpoint.names}


def reopened(tensors: dict[str, torch.Tensor], tmp_path: Path) -> Checkpoint:
    save_file(tensors, tmp_path / "model.safetensors")
    return open_checkpoint(tmp_path)


@pytest.mark.parametrize("folder", ["k3-text", "k31-text"])
def test_golden_checkpoints_are_clean(data_dir, folder):
    config, tensors = golden(data_dir, folder)
    found = compare(config, open_checkpoint(data_dir / folder))
    assert found.clean
    assert set(found.names) == set(expected_tensors(config))
    assert set(found.parts) == set(tensors)


def test_a_whole_kimi_linear_checkpoint_is_clean_in_every_accepted_form(tmp_path):
    values = json.loads((CONFIGS / "kimi-linear.json").read_text())
    values.update(
        hidden_size=64,
        intermediate_size=32,
        vocab_size=163840,
        num_experts=4,
        num_experts_per_token=2,
        moe_intermediate_size=32,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_hidden_layers=4,
    )
    values["linear_attn_config"].update(num_heads=2, full_attn_layers=[4], kda_layers=[1, 2, 3])
    config = parse_config(values)
    dtypes = {name: getattr(torch, torch_name) for name, (_, torch_name) in DTYPES.items()}
    specs = expected_tensors(config)
    tensors = {name: torch.zeros(spec.shape, dtype=dtypes[spec.dtypes[0]]) for name, spec in specs.items()}
    save_checkpoint(tensors, tmp_path / "a", max_shard_bytes=100_000)
    assert compare(config, open_checkpoint(tmp_path / "a")).clean
    for name, spec in specs.items():
        if spec.other_shapes:
            tensors[name] = torch.zeros(spec.other_shapes[-1], dtype=torch.bfloat16)
    prefix = "model.layers.0.self_attn."
    assert tensors[prefix + "k_conv1d.weight"].shape == (256, 4)
    tensors[prefix + "A_log"] = torch.zeros(2)
    save_checkpoint(tensors, tmp_path / "b")
    assert compare(config, open_checkpoint(tmp_path / "b")).clean


def test_every_single_missing_tensor_is_noticed(data_dir):
    config, _ = golden(data_dir, "k31-text")
    whole = open_checkpoint(data_dir / "k31-text")
    for name in whole.names[::7]:
        rest = {other: whole.info(other) for other in whole.names if other != name}
        found = compare(config, Checkpoint(rest, whole.source, {}))
        assert found.missing == [name.removeprefix("language_model.")]
        assert not found.unexpected
        assert not found.wrong


def test_wrong_shapes_and_dtypes_are_told_with_the_find_and_the_expected(data_dir, tmp_path):
    config, tensors = golden(data_dir)
    prefix = "language_model.model.layers.3.self_attn"
    tensors[f"{prefix}.o_proj.weight"] = torch.zeros(128, 64, dtype=torch.bfloat16)
    tensors[f"{prefix}.q_a_layernorm.weight"] = torch.zeros(64, dtype=torch.float16)
    found = compare(config, reopened(tensors, tmp_path))
    assert f"{prefix}.o_proj.weight is BF16 [128, 64]; expected BF16 [128, 128]" in found.wrong
    assert f"{prefix}.q_a_layernorm.weight is F16 [64]; expected BF16 [64]" in found.wrong
    assert len(found.wrong) == 2
    with pytest.raises(
        CheckpointError, match=r"2 tensors: .*q_a_layernorm.weight is F16 \[64\]; expected BF16"
    ):
        require_text_model(config, open_checkpoint(tmp_path))


def test_rotary_buffers_are_unexpected_but_do_not_stop_loading(data_dir, tmp_path):
    config, tensors = golden(data_dir)
    buffer = "language_model.model.layers.3.self_attn.rotary_emb.inv_freq"
    tensors[buffer] = torch.zeros(8)
    checkpoint = reopened(tensors, tmp_path)
    assert compare(config, checkpoint).unexpected == [buffer]
    assert require_text_model(config, checkpoint)["lm_head.weight"] == "language_model.lm_head.weight"


def test_weights_that_nothing_would_use_stop_loading(data_dir, tmp_path):
    config, tensors = golden(data_dir)
    tensors["language_model.model.layers.3.self_attn.o_proj.bias"] = torch.zeros(128)
    with pytest.raises(CheckpointError, match=r"does not call for, 1 tensor: .*o_proj\.bias"):
        require_text_model(config, reopened(tensors, tmp_path))


def test_an_incomplete_checkpoint_stops_loading_but_absent_vision_does_not(data_dir, tmp_path, k3):
    config, tensors = golden(data_dir)
    with_vision = dataclasses.replace(config, vision=k3.vision)
    checkpoint = reopened(tensors, tmp_path)
    assert len(compare(with_vision, checkpoint).missing) == 168
    require_text_model(with_vision, checkpoint)
    del tensors["language_model.model.norm.weight"]
    with pytest.raises(CheckpointError, match=r"lacks 1 tensor: model\.norm\.weight"):
        require_text_model(config, reopened(tensors, tmp_path))


@pytest.mark.parametrize("columns", [64, 128])
def test_the_index_query_may_come_from_the_latent_or_the_hidden_state(data_dir, tmp_path, columns):
    config, tensors = golden(data_dir, "k31-text")
    name = "language_model.model.layers.3.self_attn.indexer.wq_b.weight"
    tensors[name] = torch.zeros(128, columns)
    assert compare(config, reopened(tensors, tmp_path)).clean


# --- experts as they are in the file (G33) ---


def test_experts_may_be_plain_where_the_config_announces_packed_ones_and_the_reverse(data_dir, tmp_path):
    config, tensors = golden(data_dir)
    stem = "language_model.model.layers.1.block_sparse_moe.experts.0.w1"
    packed, scale = tensors.pop(f"{stem}.weight_packed"), tensors.pop(f"{stem}.weight_scale")
    tensors[f"{stem}.weight"] = mx.dequantize_mxfp4(packed, scale, torch.bfloat16)
    checkpoint = reopened(tensors, tmp_path)
    assert compare(config, checkpoint).clean
    assert compare(dataclasses.replace(config, experts_packed=False), checkpoint).clean


def test_an_expert_both_plain_and_packed_is_not_clean(data_dir, tmp_path):
    config, tensors = golden(data_dir)
    stem = "language_model.model.layers.1.block_sparse_moe.experts.0.w1"
    tensors[f"{stem}.weight"] = torch.zeros(64, 64, dtype=torch.bfloat16)
    assert compare(config, reopened(tensors, tmp_path)).unexpected == [f"{stem}.weight"]


def test_floats_in_place_of_packed_bytes_are_refused_by_name(data_dir, tmp_path):
    config, tensors = golden(data_dir)
    name = "language_model.model.layers.1.block_sparse_moe.experts.0.w1.weight_packed"
    tensors[name] = torch.zeros(64, 32, dtype=torch.bfloat16)
    with pytest.raises(CheckpointError, match=r"w1.weight_packed is BF16 \[64, 32\]; expected U8 \[64, 32\]"):
        require_text_model(config, reopened(tensors, tmp_path))


def test_nothing_but_routed_experts_may_be_packed(data_dir, tmp_path):
    config, tensors = golden(data_dir)
    stem = "language_model.model.layers.1.block_sparse_moe.routed_expert_down_proj"
    packed, scale = mx.quantize_mxfp4(tensors.pop(f"{stem}.weight"))
    tensors |= {f"{stem}.weight_packed": packed, f"{stem}.weight_scale": scale}
    found = compare(config, reopened(tensors, tmp_path))
    assert found.missing == [f"{stem.removeprefix('language_model.')}.weight"]
    assert sorted(found.unexpected) == [f"{stem}.weight_packed", f"{stem}.weight_scale"]


def test_stacked_experts_decode_as_separate_ones_do():
    """G33: the maths does not depend on rank; a file that stacks them is refused by name like any other."""
    stacked = torch.randn(3, 4, 64, generator=torch.Generator().manual_seed(1))
    packed, scale = mx.quantize_mxfp4(stacked)
    for expert in range(3):
        one = mx.dequantize_mxfp4(packed[expert], scale[expert])
        assert torch.equal(one, mx.dequantize_mxfp4(packed, scale)[expert])
