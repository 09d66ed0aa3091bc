"""Which tensors a checkpoint must have: names, shapes, dtypes, and which part of the model they belong to.

Canonical names are those of the published K3 files without the `language_model.` prefix. All routed experts
share their specs, so counting the 497,220 tensors of K3 takes no loop over them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from longspan.config import ModelConfig, VisionConfig
from longspan.errors import CheckpointError
from longspan.formats.safetensors import DTYPES

MX_GROUP = 32
A_LOG_PADDING = 128  # K3 pads A_log with zeros to a multiple of this

EMBEDDING = "embedding"
LM_HEAD = "lm_head"
KDA = "kda"
MLA = "mla"
INDEXER = "indexer"
DENSE = "dense"
ROUTER = "router"
LATENT = "latent"
SHARED = "shared experts"
ROUTED = "routed experts"
NORMS = "norms"
VISION = "vision"
PARTS = (EMBEDDING, LM_HEAD, KDA, MLA, INDEXER, DENSE, ROUTER, LATENT, SHARED, ROUTED, NORMS, VISION)

_BF16 = ("BF16",)
_WIDENED = ("F32", "BF16")  # published float32; bfloat16 is accepted and widened
_FLOATS = ("BF16", "F32", "F16")


@dataclass(frozen=True)
class TensorSpec:
    """One tensor. `shape` and the first of `dtypes` are as published; the others are accepted too."""

    shape: tuple[int, ...]
    part: str
    dtypes: tuple[str, ...] = _BF16
    other_shapes: tuple[tuple[int, ...], ...] = ()
    values_per_element: int = 1  # 2 in packed nibbles, 0 in scales

    @property
    def parameters(self) -> int:
        return math.prod(self.shape) * self.values_per_element

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtypes[0]][0]


Specs = dict[str, TensorSpec]


def global_specs(config: ModelConfig) -> Specs:
    """Tensors outside the layers."""
    d = config.hidden_size
    specs = {
        "model.embed_tokens.weight": TensorSpec((config.vocab_size, d), EMBEDDING),
        "model.norm.weight": TensorSpec((d,), NORMS),
    }
    if config.attn_res_block_size is not None:
        specs |= _attention_residual("model.output_attn_res", d)
    if not config.tie_word_embeddings:
        specs["lm_head.weight"] = TensorSpec((config.vocab_size, d), LM_HEAD)
    return specs


def layer_specs(config: ModelConfig, layer: int) -> Specs:
    """Tensors of one layer but its routed experts; names begin after `model.layers.N.`."""
    d = config.hidden_size
    specs = {
        "input_layernorm.weight": TensorSpec((d,), NORMS),
        "post_attention_layernorm.weight": TensorSpec((d,), NORMS),
    }
    if config.attn_res_block_size is not None:
        specs |= _attention_residual("self_attention_res", d) | _attention_residual("mlp_res", d)
    attention = _mla(config) if config.is_full_attention(layer) else _kda(config)
    specs |= {f"self_attn.{name}": spec for name, spec in attention.items()}
    if config.is_moe(layer):
        specs |= {f"block_sparse_moe.{name}": spec for name, spec in _moe(config).items()}
    else:
        specs |= _mlp("mlp", d, config.intermediate_size, DENSE)
    return specs


def expert_specs(config: ModelConfig, packed: bool) -> Specs:
    """Tensors of one routed expert; names begin after `model.layers.N.block_sparse_moe.experts.E.`."""
    width = config.moe.latent_size or config.hidden_size
    inner = config.moe.intermediate_size
    specs: Specs = {}
    for matrix, (rows, columns) in {"w1": (inner, width), "w2": (width, inner), "w3": (inner, width)}.items():
        if packed:
            specs[f"{matrix}.weight_packed"] = TensorSpec(
                (rows, columns // 2), ROUTED, ("U8",), values_per_element=2
            )
            specs[f"{matrix}.weight_scale"] = TensorSpec(
                (rows, columns // MX_GROUP), ROUTED, ("U8",), values_per_element=0
            )
        else:
            specs[f"{matrix}.weight"] = TensorSpec((rows, columns), ROUTED)
    return specs


def vision_specs(vision: VisionConfig) -> Specs:
    """Tower and projector, full names."""
    d, inner, qkv = vision.hidden_size, vision.intermediate_size, vision.qkv_hidden_size
    merged = d * vision.merge_size**2
    shapes: dict[str, tuple[int, ...]] = {
        "vision_tower.patch_embed.proj.weight": (d, 3, vision.patch_size, vision.patch_size),
        "vision_tower.patch_embed.pos_emb.weight": (vision.pos_emb_height, vision.pos_emb_width, d),
        "vision_tower.encoder.final_layernorm.weight": (d,),
        "mm_projector.proj.0.weight": (merged, merged),
        "mm_projector.proj.2.weight": (vision.text_hidden_size, merged),
        "mm_projector.post_norm.weight": (vision.text_hidden_size,),
    }
    for block in range(vision.num_layers):
        for name, shape in {
            "norm0": (d,),
            "norm1": (d,),
            "wqkv": (3 * qkv, d),
            "wo": (d, qkv),
            "mlp.fc0": (inner, d),
            "mlp.fc1": (d, inner),
        }.items():
            shapes[f"vision_tower.encoder.blocks.{block}.{name}.weight"] = shape
    return {name: TensorSpec(shape, VISION) for name, shape in shapes.items()}


def _attention_residual(prefix: str, d: int) -> Specs:
    return {
        f"{prefix}_norm.weight": TensorSpec((d,), NORMS),
        f"{prefix}_proj.weight": TensorSpec((1, d), NORMS),
    }


def _mlp(prefix: str, d: int, inner: int, part: str) -> Specs:
    return {
        f"{prefix}.gate_proj.weight": TensorSpec((inner, d), part),
        f"{prefix}.up_proj.weight": TensorSpec((inner, d), part),
        f"{prefix}.down_proj.weight": TensorSpec((d, inner), part),
    }


def _kda(config: ModelConfig) -> Specs:
    kda, d = config.kda, config.hidden_size
    heads, p = kda.num_heads, kda.num_heads * kda.head_dim
    padded = -(-heads // A_LOG_PADDING) * A_LOG_PADDING
    a_log_shapes = [(padded,), (heads,), (1, 1, heads, 1)]
    published = a_log_shapes[2 if config.family == "kimi-linear" else 0]
    specs = {f"{x}_proj.weight": TensorSpec((p, d), KDA) for x in "qkv"}
    for x in "qkv":
        specs[f"{x}_conv1d.weight"] = TensorSpec(
            (p, 1, kda.conv_kernel_size), KDA, _WIDENED, other_shapes=((p, kda.conv_kernel_size),)
        )
    if kda.full_rank_gate:
        specs["g_proj.weight"] = TensorSpec((p, d), KDA)
    else:
        specs["g_a_proj.weight"] = TensorSpec((kda.head_dim, d), KDA)
        specs["g_b_proj.weight"] = TensorSpec((p, kda.head_dim), KDA)
    return specs | {
        "f_a_proj.weight": TensorSpec((kda.head_dim, d), KDA),
        "f_b_proj.weight": TensorSpec((p, kda.head_dim), KDA),
        "b_proj.weight": TensorSpec((heads, d), KDA),
        "o_proj.weight": TensorSpec((d, p), KDA),
        "A_log": TensorSpec(published, KDA, _WIDENED, other_shapes=tuple(a_log_shapes)),
        "dt_bias": TensorSpec((p,), KDA, _WIDENED),
        "o_norm.weight": TensorSpec((kda.head_dim,), KDA, _WIDENED),
    }


def _mla(config: ModelConfig) -> Specs:
    mla, d = config.mla, config.hidden_size
    query = mla.num_heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim)
    value = mla.num_heads * mla.v_head_dim
    specs = {
        "kv_a_proj_with_mqa.weight": TensorSpec((mla.kv_lora_rank + mla.qk_rope_head_dim, d), MLA),
        "kv_a_layernorm.weight": TensorSpec((mla.kv_lora_rank,), MLA),
        "kv_b_proj.weight": TensorSpec((mla.num_heads * mla.qk_nope_head_dim + value, mla.kv_lora_rank), MLA),
        "o_proj.weight": TensorSpec((d, value), MLA),
    }
    if mla.q_lora_rank is None:
        specs["q_proj.weight"] = TensorSpec((query, d), MLA)
    else:
        specs["q_a_proj.weight"] = TensorSpec((mla.q_lora_rank, d), MLA)
        specs["q_a_layernorm.weight"] = TensorSpec((mla.q_lora_rank,), MLA)
        specs["q_b_proj.weight"] = TensorSpec((query, mla.q_lora_rank), MLA)
    if mla.output_gate:
        specs["g_proj.weight"] = TensorSpec((value, d), MLA)
    if config.indexer is not None:
        heads, dim = config.indexer.num_heads, config.indexer.head_dim
        # The index query comes from the normalised q-latent, or from the hidden state: the columns tell.
        indexer = {
            "wq_b.weight": TensorSpec(
                (heads * dim, mla.q_lora_rank or d), INDEXER, other_shapes=((heads * dim, d),)
            ),
            "wk.weight": TensorSpec((dim, d), INDEXER),
            "weights_proj.weight": TensorSpec((heads, d), INDEXER),
            "k_norm.weight": TensorSpec((dim,), INDEXER),
            "k_norm.bias": TensorSpec((dim,), INDEXER),
        }
        specs |= {f"indexer.{name}": replace(spec, dtypes=_FLOATS) for name, spec in indexer.items()}
    return specs


def _moe(config: ModelConfig) -> Specs:
    moe, d = config.moe, config.hidden_size
    specs = {
        "gate.weight": TensorSpec((moe.num_experts, d), ROUTER),
        "gate.e_score_correction_bias": TensorSpec((moe.num_experts,), ROUTER, _WIDENED),
    }
    if moe.latent_size is not None:
        specs["routed_expert_down_proj.weight"] = TensorSpec((moe.latent_size, d), LATENT)
        specs["routed_expert_up_proj.weight"] = TensorSpec((d, moe.latent_size), LATENT)
    if moe.latent_norm and moe.latent_size is not None:
        specs["routed_expert_norm.weight"] = TensorSpec((moe.latent_size,), LATENT)
    if moe.num_shared_experts:
        inner = moe.num_shared_experts * moe.intermediate_size
        specs |= _mlp("shared_experts", d, inner, SHARED)
    return specs


def common_specs(config: ModelConfig) -> Iterator[tuple[str, TensorSpec]]:
    """(canonical name, spec) of everything but the routed experts."""
    yield from global_specs(config).items()
    for layer in range(config.num_layers):
        for name, spec in layer_specs(config, layer).items():
            yield f"model.layers.{layer}.{name}", spec
    if config.vision is not None:
        yield from vision_specs(config.vision).items()


def expert_prefixes(config: ModelConfig) -> Iterator[str]:
    for layer in config.moe_layers:
        for expert in range(config.moe.num_experts):
            yield f"model.layers.{layer}.block_sparse_moe.experts.{expert}."


def expected_tensors(config: ModelConfig) -> Specs:
    """{canonical name: spec} of all tensors, experts packed as the config announces."""
    specs = dict(common_specs(config))
    expert = expert_specs(config, config.experts_packed)
    for prefix in expert_prefixes(config):
        for name, spec in expert.items():
            specs[prefix + name] = spec
    return specs


@dataclass(frozen=True)
class PartTotal:
    """Sums over one part of the model."""

    tensors: int = 0
    parameters: int = 0
    nbytes: int = 0

    def plus(self, spec: TensorSpec, times: int = 1) -> PartTotal:
        return PartTotal(
            self.tensors + times,
            self.parameters + times * spec.parameters,
            self.nbytes + times * spec.nbytes,
        )


def totals(config: ModelConfig) -> dict[str, PartTotal]:
    """{part: its sums}, by formula, in the order of PARTS; parts the model lacks are left out."""
    sums: dict[str, PartTotal] = {}
    for _, spec in common_specs(config):
        sums[spec.part] = sums.get(spec.part, PartTotal()).plus(spec)
    experts = len(config.moe_layers) * config.moe.num_experts
    for spec in expert_specs(config, config.experts_packed).values():
        sums[ROUTED] = sums.get(ROUTED, PartTotal()).plus(spec, experts)
    return {part: sums[part] for part in PARTS if part in sums and sums[part].tensors}


def active_parameters(config: ModelConfig) -> int:
    """Parameters one token of text passes through: all but embedding table, idle experts and vision.

    A tied lm_head counts, for the token does pass through it.
    """
    sums = totals(config)
    text = sum(total.parameters for part, total in sums.items() if part not in (EMBEDDING, ROUTED, VISION))
    if config.tie_word_embeddings:
        text += sums[EMBEDDING].parameters
    if ROUTED not in sums:
        return text
    return text + sums[ROUTED].parameters * config.moe.top_k // config.moe.num_experts


def resolve_names(names: Iterable[str]) -> dict[str, str]:
    """{canonical name: name in the file}.

    Accepts `language_model.model.`, `model.` and `language_model.` before the names of the text model. Raises
    CheckpointError if two names of the file mean one tensor.
    """
    resolved: dict[str, str] = {}
    for name in names:
        canonical = name
        if name.startswith("language_model."):
            canonical = name.removeprefix("language_model.")
            if not canonical.startswith(("model.", "lm_head.")):
                canonical = "model." + canonical
        if canonical in resolved:
            raise CheckpointError(
                f"The checkpoint has {resolved[canonical]!r} and {name!r}, two spellings of one tensor.",
                remedy="Remove one of them.",
            )
        resolved[canonical] = name
    return resolved
