"""vision_config."""

from __future__ import annotations

from typing import Any

from longspan.config.fields import Fields, agreed
from longspan.config.model import VisionConfig

_MAX_LAYERS = 10_000  # nothing else in the config says how many there are, and each has tensors of its own


def parse_vision(values: dict[str, Any], text_hidden_size: int) -> VisionConfig:
    """vision_config of a published config.json. Raises ConfigError."""
    return read_vision(Fields(values, "vision_config"), text_hidden_size)


def read_vision(fields: Fields, hidden_size: int) -> VisionConfig:
    for name, legal in (
        ("pos_emb_type", "divided_fixed"),
        ("pos_emb_interpolation_mode", "bilinear"),
        ("norm_type", "rmsnorm"),
        ("mlp_type", "mlp2"),
        ("activation_func", "gelu_pytorch_tanh"),
        ("merge_type", "sd2_tpool"),
        ("video_attn_type", "spatial_temporal"),
        ("mm_projector_type", "patchmergerv2"),
        ("projector_hidden_act", "gelu"),
    ):
        fields.one_of(name, (legal,), default=legal)
    for name in ("attn_bias", "linear_bias", "patch_embed_proj_bias"):
        fields.one_of(name, (False,), default=False)
    fields.take("model_type", "architectures", default=None)
    merge = fields.integers("merge_kernel_size")
    if len(merge) != 2 or merge[0] != merge[1] or merge[0] < 1:
        raise fields.refuse(("merge_kernel_size",), list(merge), "two equal numbers of at least 1")
    tower = fields.integer("vt_hidden_size")
    heads = fields.integer("vt_num_attention_heads")
    qkv = fields.integer("qkv_hidden_size")
    if qkv % heads:
        raise fields.refuse(("qkv_hidden_size",), qkv, f"a multiple of vt_num_attention_heads = {heads}")
    text_size = fields.integer("text_hidden_size", default=hidden_size)
    agreed([(fields.path("text_hidden_size"), text_size), ("text_config.hidden_size", hidden_size)])
    projector = fields.integer("mm_hidden_size", default=tower)
    if projector != tower:
        raise fields.refuse(("mm_hidden_size",), projector, f"null or vt_hidden_size = {tower}")
    config = VisionConfig(
        patch_size=fields.integer("patch_size"),
        hidden_size=tower,
        num_layers=fields.integer("vt_num_hidden_layers", maximum=_MAX_LAYERS),
        num_heads=heads,
        qkv_hidden_size=qkv,
        intermediate_size=fields.integer("vt_intermediate_size"),
        pos_emb_height=fields.integer("init_pos_emb_height"),
        pos_emb_width=fields.integer("init_pos_emb_width"),
        pos_emb_time=fields.integer("init_pos_emb_time"),
        merge_size=merge[0],
        projector_hidden_size=projector,
        text_hidden_size=text_size,
        projector_norm_eps=fields.number("projector_ln_eps", above=0),
    )
    fields.finish()
    return config
