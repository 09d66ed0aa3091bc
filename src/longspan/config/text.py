"""The parts of text_config: attention of both kinds, indexer, feed-forward."""

from __future__ import annotations

from collections import Counter
from itertools import islice
from typing import Any

from longspan.config.fields import MAX_SIZE, Fields, agreed, shown
from longspan.config.model import ActivationConfig, Family, IndexerConfig, KdaConfig, MlaConfig, MoeConfig
from longspan.errors import ConfigError

# Spellings of the indexer's quantities, the likeliest first.
_INDEXER_HEADS = (
    "index_n_heads",
    "n_heads",
    "num_heads",
    "index_num_heads",
    "indexer_n_heads",
    "indexer_num_heads",
    "head_count",
)
_INDEXER_DIM = ("index_head_dim", "head_dim", "indexer_head_dim", "key_length")
_INDEXER_TOP_K = ("index_topk", "topk", "top_k", "index_top_k", "indexer_topk", "topk_tokens")
_INDEXER_LAYERS = ("dsa_layers", "layers", "layer_ids", "indexer_layers", "full_attn_layers")
# Absent means "without" in Kimi-Linear. K3 has all of these; without one it is another model in silence.
_STATED_BY_K3 = (
    "attn_res_block_size",
    "latent_moe_use_norm",
    "mla_use_output_gate",
    "q_lora_rank",
    "routed_expert_hidden_size",
)
_STATED_BY_K3_KDA = ("gate_lower_bound", "use_full_rank_gate")


def require_what_k3_states(text: Fields) -> None:
    """Raise ConfigError if a field is absent whose absence would mean Kimi-Linear's maths."""
    kda = text.section("linear_attn_config")
    for fields, names in ((text, _STATED_BY_K3), (kda, _STATED_BY_K3_KDA)):
        for name in names:
            if name not in fields:
                raise ConfigError(
                    f"{fields.path(name)} is missing; configs of K3 and K3.1 state it (null for none).",
                    remedy="Take config.json from the release that the weights came from.",
                )


def read_activation(text: Fields) -> ActivationConfig:
    """null or 0 for beta means 1; null for the linear beta means the up branch is not squashed."""
    kind = text.one_of("hidden_act", ("situ", "silu"))
    beta_name, linear_name = "activation_situ_beta", "activation_situ_linear_beta"
    beta = text.number(beta_name, default=None)
    linear = text.number(linear_name, above=0, default=None)
    if kind == "silu":
        return ActivationConfig("silu")
    for name in (beta_name, linear_name):
        if name not in text:
            raise ConfigError(
                f'{text.path("hidden_act")} is "situ" but {text.path(name)} is missing; '
                "legal is a number above 0, or null."
            )
    if beta is not None and beta < 0:
        raise text.refuse((beta_name,), beta, "a number of at least 0, or null")
    return ActivationConfig("situ", beta=beta or 1.0, linear_beta=linear)


def read_kda(fields: Fields, num_layers: int) -> tuple[KdaConfig, tuple[int, ...]]:
    """The config, and the ascending 1-based numbers of the full-attention layers."""
    bound = fields.number("gate_lower_bound", default=None)
    if bound is not None and not -5 <= bound < 0:
        raise fields.refuse(("gate_lower_bound",), bound, "a number from -5 to below 0, or null")
    full, kda = fields.integers("full_attn_layers"), fields.integers("kda_layers")
    _check_partition(fields, full, kda, num_layers)
    config = KdaConfig(
        num_heads=fields.integer("num_heads"),
        head_dim=fields.integer("head_dim"),
        conv_kernel_size=fields.integer("short_conv_kernel_size"),
        full_rank_gate=fields.flag("use_full_rank_gate", default=False),
        gate_lower_bound=bound,
    )
    fields.finish()
    return config, tuple(sorted(full))


def _check_partition(fields: Fields, full: tuple[int, ...], kda: tuple[int, ...], num_layers: int) -> None:
    counts = Counter(full + kda)
    absent = (n for n in range(1, num_layers + 1) if n not in counts)
    problems = {
        "missing": list(islice(absent, 10)),  # a wrong num_layers may be astronomic
        "outside": sorted(n for n in counts if not 1 <= n <= num_layers),
        "named twice": sorted(n for n, count in counts.items() if count > 1),
    }
    if any(problems.values()):
        found = "; ".join(f"{what}: {shown(numbers)}" for what, numbers in problems.items() if numbers)
        raise ConfigError(
            f"{fields.path('full_attn_layers')} and {fields.path('kda_layers')} must name each layer once, "
            f"counted from 1 to num_hidden_layers = {num_layers}; {found}."
        )


def read_mla(text: Fields, latent_norm_eps: float) -> MlaConfig:
    text.one_of("mla_use_nope", (True,))  # no rotary embedding exists here
    text.one_of("attention_bias", (False,), default=False)
    if text.take("rope_scaling", default=None):
        raise text.refuse(
            ("rope_scaling",), text.take("rope_scaling"), "null: the text model has no positions"
        )
    text.stated("head_dim")  # Kimi-Linear has one; nothing uses it
    heads = text.integer("num_attention_heads")
    kv_heads = text.integer("num_key_value_heads", default=heads)
    if kv_heads != heads:
        raise text.refuse(("num_key_value_heads",), kv_heads, f"num_attention_heads = {heads}")
    return MlaConfig(
        num_heads=heads,
        q_lora_rank=text.integer("q_lora_rank", default=None),
        kv_lora_rank=text.integer("kv_lora_rank"),
        qk_nope_head_dim=text.integer("qk_nope_head_dim"),
        qk_rope_head_dim=text.integer("qk_rope_head_dim"),
        v_head_dim=text.integer("v_head_dim"),
        output_gate=text.flag("mla_use_output_gate", default=False),
        latent_norm_eps=latent_norm_eps,
    )


def read_indexer(
    family: Family, text: Fields, full_layers: tuple[int, ...], rms_norm_eps: float
) -> IndexerConfig | None:
    """K3.1's dsa_config, whose spelling varies.

    Its fields may also stand in text_config where their name begins with index or dsa.
    """
    section = text.section("dsa_config", default=None)

    def find(spellings: tuple[str, ...]) -> Any:
        stated = section.stated(*spellings) if section else []
        stated += text.stated(*(n for n in spellings if n.startswith(("index", "dsa"))))
        agreed(stated)
        return stated[0][1] if stated else None

    heads, dim, top_k = find(_INDEXER_HEADS), find(_INDEXER_DIM), find(_INDEXER_TOP_K)
    layers = find(_INDEXER_LAYERS)
    if family != "k3.1":
        if section is not None or any(x is not None for x in (heads, dim, top_k, layers)):
            raise ConfigError(
                f"{text.path('dsa_config')} describes a sparse indexer, which only K3.1 has "
                "(architectures KimiK31ForConditionalGeneration)."
            )
        return None
    place = text.path("dsa_config")
    for what, names, value in (
        ("head count", _INDEXER_HEADS, heads),
        ("head dimension", _INDEXER_DIM, dim),
        ("top-k", _INDEXER_TOP_K, top_k),
    ):
        if type(value) is not int or not 1 <= value <= MAX_SIZE:
            state = "is missing" if value is None else f"is {shown(value)}"
            fields = shown(section.names) if section else "no dsa_config at all"
            raise ConfigError(
                f"The indexer's {what} {state} in {place}; a whole number of 1 to {MAX_SIZE} is legal, "
                f"under one of {', '.join(names)}. Found: {fields}."
            )
    if layers is not None and (
        not isinstance(layers, list)
        or any(type(layer) is not int for layer in layers)
        or sorted(layers) != sorted(full_layers)
    ):
        raise ConfigError(
            f"The layers in {place} are {shown(layers)} but linear_attn_config.full_attn_layers is "
            f"{shown(list(full_layers))}; they must be the same (both counted from 1)."
        )
    if section:
        section.finish()
    return IndexerConfig(num_heads=heads, head_dim=dim, top_k=top_k, norm_eps=rms_norm_eps)


def read_moe_layers(text: Fields, num_layers: int) -> tuple[int, ...]:
    first = text.integer("first_k_dense_replace", minimum=0)
    every = text.integer("moe_layer_freq", default=1)
    return tuple(layer for layer in range(num_layers) if layer >= first and layer % every == 0)


def read_moe(text: Fields) -> MoeConfig:
    text.one_of("moe_router_activation_func", ("sigmoid",))
    text.one_of("topk_method", ("noaux_tc",), default="noaux_tc")
    experts = text.integer("num_experts", "num_local_experts")
    top_k = text.integer("num_experts_per_token", "num_experts_per_tok")
    groups = text.integer("num_expert_group", "n_group", default=1)
    kept = text.integer("topk_group", default=1)
    grouped = text.flag("use_grouped_topk", default=True)
    latent = text.integer("routed_expert_hidden_size", default=None)
    latent_norm = text.flag("latent_moe_use_norm", default=False)
    if experts % groups:
        raise text.refuse(("num_expert_group", "n_group"), groups, f"a divisor of num_experts = {experts}")
    if kept > groups:
        raise text.refuse(("topk_group",), kept, f"at most num_expert_group = {groups}")
    if not grouped and groups > 1:
        raise text.refuse(("use_grouped_topk",), grouped, f"true, as num_expert_group is {groups}")
    if top_k > experts // groups * kept:
        legal = f"at most the {experts // groups * kept} experts it may choose from"
        raise text.refuse(("num_experts_per_token", "num_experts_per_tok"), top_k, legal)
    if latent is None and latent_norm:
        raise text.refuse(("latent_moe_use_norm",), True, "false, as routed_expert_hidden_size is absent")
    return MoeConfig(
        num_experts=experts,
        top_k=top_k,
        num_shared_experts=text.integer("num_shared_experts", "n_shared_experts", minimum=0),
        intermediate_size=text.integer("moe_intermediate_size"),
        latent_size=latent,
        latent_norm=latent_norm,
        num_groups=groups,
        top_k_groups=kept,
        renormalize=text.flag("moe_renormalize", "norm_topk_prob"),
        scaling_factor=text.number("routed_scaling_factor", above=0),
    )
