"""How often each token was generated: what penalties ask of a sequence, kept as it grows."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

import torch
from torch import Tensor


class TokenHistory:
    """Tokens of a prompt, at least one, and its output, each once, in order of first appearance."""

    def __init__(self, prompt: Iterable[int]) -> None:
        self._place = {token_id: place for place, token_id in enumerate(dict.fromkeys(prompt))}
        self._tokens = array("q", self._place)
        self._counts = array("q", [0]) * len(self._place)

    def append(self, token_id: int) -> None:
        """One more token of the output."""
        place = self._place.setdefault(token_id, len(self._place))
        if place == len(self._tokens):
            self._tokens.append(token_id)
            self._counts.append(0)
        self._counts[place] += 1

    def tensors(self) -> tuple[Tensor, Tensor]:
        """Copies: tokens [N] int64 and how often each is in the output [N] int64, 0 = in the prompt only."""
        return _copied(self._tokens), _copied(self._counts)


def _copied(numbers: array[int]) -> Tensor:
    # A view would keep the array from growing.
    return torch.frombuffer(numbers, dtype=torch.int64).clone()
