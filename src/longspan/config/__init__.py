"""Published `config.json` (Kimi K3.1 Pro, K3, Kimi-Linear) -> frozen dataclasses.

A field that matters stops reading with a ConfigError naming it, what was found and what is legal, when it

- is missing, of the wrong type or out of range,
- contradicts another (two spellings of one quantity, layer lists that do not partition 1..L, ...),
- asks for maths this engine does not have, or
- is not known at all. What a field of tomorrow changes cannot be guessed, so unknown fields are errors unless
  their value is null, their name begins with "_", or they are on the list of fields known not to touch
  inference (`HARMLESS` in fields.py).

`model.py` is what comes out, `fields.py` how one JSON object is read; `read.py` begins, and the other files
read one part each.
"""

from longspan.config.model import (
    ActivationConfig,
    IndexerConfig,
    KdaConfig,
    MlaConfig,
    ModelConfig,
    MoeConfig,
    VisionConfig,
)
from longspan.config.read import load_config, parse_config
from longspan.config.vision import parse_vision

__all__ = [
    "ActivationConfig",
    "IndexerConfig",
    "KdaConfig",
    "MlaConfig",
    "ModelConfig",
    "MoeConfig",
    "VisionConfig",
    "load_config",
    "parse_config",
    "parse_vision",
]
