"""quantization_config: compressed-tensors, of which only MXFP4 weights are legal."""

from __future__ import annotations

from longspan.config.fields import Fields

MX_GROUP = 32  # consecutive weights that share one scale


def read_experts_packed(top: Fields, text: Fields) -> bool:
    """Whether quantization_config, here or in text_config, announces MXFP4 experts.

    Its list of what to ignore is not read: the names in the file decide per tensor.
    """
    inner = text.section("quantization_config", default=None)
    outer = top.section("quantization_config", default=None) if top is not text else None
    for section in (inner, outer):
        if section:
            _check_quantization(section)
    return inner is not None or outer is not None


def _check_quantization(fields: Fields) -> None:
    fields.one_of("quant_method", ("compressed-tensors",))
    fields.one_of("format", ("mxfp4-pack-quantized",))
    fields.one_of("quantization_status", ("compressed",), default=None)
    for absent in ("kv_cache_scheme", "sparsity_config", "transform_config"):
        if fields.take(absent, default=None):
            raise fields.refuse((absent,), fields.take(absent), "null")
    for known in ("ignore", "global_compression_ratio", "version"):
        fields.take(known, default=None)
    groups = fields.section("config_groups")
    for name in groups.names:
        group = groups.section(name)
        group.one_of("format", ("mxfp4-pack-quantized",), default=None)
        group.take("targets", default=None)
        for activations in ("input_activations", "output_activations"):
            if group.take(activations, default=None) is not None:
                raise group.refuse((activations,), group.take(activations), "null (weights only)")
        weights = group.section("weights", harmless=("observer", "observer_kwargs"))
        weights.one_of("num_bits", (4,))
        weights.one_of("type", ("float",))
        weights.one_of("strategy", ("group",))
        weights.one_of("group_size", (MX_GROUP,))
        weights.one_of("symmetric", (True,), default=True)
        weights.one_of("dynamic", (False,), default=False)
        weights.one_of("scale_dtype", ("torch.uint8", "uint8"), default=None)
        weights.finish()
        group.finish()
    groups.finish()
    fields.finish()
