"""Published configs that can be planned for by name, without a checkpoint."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path

from longspan.config import ModelConfig, load_config, parse_config
from longspan.errors import ConfigError

DEFAULT_MODEL = "kimi-k3.1-pro"
PUBLISHED = (DEFAULT_MODEL, "kimi-k3", "kimi-linear")


def load_model_config(model: str) -> ModelConfig:
    """A published name, a checkpoint directory or a config.json. Raises ConfigError."""
    if model in PUBLISHED:
        file = files("longspan.planning").joinpath("configs", f"{model}.json")
        return parse_config(json.loads(file.read_text()))
    if not Path(model).exists():
        raise ConfigError(
            f"{model} is no published model and does not exist.",
            remedy=f"Give {', '.join(PUBLISHED)}, a checkpoint directory or its config.json.",
        )
    return load_config(model)
