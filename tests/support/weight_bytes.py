"""The tensors of a model's weights, to add up their bytes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor

from longspan.model.weights import LazyExperts


def weight_tensors(value: Any, experts: slice) -> Iterator[Tensor]:
    """Every tensor that hangs on it; of a layer's routed experts these."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, LazyExperts):
        for number in range(len(value))[experts]:
            yield from weight_tensors(value[number], experts)
    elif isinstance(value, tuple):
        for part in value:
            yield from weight_tensors(part, experts)
    elif is_dataclass(value):
        for field in fields(value):
            yield from weight_tensors(getattr(value, field.name), experts)
