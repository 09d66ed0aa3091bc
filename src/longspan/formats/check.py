"""Holding a checkpoint against what its config asks for, by names and headers only."""

from __future__ import annotations

from dataclasses import dataclass, field

from longspan.config import ModelConfig
from longspan.errors import CheckpointError
from longspan.formats.inventory import (
    TensorSpec,
    common_specs,
    expert_prefixes,
    expert_specs,
    resolve_names,
)
from longspan.formats.safetensors import Checkpoint

_MANY = 1_000_000  # twice as many tensors as K3 has
_BUFFER_ENDINGS = ("rotary_emb.inv_freq",)  # saved by some exporters, read by nothing
_VISION_BEGINNINGS = ("vision_tower.", "mm_projector.")


@dataclass(frozen=True)
class Comparison:
    """How a checkpoint differs from its config."""

    names: dict[str, str]  # canonical -> as spelled in the file
    parts: dict[str, str]  # name in the file -> part of the model; unexpected tensors have none
    missing: list[str] = field(default_factory=list)  # canonical
    unexpected: list[str] = field(default_factory=list)  # as spelled in the file
    wrong: list[str] = field(default_factory=list)  # sentences: name, found, expected

    @property
    def clean(self) -> bool:
        return not (self.missing or self.unexpected or self.wrong)


def compare(config: ModelConfig, checkpoint: Checkpoint) -> Comparison:
    """List every difference. Raises CheckpointError where more than a million tensors are missing.

    A matrix of a routed expert may be plain or packed whatever the config announces: the file decides. Others
    that are packed show up as one tensor missing and two unexpected.
    """
    names = resolve_names(checkpoint.names)
    result = Comparison(names, {})
    left = dict(names)

    def check(name: str, spec: TensorSpec) -> None:
        in_file = left.pop(name, None)
        if in_file is None:
            result.missing.append(name)
            if len(result.missing) > _MANY:  # a damaged config may call for any number of experts
                raise CheckpointError(
                    f"{checkpoint.source} lacks more than {_MANY} tensors that its config.json calls for.",
                    remedy="Take config.json from the release that the weights came from.",
                )
            return
        result.parts[in_file] = spec.part
        info = checkpoint.info(in_file)
        shapes = tuple(dict.fromkeys((spec.shape, *spec.other_shapes)))
        if info.dtype not in spec.dtypes or info.shape not in shapes:
            result.wrong.append(
                f"{in_file} is {info.dtype} {list(info.shape)}; expected {' or '.join(spec.dtypes)} "
                f"{' or '.join(str(list(shape)) for shape in shapes)}"
            )

    for name, spec in common_specs(config):
        check(name, spec)
    packed, plain = expert_specs(config, packed=True), expert_specs(config, packed=False)
    matrices = tuple(name.removesuffix(".weight") for name in plain)
    for prefix in expert_prefixes(config):
        for matrix in matrices:
            stem = prefix + matrix
            is_packed = f"{stem}.weight_packed" in left or (
                config.experts_packed and f"{stem}.weight" not in left
            )
            for ending in (".weight_packed", ".weight_scale") if is_packed else (".weight",):
                check(stem + ending, (packed if is_packed else plain)[matrix + ending])
    result.unexpected.extend(left.values())
    return result


def require_text_model(config: ModelConfig, checkpoint: Checkpoint) -> dict[str, str]:
    """{canonical name: name in the file} of a checkpoint whose text model is complete and right.

    Raises CheckpointError otherwise, also on tensors that no part of the model would use, but for the rotary
    buffers that some exporters save. Missing vision tensors are no fault here.
    """
    found = compare(config, checkpoint)
    missing = [name for name in found.missing if not name.startswith(_VISION_BEGINNINGS)]
    unexpected = [name for name in found.unexpected if not name.endswith(_BUFFER_ENDINGS)]
    for problems, what in (
        (missing, "lacks"),
        (found.wrong, "has of the wrong shape or dtype"),
        (unexpected, "has, but its config.json does not call for,"),
    ):
        if problems:
            shown = "; ".join(problems[:3]) + ("; ..." if len(problems) > 3 else "")
            raise CheckpointError(
                f"{checkpoint.source} {what} {len(problems)} tensor{'s' * (len(problems) > 1)}: {shown}.",
                remedy="`longspan inspect` lists them all; weights and config.json must be of one release.",
            )
    return found.names
