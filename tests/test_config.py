"""config.json is read rightly, or refused with the field, the find and what is legal."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longspan.config import ActivationConfig, ModelConfig, load_config, parse_config, parse_vision
from longspan.errors import ConfigError

CONFIGS = Path(__file__).parent / "data" / "configs"
NAMES = ["k3", "k31-pro", "kimi-linear"]
REMOVED = object()


def raw(name: str) -> dict[str, Any]:
    return json.loads((CONFIGS / f"{name}.json").read_text())


def edit(config: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    *outer, last = path.split(".")
    place = config
    for key in outer:
        place = place[key]
    if value is REMOVED:
        del place[last]
    else:
        place[last] = value
    return config


def k3_with(path: str, value: Any) -> dict[str, Any]:
    return edit(raw("k3"), path, value)


def test_k3_is_read_in_full():
    config = load_config(CONFIGS / "k3.json")
    assert config.family == "k3"
    assert config.full_attention_layers == (*range(3, 92, 4), 92)
    assert config.is_full_attention(91)
    assert config.is_full_attention(92)
    assert not config.is_full_attention(0)
    assert config.moe_layers == tuple(range(1, 93))
    assert config.activation == ActivationConfig("situ", beta=4.0, linear_beta=25.0)
    assert config.kda.full_rank_gate
    assert config.kda.gate_lower_bound == -5.0
    assert (config.mla.q_lora_rank, config.mla.kv_lora_rank, config.mla.output_gate) == (1536, 512, True)
    assert config.mla.latent_norm_eps == 1e-6
    assert (config.moe.num_experts, config.moe.top_k, config.moe.latent_size) == (896, 16, 3584)
    assert config.attn_res_block_size == 12
    assert config.indexer is None
    assert config.vision is not None
    assert config.vision.num_layers == 27
    assert (config.bos_token_id, config.eos_token_ids, config.pad_token_id) == (163584, (163586,), 163839)
    assert config.media_placeholder_token_id == 163605
    assert config.experts_packed


def test_k31_pro_is_k3_with_an_indexer():
    k3, k31 = load_config(CONFIGS / "k3.json"), load_config(CONFIGS / "k31-pro.json")
    assert k31.family == "k3.1"
    indexer = k31.indexer
    assert indexer is not None
    assert (indexer.num_heads, indexer.head_dim, indexer.top_k, indexer.norm_eps) == (32, 128, 2048, 1e-5)
    assert (k31.kda, k31.mla, k31.moe, k31.vision) == (k3.kda, k3.mla, k3.moe, k3.vision)


def test_kimi_linear_is_flat_and_lacks_what_k3_added():
    config = load_config(CONFIGS / "kimi-linear.json")
    assert config.family == "kimi-linear"
    assert config.activation == ActivationConfig("silu")
    assert config.full_attention_layers == (3, 7, 11, 15, 19, 23, 26)
    assert (config.kda.full_rank_gate, config.kda.gate_lower_bound) == (False, None)
    assert (config.mla.q_lora_rank, config.mla.output_gate) == (None, False)
    assert (config.moe.latent_size, config.moe.latent_norm, config.moe.scaling_factor) == (None, False, 2.446)
    assert (config.attn_res_block_size, config.vision, config.indexer) == (None, None, None)
    assert config.max_position == 1048576
    assert not config.experts_packed


@pytest.mark.parametrize("folder", ["k3-text", "k31-text"])
def test_golden_configs_are_read(data_dir, folder):
    config = load_config(data_dir / folder)
    assert config.num_layers == 8
    assert config.full_attention_layers == (3, 7)
    assert config.eos_token_ids == (2,)
    assert (config.indexer is not None) == (folder == "k31-text")


def test_the_latent_norm_eps_can_be_overridden():
    assert load_config(CONFIGS / "k3.json", latent_norm_eps=1e-5).mla.latent_norm_eps == 1e-5


def test_reading_a_config_does_not_import_torch():
    code = (
        "import sys; from longspan.config import load_config;"
        f"load_config({str(CONFIGS / 'k3.json')!r}); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_no_size_has_a_hard_cap():
    """G35: 1,024 experts and 130 layers."""
    config = raw("k3")
    text = config["text_config"]
    text.update(num_experts=1024, num_hidden_layers=130)
    text["linear_attn_config"].update(
        full_attn_layers=list(range(2, 131, 2)), kda_layers=list(range(1, 130, 2))
    )
    parsed = parse_config(config)
    assert (parsed.moe.num_experts, parsed.num_layers, len(parsed.full_attention_layers)) == (1024, 130, 65)


# --- what is missing, contradictory or unknown ---


def leaves(config: dict[str, Any], prefix: str = "") -> list[str]:
    found = []
    for key, value in config.items():
        if isinstance(value, dict) and key not in ("observer_kwargs",):
            found += leaves(value, f"{prefix}{key}.")
        else:
            found.append(prefix + key)
    return found


# Fields without which the config still says everything; without any other it must not be read.
OPTIONAL = set(
    """
    activation_func actorder attn_bias block_structure bos_token_id dsa_layers dtype dynamic
    global_compression_ratio ignore ignore_index image_placeholder initializer_range input_activations
    kv_cache_scheme linear_bias media_placeholder_token_id merge_type mlp_type mm_hidden_size
    mm_projector_type model_type moe_layer_freq norm_type num_expert_group num_key_value_heads
    num_nextn_predict_layers observer observer_kwargs output_activations pad_token_id
    patch_embed_proj_bias pos_emb_interpolation_mode pos_emb_type projector_hidden_act
    quantization_status rope_scaling rope_theta scale_dtype symmetric targets text_hidden_size
    tie_word_embeddings topk_group topk_method transformers_version use_cache use_grouped_topk
    video_attn_type zp_dtype
    """.split()  # noqa: SIM905
)
OPTIONAL_PATHS = {
    "text_config.architectures",
    "text_config.quantization_config.config_groups.group_0.format",
    "q_lora_rank",  # the last two in Kimi-Linear only
    "head_dim",
}


def is_optional(path: str) -> bool:
    return path in OPTIONAL_PATHS or path.split(".")[-1] in OPTIONAL


@pytest.mark.parametrize("name", NAMES)
def test_every_field_that_matters_is_missed_by_name(name):
    missed = 0
    for path in leaves(raw(name)):
        if is_optional(path):
            continue
        with pytest.raises(ConfigError) as error:
            parse_config(edit(raw(name), path, REMOVED))
        last = path.split(".")[-1]
        expected = {"index_n_heads": "head count", "index_head_dim": "head dimension", "index_topk": "top-k"}
        assert expected.get(last, last) in str(error.value)
        missed += 1
    assert missed > 25


@pytest.mark.parametrize("name", NAMES)
def test_optional_fields_can_be_absent(name):
    for path in leaves(raw(name)):
        if is_optional(path):
            assert isinstance(parse_config(edit(raw(name), path, REMOVED)), ModelConfig)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("architectures", ["LlamaForCausalLM"], r'architectures is \["LlamaForCausalLM"\]; legal is one of'),
        ("architectures", "KimiK3ForConditionalGeneration", "in a list"),
        ("architectures", [], "legal is one of"),
        ("text_config", 3, "text_config is 3; a JSON object"),
        ("text_config.model_type", "llama", 'text_config.model_type is "llama"; legal is "kimi_linear"'),
        ("text_config.hidden_act", "gelu", 'text_config.hidden_act is "gelu"; legal is "situ" or "silu"'),
        ("text_config.activation_situ_beta", -1.0, "legal is a number of at least 0, or null"),
        ("text_config.activation_situ_linear_beta", 0, "legal is a number above 0"),
        ("text_config.num_nextn_predict_layers", 1, "num_nextn_predict_layers is 1; legal is 0"),
        ("text_config.rope_scaling", {"type": "yarn"}, "rope_scaling is .*; legal is null"),
        ("text_config.topk_method", "greedy", 'topk_method is "greedy"; legal is "noaux_tc"'),
        ("text_config.moe_router_activation_func", "softmax", 'legal is "sigmoid"'),
        ("text_config.mla_use_nope", False, "mla_use_nope is false; legal is true"),
        ("text_config.mla_use_nope", 1, "mla_use_nope is 1; legal is true"),
        ("text_config.attention_bias", True, "attention_bias is true; legal is false"),
        ("text_config.hidden_size", 0, "hidden_size is 0; legal is a whole number of at least 1"),
        ("text_config.hidden_size", 7168.0, "hidden_size is 7168.0; legal is a whole number"),
        ("text_config.hidden_size", True, "hidden_size is true; legal is a whole number"),
        ("text_config.rms_norm_eps", "1e-5", "rms_norm_eps is .*; legal is a number above 0"),
        ("text_config.rms_norm_eps", float("nan"), "rms_norm_eps is NaN"),
        ("text_config.tie_word_embeddings", 0, "tie_word_embeddings is 0; legal is true or false"),
        (
            "tie_word_embeddings",
            True,
            "text_config.tie_word_embeddings is false but tie_word_embeddings is true",
        ),
        ("text_config.num_key_value_heads", 8, "num_key_value_heads is 8; legal is num_attention_heads = 96"),
        ("text_config.num_expert_group", 5, "num_expert_group is 5; legal is a divisor of num_experts = 896"),
        ("text_config.topk_group", 2, "topk_group is 2; legal is at most num_expert_group = 1"),
        ("text_config.num_experts_per_token", 897, "legal is at most the 896 experts"),
        ("text_config.num_experts_per_tok", 8, "num_experts_per_token is 16 but .*num_experts_per_tok is 8"),
        ("text_config.n_group", 2, "num_expert_group is 1 but text_config.n_group is 2"),
        (
            "text_config.model_max_length",
            4096,
            "max_position_embeddings is 1048576 but .*model_max_length is 4096",
        ),
        ("text_config.moe_intermediate_size", 3080, r"legal is a multiple of 32 \(such as 3104\)"),
        ("text_config.routed_expert_hidden_size", 48, r"legal is a multiple of 32 \(such as 64\)"),
        ("text_config.eos_token_id", "x", "eos_token_id is .*; legal is a whole number or a list"),
        ("text_config.eos_token_id", 163840, r"eos_token_id\[0\] is 163840; legal is 0 to 163839"),
        ("text_config.linear_attn_config.gate_lower_bound", -6, "gate_lower_bound is -6.0; legal is"),
        ("text_config.linear_attn_config.gate_lower_bound", 0.0, "gate_lower_bound is 0.0; legal is"),
        ("text_config.linear_attn_config.full_attn_layers", "all", "legal is a list of whole numbers"),
        ("text_config.linear_attn_config.full_attn_layers", [4], r"name each layer once.*missing: \[8, 12"),
        ("text_config.linear_attn_config.kda_layers", [*range(1, 94)], r"named twice: \[4, 8"),
        ("text_config.num_hidden_layers", 92, r"outside: \[93\]"),
        ("architectures", [["KimiK3ForConditionalGeneration"]], "legal is one of .*, in a list"),
        ("text_config.num_hidden_layers", 10**9, r"missing: \[94, 95"),
        ("text_config.num_hidden_layers", 10**15, "legal is at most 2147483647"),
        ("text_config.routed_scaling_factor", 10**400, "routed_scaling_factor is 1000"),
        ("text_config.dsa_config", {"topk": 5}, "which only K3.1 has"),
        ("text_config.quantization_config.format", "nvfp4-pack-quantized", 'legal is "mxfp4-pack-quantized"'),
        ("text_config.quantization_config.quant_method", "gptq", 'legal is "compressed-tensors"'),
        (
            "text_config.quantization_config.kv_cache_scheme",
            {"num_bits": 8},
            "kv_cache_scheme is .*legal is null",
        ),
        (
            "text_config.quantization_config.config_groups.group_0.input_activations",
            {"num_bits": 8},
            "input_activations is .*legal is null",
        ),
        (
            "text_config.quantization_config.config_groups.group_0.weights.group_size",
            16,
            "group_size is 16; legal is 32",
        ),
        ("vision_config.merge_type", "avg", 'merge_type is "avg"; legal is "sd2_tpool"'),
        ("vision_config.text_hidden_size", 64, "text_hidden_size is 64 but text_config.hidden_size is 7168"),
        ("vision_config.merge_kernel_size", [2, 3], "legal is two equal numbers"),
        ("vision_config.qkv_hidden_size", 1000, "legal is a multiple of vt_num_attention_heads = 12"),
    ],
)
def test_what_cannot_be_run_is_named_with_the_find_and_the_legal(path, value, message):
    with pytest.raises(ConfigError, match=message):
        parse_config(k3_with(path, value))


@pytest.mark.parametrize(
    "path",
    [
        "sliding_window",
        "text_config.sliding_window",
        "text_config.linear_attn_config.sliding_window",
        "text_config.quantization_config.sliding_window",
        "text_config.quantization_config.config_groups.group_0.weights.sliding_window",
        "vision_config.sliding_window",
    ],
)
def test_unknown_fields_are_refused_wherever_they_are(path):
    with pytest.raises(ConfigError, match=f"{path} is not a known field"):
        parse_config(k3_with(path, 4096))
    parse_config(k3_with(path, None))
    parse_config(k3_with(path.replace("sliding", "_sliding"), 4096))


def test_a_misspelt_field_gets_a_suggestion():
    with pytest.raises(
        ConfigError, match=r"attn_res_blocksize is not a known field.*Did you mean attn_res_block_size"
    ):
        parse_config(k3_with("text_config.attn_res_blocksize", 12))


def test_harmless_fields_are_accepted():
    config = raw("k3")
    for section in (config, config["text_config"]):
        section.update(
            use_cache=False,
            initializer_range=0.1,
            transformers_version="5.23",
            auto_map={"AutoConfig": "x"},
            rope_theta=10000.0,
            torch_dtype="bfloat16",
            attention_dropout=0.0,
        )
    assert parse_config(config) == parse_config(raw("k3"))


def test_other_spellings_are_read():
    config = raw("k3")
    text = config["text_config"]
    for old, new in {
        "num_experts": "num_local_experts",
        "num_experts_per_token": "num_experts_per_tok",
        "num_shared_experts": "n_shared_experts",
        "num_expert_group": "n_group",
        "moe_renormalize": "norm_topk_prob",
        "max_position_embeddings": "model_max_length",
    }.items():
        text[new] = text.pop(old)
    config["quantization_config"] = text.pop("quantization_config")
    assert parse_config(config) == parse_config(raw("k3"))


def test_a_null_linear_beta_means_identity_and_beta_zero_means_one():
    config = k3_with("text_config.activation_situ_linear_beta", None)
    config["text_config"]["activation_situ_beta"] = 0
    assert parse_config(config).activation == ActivationConfig("situ", beta=1.0, linear_beta=None)


def test_moe_layers_follow_first_and_frequency():
    config = raw("k3")
    config["text_config"].update(first_k_dense_replace=3, moe_layer_freq=2)
    assert parse_config(config).moe_layers == tuple(range(4, 93, 2))


# --- the indexer's spellings ---

SPELLINGS = {
    "index_n_heads": "n_heads num_heads index_num_heads indexer_n_heads indexer_num_heads head_count",
    "index_head_dim": "head_dim indexer_head_dim key_length",
    "index_topk": "topk top_k index_top_k indexer_topk topk_tokens",
    "dsa_layers": "layers layer_ids indexer_layers full_attn_layers",
}


@pytest.mark.parametrize(
    ("usual", "other"), [(u, o) for u, others in SPELLINGS.items() for o in others.split()]
)
def test_every_spelling_of_an_indexer_field_is_read(usual, other):
    config = raw("k31-pro")
    dsa = config["text_config"]["dsa_config"]
    dsa[other] = dsa.pop(usual)
    assert parse_config(config) == parse_config(raw("k31-pro"))
    dsa[usual] = 7
    with pytest.raises(ConfigError, match=f"dsa_config.{usual} is 7 but text_config.dsa_config.{other} is"):
        parse_config(config)


def test_indexer_fields_may_stand_in_text_config_itself():
    config = raw("k31-pro")
    config["text_config"].update(config["text_config"].pop("dsa_config"))
    assert parse_config(config) == parse_config(raw("k31-pro"))
    config["text_config"]["dsa_config"] = {"topk": 7}
    with pytest.raises(ConfigError, match=r"dsa_config.topk is 7 but text_config.index_topk is 2048"):
        parse_config(config)


def test_an_indexer_without_top_k_prints_the_fields_that_were_found():
    config = raw("k31-pro")
    config["text_config"]["dsa_config"]["best"] = config["text_config"]["dsa_config"].pop("index_topk")
    with pytest.raises(ConfigError, match=r'top-k is missing .* Found: \["index_n_heads", .*"best"\]'):
        parse_config(config)
    del config["text_config"]["dsa_config"]
    with pytest.raises(ConfigError, match="no dsa_config at all"):
        parse_config(config)


@pytest.mark.parametrize(
    "layers",
    [
        [4, 8],
        [3, 7, 11],
        "all",
        [*range(3, 92, 4), 92],
        [*range(4, 93, 4), 93, 93],
        [*map(str, range(4, 93, 4)), "93"],
    ],
)
def test_indexer_layers_must_be_the_full_attention_layers(layers):
    with pytest.raises(
        ConfigError, match=r"dsa_config are .* but linear_attn_config.full_attn_layers is \[4, 8"
    ):
        parse_config(edit(raw("k31-pro"), "text_config.dsa_config.dsa_layers", layers))


# --- special tokens ---


def test_stops_are_collected_from_config_and_generation_config():
    generation = {"max_length": 1048576, "eos_token_id": [163586, 163593]}
    assert parse_config(raw("k3"), generation=generation).eos_token_ids == (163586, 163593)
    only_generation = k3_with("text_config.eos_token_id", REMOVED)
    assert parse_config(only_generation, generation={"eos_token_id": 163586}).eos_token_ids == (163586,)


def test_the_tokenizer_is_the_last_resort_for_special_tokens():
    tokenizer = {
        "eos_token": {"content": "[EOS]"},
        "pad_token": "[PAD]",
        "added_tokens_decoder": {"163585": {"content": "[EOS]"}, "163839": {"content": "[PAD]"}},
    }
    assert parse_config(raw("k3"), tokenizer=tokenizer).eos_token_ids == (163586,)
    config = k3_with("text_config.eos_token_id", REMOVED)
    config["text_config"]["pad_token_id"] = None
    parsed = parse_config(config, tokenizer=tokenizer)
    assert (parsed.eos_token_ids, parsed.pad_token_id) == ((163585,), 163839)
    with pytest.raises(ConfigError, match="no reply would end"):
        parse_config(config)


def test_files_beside_config_json_are_read(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(k3_with("text_config.eos_token_id", REMOVED)))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 163586}')
    assert load_config(tmp_path).eos_token_ids == (163586,)
    assert load_config(tmp_path / "config.json") == load_config(tmp_path)


# --- files ---


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "not JSON"),
        ("[1]", "a JSON object was expected"),
        ("[" * 100_000, "not JSON"),
        ("\udcff", "not JSON"),
    ],
)
def test_a_broken_file_is_refused(tmp_path, content, message):
    (tmp_path / "config.json").write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(ConfigError, match=message):
        load_config(tmp_path)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"config\.json does not exist"):
        load_config(tmp_path)


def test_a_field_given_twice_with_different_values_is_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "a", "model_type": "b"}')
    with pytest.raises(ConfigError, match='model_type is "a" but model_type, given again, is "b"'):
        load_config(tmp_path)


def test_a_vision_config_alone_can_be_read():
    vision = parse_vision(raw("k3")["vision_config"], text_hidden_size=7168)
    assert (vision.num_heads, vision.qkv_hidden_size, vision.merge_size) == (12, 1536, 2)
    tower_sized = edit(raw("k3"), "vision_config.mm_hidden_size", None)["vision_config"]
    assert parse_vision(tower_sized, text_hidden_size=7168) == vision


junk = (
    st.none()
    | st.booleans()
    | st.integers(-3, 3)
    | st.floats()
    | st.text(max_size=3)
    | st.just([])
    | st.just({})
)


@settings(max_examples=300)
@given(st.data())
def test_random_damage_is_read_or_refused_but_never_crashes(data):
    config = copy.deepcopy(data.draw(st.sampled_from([raw(name) for name in NAMES])))
    for _ in range(data.draw(st.integers(1, 3))):
        path = data.draw(st.sampled_from(leaves(config)))
        edit(config, path, data.draw(junk | st.just(REMOVED)))
    try:
        assert isinstance(parse_config(config), ModelConfig)
    except ConfigError as error:
        assert str(error)
