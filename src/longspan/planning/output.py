"""The directory of `--output`: a folder for each engine, with its scripts and the plan they were made from.

What an earlier plan wrote is replaced, for scripts of two plans side by side would start two clusters. It is
known by its plan.json and by the names of our files. Others stay; where they are in the way, nothing is done.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from longspan.errors import ConfigError
from longspan.planning.hardware import ENGINES
from longspan.planning.plan_file import PLAN_FILE
from longspan.planning.recipe import Recipe

_NAMES = re.compile(r"(server|prefill|decode)-\d+\.sh|router(-smg|-vllm)?\.sh|workers\.json")


def write_scripts(directory: Path, recipes: Mapping[str, tuple[Recipe, dict[str, Any]]]) -> list[Path]:
    """The folders, of {engine: scripts and plan}. Raises ConfigError for others' files or missing rights."""
    folders = {engine: directory / engine for engine in ENGINES}
    earlier = {engine: _is_plan(folder, engine) for engine, folder in folders.items()}
    for engine in recipes:
        others = [] if earlier[engine] else [file.name for file in _files(folders[engine])]
        if others:
            shown = ", ".join(others[:3]) + ", ..." * (len(others) > 3)
            raise ConfigError(
                f"{folders[engine]} has {shown}, which no earlier plan wrote.",
                remedy="Choose another --output, or move them away.",
            )
    try:
        for engine in recipes:
            folders[engine].mkdir(parents=True, exist_ok=True)
        for engine in ENGINES:
            if earlier[engine]:
                _remove(folders[engine], keep=engine in recipes)
        for engine, (recipe, plan) in recipes.items():
            (folders[engine] / PLAN_FILE).write_text(json.dumps(plan, indent=2) + "\n")
            recipe.write(folders[engine])
    except OSError as error:
        raise ConfigError(
            f"--output {directory} can't be written: {error.strerror} ({error.filename}).",
            remedy="Choose another directory.",
        ) from None
    return [folders[engine] for engine in recipes]


def _files(folder: Path) -> list[Path]:
    """Those that a plan writes, or somebody else by the same names."""
    if not folder.is_dir():
        return []
    return sorted(file for file in folder.iterdir() if file.name == PLAN_FILE or _NAMES.fullmatch(file.name))


def _is_plan(folder: Path, engine: str) -> bool:
    """Whether an earlier plan wrote here."""
    try:
        plan = json.loads((folder / PLAN_FILE).read_bytes())
    except (OSError, ValueError):
        return False
    return isinstance(plan, dict) and plan.get("engine") == engine and "urls" in plan


def _remove(folder: Path, keep: bool) -> None:
    """plan.json goes last, so that what is left of an interrupted removal is known as ours."""
    for file in sorted(_files(folder), key=lambda file: file.name == PLAN_FILE):
        file.unlink()
    if not keep and not any(folder.iterdir()):
        folder.rmdir()
