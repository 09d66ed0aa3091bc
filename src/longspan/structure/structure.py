"""`Structure`: what every reply to a request must obey. `Constraint`: which tokens may come next in one.

Masks are made in the engine's process. The server's, which only checks, does without torch.
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
from llguidance import LLMatcher

from longspan.chat import xtml
from longspan.errors import RequestError
from longspan.structure.vocabulary import Vocabulary, waited_for

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Structure:
    """`grammar` is llguidance's. With `thinking` it begins behind the token that closes the think channel;
    before that all ordinary tokens are free. `prefix`: tokens at the end of the prompt that it covers too.
    """

    grammar: str
    thinking: bool = False
    prefix: tuple[int, ...] = ()

    def check(self, vocabulary: Vocabulary, param: str) -> None:
        """Compiles it. Raises RequestError, naming `param`, where no reply can obey."""
        matcher = waited_for(vocabulary.compile(self.grammar)).deep_copy()
        matcher.consume_tokens(list(self.prefix))
        matcher.compute_bitmask()
        if matcher.is_error():
            raise uncompilable(param, matcher.get_error())

    def start(self, vocabulary: Vocabulary) -> Constraint:
        """For one reply. Compiles on another thread, if that was not done before."""
        return Constraint(self, vocabulary)


class Constraint:
    """Sees every token of one reply in order. When nothing more can come it allows only the end."""

    def __init__(self, structure: Structure, vocabulary: Vocabulary) -> None:
        self._compiled: Future[LLMatcher] = vocabulary.compile(structure.grammar)
        self._prefix = list(structure.prefix)
        self._matcher: LLMatcher | None = None
        self._words = (vocabulary.tokenizer.vocab_size + 31) // 32
        self._free: Tensor | None = None  # while thinking: what may come next
        if structure.thinking:
            self._close = vocabulary.tokenizer.special_id(xtml.CLOSE)
            self._free = _thinking_mask(vocabulary)

    def mask(self) -> Tensor:
        """Bits of the tokens that may come next, the lowest first: int32 [ceil(vocab / 32)].

        Raises RequestError if the grammar turned out to be too complex.
        """
        import torch

        if self._free is not None:
            return self._free
        bits = torch.empty(self._words, dtype=torch.int32)
        matcher = self._start()
        matcher.unsafe_compute_mask_ptr(bits.data_ptr(), bits.nbytes)
        _check(matcher)
        return bits

    def accept(self, token_id: int) -> None:
        """The next token. Raises RequestError if the grammar turned out to be too complex."""
        if self._free is None:
            matcher = self._start()
            matcher.consume_token(token_id)
            _check(matcher)
        elif token_id == self._close:
            self._free = None

    def _start(self) -> LLMatcher:
        if self._matcher is None:
            self._matcher = waited_for(self._compiled).deep_copy()
            self._matcher.consume_tokens(self._prefix)
        return self._matcher


def uncompilable(param: str, problem: str) -> RequestError:
    """`problem` is llguidance's: its first line says what is wrong; after a colon, one below says why."""
    first, *below = problem.strip().splitlines() or [""]
    if first.endswith(":"):
        first += next((line.removeprefix("error:") for line in below if line.startswith("error:")), "")
    why = "no text matches it" if first in ("", "NoExtensionBias") else first
    return RequestError(
        f"`{param}` can't be enforced: {why}.",
        param=param,
        remedy="Change it; docs/serving.md lists what can.",
    )


def _check(matcher: LLMatcher) -> None:
    if matcher.is_error():
        raise RequestError(
            f"The structure that was asked for failed: {matcher.get_error().strip().splitlines()[0]}.",
            remedy="Simplify the schema or grammar.",
        )


@lru_cache(maxsize=8)
def _thinking_mask(vocabulary: Vocabulary) -> Tensor:
    """All ordinary tokens, and the one that closes the channel."""
    import torch

    tokenizer = vocabulary.tokenizer
    allowed = np.zeros((tokenizer.vocab_size + 31) // 32 * 32, dtype=bool)
    allowed[: tokenizer.n_base] = True
    allowed[tokenizer.special_id(xtml.CLOSE)] = True
    return torch.from_numpy(np.packbits(allowed, bitorder="little").view(np.int32))
