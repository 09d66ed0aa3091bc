"""What is refused before anything is loaded, and which sizes vLLM is given."""

from __future__ import annotations

import json

import pytest
from support.random_checkpoint import published_config
from vllm import EngineArgs

from longspan.errors import ConfigError
from longspan.planning.models import load_model_config
from longspan.plugin_vllm import policy


@pytest.mark.parametrize("found", ["0.31.0", "0.33.1", "1.0.0", "0.32.0.dev1"])
def test_other_releases_are_refused_with_those_that_were_tested(found: str, monkeypatch) -> None:
    monkeypatch.setattr(policy, "installed_release", lambda: found)
    with pytest.raises(ConfigError, match=rf"{found}.*{policy.TESTED[-1]}"):
        policy.require_tested_release()


@pytest.mark.parametrize("found", [*policy.TESTED, f"{policy.TESTED[-1]}+cpu"])
def test_tested_releases_are_taken(found: str, monkeypatch) -> None:
    monkeypatch.setattr(policy, "installed_release", lambda: found)
    policy.require_tested_release()


def test_without_vllm_the_remedy_is_how_to_install_it(monkeypatch) -> None:
    monkeypatch.setattr(policy, "installed_release", lambda: None)
    with pytest.raises(ConfigError, match="pip install"):
        policy.require_tested_release()


def transfer(connector: str) -> dict[str, object]:
    """The decode side of a split."""
    return {"kv_connector": connector, "kv_role": "kv_consumer"}


def shards(**options: object) -> dict[str, object]:
    """The same over NIXL, with decode context parallel."""
    ranks = {"tensor_parallel_size": 2, "decode_context_parallel_size": 2}
    return {"kv_transfer_config": transfer("NixlConnector")} | ranks | options


@pytest.mark.parametrize(
    ("option", "named"),
    [
        ({"kv_cache_dtype": "fp8"}, "kv-cache-dtype fp8"),
        ({"load_format": "dummy"}, "load-format dummy"),
        ({"dtype": "float16"}, "float16.*bfloat16"),
        ({"mamba_cache_dtype": "float32", "dtype": "bfloat16"}, "mamba-cache-dtype float32"),
        ({"enable_prompt_embeds": True}, "enable-prompt-embeds"),
        ({"runner": "pooling", "dtype": "float32"}, "runner pooling"),
        ({"hf_overrides": {"num_experts_per_tok": 1}}, "hf-overrides"),
        ({"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}}, "speculative-config"),
        (shards(tensor_parallel_size=4), "is 2;.*parallel-size 4"),
        ({"kv_transfer_config": transfer("NixlPushConnector")}, "NixlPushConnector, of vLLM's"),
        ({"kv_transfer_config": transfer("MultiConnector")}, "MultiConnector, of vLLM's"),
        (shards(dcp_kv_cache_interleave_size=32), "only --cp-kv-cache-interleave-size"),
        (shards(block_size=64, cp_kv_cache_interleave_size=32), "is 32,.* give 64"),
    ],
    ids=[
        "cache",
        "weights",
        "type",
        "states",
        "embeddings",
        "pooling",
        "overrides",
        "speculation",
        "fewer ranks",
        "push",
        "others",
        "old flag",
        "pages",
    ],
)
def test_what_the_model_would_not_honour_is_refused(option, named: str, checkpoint) -> None:
    args = EngineArgs(str(checkpoint), max_model_len=256, skip_tokenizer_init=True, **option)
    with pytest.raises(Exception, match=named):
        args.create_engine_config()


def test_a_name_on_the_hub_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"not a directory.*Download"):
        policy.require_directory("moonshotai/Kimi-K3")


@pytest.mark.parametrize("ranks", [1, 2, 4, 8, 16, 32])
def test_pages_and_states_both_fill_a_block(ranks: int) -> None:
    """K3.1 Pro: few tokens in a block, little of it empty."""
    config = load_model_config("kimi-k3.1-pro")
    tokens = policy.default_block_size(config, ranks, 2)
    pages = 24 * tokens * 704 * 2
    state = (96 // ranks) * (128 * 128 * 4 + 3 * 3 * 128 * 2)
    block = max(pages, state)
    assert pages >= 0.9 * block and block // state * state >= 0.9 * block
    assert tokens <= 224


def test_a_broken_config_says_what_is_wrong_with_it(tmp_path) -> None:
    config = published_config("k3.1", num_hidden_layers=4)  # the lists of layers speak of five
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(Exception, match="layers"):
        EngineArgs(str(tmp_path), skip_tokenizer_init=True).create_engine_config()
