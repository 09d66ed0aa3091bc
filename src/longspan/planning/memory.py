"""What one rank of a split holds, in bytes, from the config alone.

Weights are counted tensor by tensor over the inventory of the checkpoint, each with the part of it that a
rank keeps (`_share`). Caches: a page of P tokens holds latent and index key of P tokens of the rank's own,
so a sequence of n tokens takes ceil(n / (P D)) pages of every rank of a DCP group of D; its KDA state is
dealt by heads, 1/T a rank, whatever D.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field, replace
from functools import cache
from math import ceil, prod

from longspan.config import ModelConfig
from longspan.formats import inventory
from longspan.formats.inventory import TensorSpec, common_specs, expert_specs
from longspan.memory.sizes import bytes_per_sequence, bytes_per_token
from longspan.planning.schemes import Scheme, published_scheme
from longspan.planning.split import Split

# What a plan calls the parts of the inventory, in the order of its tables.
PARTS = {
    "attention": (inventory.KDA, inventory.MLA, inventory.INDEXER),
    "routed experts": (inventory.ROUTED,),
    "shared experts": (inventory.SHARED,),
    "dense layers": (inventory.DENSE,),
    "router and latent": (inventory.ROUTER, inventory.LATENT),
    "embedding and head": (inventory.EMBEDDING, inventory.LM_HEAD),
    "norms": (inventory.NORMS,),
    "vision": (inventory.VISION,),
}
_PART_OF = {part: name for name, parts in PARTS.items() for part in parts}
_QUANTISED = (inventory.KDA, inventory.MLA, inventory.DENSE, inventory.SHARED, inventory.LATENT)

# Which tensors of a layer lie whole on every rank, as in `longspan.parallel.sharding`: those that make
# latents, index keys and the choice of experts. All else is cut by heads, by width or by vocabulary.
_WHOLE = (
    "layernorm.weight",
    "_norm.weight",
    "_res_proj.weight",
    "model.norm.weight",
    "f_a_proj.weight",
    "g_a_proj.weight",
    "q_a_proj.weight",
    "kv_a_proj_with_mqa.weight",
    "k_norm.bias",
    "wq_b.weight",
    "wk.weight",
    "weights_proj.weight",
    "block_sparse_moe.gate.weight",
    "e_score_correction_bias",
    "routed_expert_down_proj.weight",
)
_LAYER = re.compile(r"layers\.\d+\.")
_BY_COLUMNS = ("o_proj.weight", "down_proj.weight", "routed_expert_up_proj.weight")


@dataclass(frozen=True)
class RankMemory:
    """Of one rank. Cache and state are of one token and of one sequence; multiply by how many there are."""

    weights: dict[str, int] = field(default_factory=dict)  # by the names of PARTS
    latent_per_token: float = 0.0  # of the sequence's tokens, so D ranks hold a part each
    index_per_token: float = 0.0
    recurrent_per_sequence: int = 0
    conv_per_sequence: int = 0
    page_tokens: int = 1
    page_bytes: int = 0  # of page_tokens tokens of the rank's own
    context_parallel: int = 1

    @property
    def weight_bytes(self) -> int:
        return sum(self.weights.values())

    @property
    def state_per_sequence(self) -> int:
        return self.recurrent_per_sequence + self.conv_per_sequence

    def pages_of(self, tokens: int) -> int:
        """Pages a sequence of so many tokens takes on this rank."""
        return ceil(tokens / (self.page_tokens * self.context_parallel))

    def sequence_bytes(self, tokens: int) -> int:
        """Cache and state of one sequence."""
        return self.pages_of(tokens) * self.page_bytes + self.state_per_sequence

    def tokens_in(self, size: int) -> int:
        """Of the longest sequence that takes no more bytes; 0 if not even its state fits."""
        pages = max(0, size - self.state_per_sequence) // self.page_bytes
        return pages * self.page_tokens * self.context_parallel


def memory_of(
    config: ModelConfig,
    split: Split,
    scheme: Scheme | None = None,
    *,
    element_bytes: int = 2,
    index_key_dtype: str = "auto",
    indexes_whole: bool = False,
    vision: bool = False,
    page_tokens: int = 64,
    states_in_blocks: bool = False,
) -> RankMemory:
    """Bytes of one rank, the one with most experts. `scheme` None: weights as published.

    `element_bytes` of the cache and of what is published in bfloat16; `indexes_whole`: index keys are not
    dealt over the DCP ranks; `states_in_blocks`: pages take blocks that have room for a layer's state.
    Raises CapacityError if the split is not legal.
    """
    split.check(config)
    scheme = scheme or published_scheme(config)
    token = bytes_per_token(config, element_bytes, index_key_dtype)
    sequence = bytes_per_sequence(config, element_bytes)
    own_keys = split.context if indexes_whole else 1
    page = page_tokens * (token.latent + token.index_key * own_keys)
    if states_in_blocks:
        kda_layers = config.num_layers - len(config.full_attention_layers)
        page = max(page, ceil(sequence.total / (split.tensor * kda_layers)))
    return RankMemory(
        weights=_weights(config, split, scheme, element_bytes, vision),
        latent_per_token=token.latent / split.context,
        index_per_token=token.index_key * own_keys / split.context,
        recurrent_per_sequence=sequence.recurrent // split.tensor,
        conv_per_sequence=sequence.conv // split.tensor,
        page_bytes=page,
        page_tokens=page_tokens,
        context_parallel=split.context,
    )


def local_config(config: ModelConfig, split: Split) -> ModelConfig:
    """Widths as one rank computes them; with DCP it asks for the heads of its group."""
    tensor = split.tensor
    return replace(
        config,
        vocab_size=ceil(config.vocab_size / tensor),
        intermediate_size=ceil(config.intermediate_size / tensor),
        kda=replace(config.kda, num_heads=config.kda.num_heads // tensor),
        mla=replace(config.mla, num_heads=config.mla.num_heads * split.context // tensor),
    )


def _weights(
    config: ModelConfig, split: Split, scheme: Scheme, element_bytes: int, vision: bool
) -> dict[str, int]:
    sums = dict.fromkeys(PARTS, 0.0)
    for (name, spec), count in _tensors(config).items():
        if spec.part == inventory.VISION and not vision:
            continue
        size = _bytes(spec, scheme, element_bytes) * _share(name, spec, config, split)
        sums[_PART_OF[spec.part]] += count * size
    experts = split.experts_of_rank(config.moe.num_experts) * len(config.moe_layers)
    weights = sum(spec.parameters for spec in expert_specs(config, packed=False).values())
    sums["routed experts"] += experts * weights * scheme.expert_bits / 8
    return {part: int(size) for part, size in sums.items() if size}


@cache
def _tensors(config: ModelConfig) -> Counter[tuple[str, TensorSpec]]:
    """How many there are of each kind but routed experts. Names lose their layer's number."""
    return Counter((_LAYER.sub("layers.", name), spec) for name, spec in common_specs(config))


def _bytes(spec: TensorSpec, scheme: Scheme, element_bytes: int) -> float:
    if spec.dtypes[0] != "BF16":
        return spec.nbytes if spec.dtypes[0] == "F32" else prod(spec.shape) * element_bytes
    is_matrix = len(spec.shape) == 2 and spec.part in _QUANTISED
    return prod(spec.shape) * (
        scheme.matrix_bits / 8 if is_matrix and scheme.matrix_bits < 16 else element_bytes
    )


def _share(name: str, spec: TensorSpec, config: ModelConfig, split: Split) -> float:
    """The part of a tensor that one rank keeps, of the ranks with most."""
    if name.startswith(("vision_tower", "mm_projector")) or name.endswith(_WHOLE):
        return 1.0
    mla, heads_asked = config.mla, split.context / split.tensor
    if spec.part == inventory.MLA and name.endswith(("q_b_proj.weight", "q_proj.weight")):
        return heads_asked
    if name.endswith("kv_b_proj.weight"):
        key, value = mla.qk_nope_head_dim, mla.v_head_dim
        return (key * heads_asked + value / split.tensor) / (key + value)
    if name.endswith("A_log"):  # padded, or of four dimensions
        return 1 / split.tensor
    width = spec.shape[1 if name.endswith(_BY_COLUMNS) else 0]
    return ceil(width / split.tensor) / width
