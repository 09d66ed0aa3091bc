"""Longspan: an inference engine for Kimi-Linear, Kimi K3 and Kimi K3.1 Pro."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from longspan import chat as chat
    from longspan.engine.llm import LLM as LLM
    from longspan.engine.request import SamplingParams as SamplingParams
    from longspan.model.loader import load_model as load_model
    from longspan.structure import StructuredOutputs as StructuredOutputs

__version__ = "0.1.0"
__all__ = ["LLM", "SamplingParams", "StructuredOutputs", "chat", "load_model"]

_HOMES = {
    "LLM": "longspan.engine.llm",
    "SamplingParams": "longspan.engine.request",
    "StructuredOutputs": "longspan.structure",
    "load_model": "longspan.model.loader",
}


def __getattr__(name: str) -> Any:
    # Resolved on first use, so that `longspan inspect` does not wait for torch.
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    if name == "chat":
        return import_module("longspan.chat")
    raise AttributeError(f"module 'longspan' has no attribute {name!r}")
