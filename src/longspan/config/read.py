"""Which fields a published config.json has, what each may say, and what it becomes."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from longspan.config.fields import Fields, agreed, shown
from longspan.config.model import Family, ModelConfig
from longspan.config.quantization import MX_GROUP, read_experts_packed
from longspan.config.text import (
    read_activation,
    read_indexer,
    read_kda,
    read_mla,
    read_moe,
    read_moe_layers,
    require_what_k3_states,
)
from longspan.config.vision import read_vision
from longspan.errors import ConfigError

FAMILIES: dict[str, Family] = {
    "KimiLinearForCausalLM": "kimi-linear",
    "KimiK3ForConditionalGeneration": "k3",
    "KimiK31ForConditionalGeneration": "k3.1",
}
LATENT_NORM_EPS = 1e-6  # of q_a_layernorm and kv_a_layernorm; no published config states it


def load_config(path: str | os.PathLike[str], *, latent_norm_eps: float = LATENT_NORM_EPS) -> ModelConfig:
    """Read config.json, given itself or its directory. Raises ConfigError.

    generation_config.json and tokenizer_config.json beside it are read for the ids of special tokens.
    """
    path = Path(path)
    if path.is_file() and path.suffix != ".json":
        raise ConfigError(
            f"{path} is not a config.json.", remedy="Give the checkpoint's directory or its config.json."
        )
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise ConfigError(f"{file} does not exist.", remedy="Give a checkpoint directory or its config.json.")
    beside = [file.with_name(name) for name in ("generation_config.json", "tokenizer_config.json")]
    generation, tokenizer = (_read_json(f) if f.is_file() else {} for f in beside)
    return parse_config(
        _read_json(file), generation=generation, tokenizer=tokenizer, latent_norm_eps=latent_norm_eps
    )


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_bytes(), object_pairs_hook=_without_contradictions)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file} is not JSON: {error}.", remedy="Download or copy it again.") from None
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}.") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{file} holds {shown(content)}; a JSON object was expected.")
    return content


def _without_contradictions(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    for name, value in pairs:
        if content[name] != value:
            agreed([(name, value), (f"{name}, given again,", content[name])])
    return content


def parse_config(
    values: dict[str, Any],
    *,
    generation: dict[str, Any] | None = None,
    tokenizer: dict[str, Any] | None = None,
    latent_norm_eps: float = LATENT_NORM_EPS,
) -> ModelConfig:
    """The content of config.json, and of generation_config.json and tokenizer_config.json, to a ModelConfig.

    Raises ConfigError by the policy of `longspan.config`.
    """
    top = Fields(values)
    family = _family(top)
    if family == "kimi-linear":
        text = top
    else:
        # Released files have text_config's model_type "kimi_linear", whatever the family.
        text = top.section("text_config")
        text.one_of("architectures", (["KimiLinearForCausalLM"],), default=None)
        text.one_of("model_type", ("kimi_linear",), default=None)
        require_what_k3_states(text)
    top.stated("model_type")  # architectures decides

    hidden_size = text.integer("hidden_size")
    num_layers = text.integer("num_hidden_layers")
    rms_norm_eps = text.number("rms_norm_eps", above=0)
    kda, full_layers = read_kda(text.section("linear_attn_config"), num_layers)
    vocab_size = text.integer("vocab_size")
    vision = top.section("vision_config", default=None) if text is not top else None
    text.one_of("num_nextn_predict_layers", (0,), default=0)
    config = ModelConfig(
        family=family,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=text.integer("intermediate_size"),
        num_layers=num_layers,
        max_position=text.integer("max_position_embeddings", "model_max_length"),
        rms_norm_eps=rms_norm_eps,
        tie_word_embeddings=_tied(top, text),
        activation=read_activation(text),
        full_attention_layers=tuple(n - 1 for n in full_layers),
        moe_layers=read_moe_layers(text, num_layers),
        attn_res_block_size=text.integer("attn_res_block_size", default=None),
        kda=kda,
        mla=read_mla(text, latent_norm_eps),
        indexer=read_indexer(family, text, full_layers, rms_norm_eps),
        moe=read_moe(text),
        vision=read_vision(vision, hidden_size) if vision else None,
        media_placeholder_token_id=top.integer("media_placeholder_token_id", minimum=0, default=None),
        experts_packed=read_experts_packed(top, text),
        **_special_tokens(top, text, Fields(generation or {}, "generation_config.json"), tokenizer or {}),
    )
    _check_token_ids(config)
    if config.experts_packed:
        _check_groups(config, text)
    text.finish()
    top.finish()
    return config


def _family(top: Fields) -> Family:
    architectures = top.take("architectures", legal=" or ".join(FAMILIES))
    is_one = isinstance(architectures, list) and len(architectures) == 1
    if not is_one or not isinstance(architectures[0], str) or architectures[0] not in FAMILIES:
        raise ConfigError(
            f"architectures is {shown(architectures)}; legal is one of {', '.join(FAMILIES)}, in a list.",
            remedy="Longspan runs the Kimi K3 family only.",
        )
    return FAMILIES[architectures[0]]


def _tied(top: Fields, text: Fields) -> bool:
    stated = text.stated("tie_word_embeddings") + top.stated("tie_word_embeddings")
    agreed(stated)
    return text.flag("tie_word_embeddings", default=False) or top.flag("tie_word_embeddings", default=False)


def _special_tokens(
    top: Fields, text: Fields, generation: Fields, tokenizer: dict[str, Any]
) -> dict[str, Any]:
    """Every id that text_config, config.json or generation_config.json calls eos ends generation.

    The tokenizer's eos ends a document, not a turn, so it counts only where no other is given.
    """
    sources = (text, top, generation) if text is not top else (text, generation)
    stops: list[int] = []
    for source in sources:
        value = source.take("eos_token_id", default=None)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(type(i) is int for i in ids):
            raise source.refuse(("eos_token_id",), value, "a whole number or a list of them")
        stops += [i for i in ids if i not in stops]

    def first(kind: str) -> int | None:
        values = (source.integer(f"{kind}_token_id", minimum=0, default=None) for source in sources)
        stated = [v for v in values if v is not None]
        return stated[0] if stated else _tokenizer_id(tokenizer, kind)

    if not stops:
        fallback = _tokenizer_id(tokenizer, "eos")
        if fallback is None:
            raise ConfigError(
                f"{text.path('eos_token_id')} is missing, from generation_config.json and the tokenizer too; "
                "without it no reply would end."
            )
        stops = [fallback]
    return {"bos_token_id": first("bos"), "eos_token_ids": tuple(stops), "pad_token_id": first("pad")}


def _tokenizer_id(tokenizer: dict[str, Any], kind: str) -> int | None:
    """The id of tokenizer_config.json's bos, eos or pad token, by its text."""
    wanted = tokenizer.get(f"{kind}_token")
    wanted = wanted.get("content") if isinstance(wanted, dict) else wanted
    added = tokenizer.get("added_tokens_decoder")
    if wanted is None or not isinstance(added, dict):
        return None
    ids = (i for i, token in added.items() if isinstance(token, dict) and token.get("content") == wanted)
    return next((int(i) for i in ids if i.isdigit()), None)


def _check_groups(config: ModelConfig, text: Fields) -> None:
    """Both widths of a packed expert must be whole groups of 32."""
    width_name = "hidden_size" if config.moe.latent_size is None else "routed_expert_hidden_size"
    widths = {
        width_name: config.moe.latent_size or config.hidden_size,
        "moe_intermediate_size": config.moe.intermediate_size,
    }
    for name, width in widths.items():
        if width % MX_GROUP:
            legal = f"a multiple of {MX_GROUP} (such as {-(-width // MX_GROUP) * MX_GROUP}) for MXFP4 experts"
            raise text.refuse((name,), width, legal)


def _check_token_ids(config: ModelConfig) -> None:
    ids = {
        "bos_token_id": config.bos_token_id,
        "pad_token_id": config.pad_token_id,
        "media_placeholder_token_id": config.media_placeholder_token_id,
        **{f"eos_token_id[{i}]": token for i, token in enumerate(config.eos_token_ids)},
    }
    for name, token in ids.items():
        if token is not None and not 0 <= token < config.vocab_size:
            raise ConfigError(f"{name} is {token}; legal is 0 to {config.vocab_size - 1} (vocab_size - 1).")
