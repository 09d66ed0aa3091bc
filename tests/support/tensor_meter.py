"""How many bytes of new tensors are alive at once, counted exactly."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class TensorMeter(TorchDispatchMode):
    """While it is entered, `peak` is the most bytes that tensors made under it have held together."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._alive = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        old = {x.untyped_storage()._cdata for x in tree_iter((args, kwargs)) if isinstance(x, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        for tensor in tree_iter(result):
            if isinstance(tensor, torch.Tensor):
                self._count(tensor.untyped_storage(), old)
        return result

    def _count(self, storage: torch.UntypedStorage, old: set[int]) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in old or key in self._known:
            return
        self._known.add(key)
        self._alive += size
        self.peak = max(self.peak, self._alive)
        weakref.finalize(storage, self._gone, key, size)

    def _gone(self, key: int, size: int) -> None:
        self._known.discard(key)
        self._alive -= size
