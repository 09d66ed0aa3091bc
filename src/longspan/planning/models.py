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


def name_and_directory(model: str) -> tuple[str, str]:
    """What plans call this model, and the directory that servers are started with; "" if it is none.

    Raises ConfigError for a directory whose name would not stay on one line of a script.
    """
    if model in PUBLISHED:
        return model, ""
    path = Path(model)
    if path.is_file() and path.name != "config.json":
        name, directory = path.stem, ""
    else:
        # Only then resolved: the file itself may be a link to elsewhere, as in Hugging Face's cache.
        folder = (path.parent if path.is_file() else path).resolve()
        name, directory = folder.name, str(folder)
    if not f"{name}{directory}".isprintable():
        raise ConfigError(
            f"{directory or name!r} has control characters, which no script can hold.", remedy="Rename it."
        )
    return name, directory
