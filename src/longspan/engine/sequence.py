"""One choice of a request while it is being served."""

from __future__ import annotations

import random
import time
from functools import cached_property

import torch
from torch import Tensor

from longspan.engine.output import Started, TokenLogprobs
from longspan.engine.request import Request
from longspan.engine.token_history import TokenHistory
from longspan.memory.memory import SequenceMemory
from longspan.structure import Vocabulary

BAN = -100
"""A logit_bias of this bans a token, whatever its logit and the temperature."""


class Sequence:
    """Prompt and output of choice `index`, its memory while it has some, its own stream of random numbers.

    A random number is a function of `stream` and of how many tokens came before it, so batch mates and
    preemption can't change it.
    """

    def __init__(self, request: Request, index: int, seed: int, vocabulary: Vocabulary | None = None) -> None:
        """`vocabulary` None: of a model without a tokenizer."""
        self.request = request
        self.params = request.params
        self.index = index
        self.tokens = list(request.prompt_token_ids)
        self.num_prompt_tokens = len(self.tokens)
        self.memory: SequenceMemory | None = None
        self.constraint = request.structure.start(vocabulary) if request.structure and vocabulary else None
        self.stream = random.Random(f"{seed}:{index}").getrandbits(64)
        self.history = TokenHistory(self.tokens) if self.params.penalises else None
        self.arrived = time.monotonic()
        self.scheduled: float | None = None
        self._has_started = False
        wants_prompt = self.params.prompt_logprobs is not None and index == 0
        # The first token has nothing before it that could predict it.
        self.prompt_logprobs: list[TokenLogprobs | None] | None = [None] if wants_prompt else None

    @property
    def num_computed(self) -> int:
        """Tokens that are in memory."""
        return self.memory.num_tokens if self.memory else 0

    @property
    def num_uncomputed(self) -> int:
        """Tokens that the model has yet to see; 1 while decoding."""
        return len(self.tokens) - self.num_computed

    @property
    def num_output_tokens(self) -> int:
        return len(self.tokens) - self.num_prompt_tokens

    @cached_property
    def logit_bias(self) -> tuple[Tensor, Tensor]:
        """Tokens [N] int64 and what is added to their logits [N] float32, -inf for a ban."""
        given = self.params.logit_bias or {}
        bias = torch.tensor(list(given.values()), dtype=torch.float32)
        return torch.tensor(list(given), dtype=torch.int64), torch.where(bias <= BAN, -torch.inf, bias)

    @property
    def num_missing_prompt_logprobs(self) -> int:
        if self.prompt_logprobs is None:
            return 0
        return self.num_prompt_tokens - len(self.prompt_logprobs)

    def append(self, token_id: int) -> None:
        self.tokens.append(token_id)
        if self.history:
            self.history.append(token_id)
        if self.constraint:
            self.constraint.accept(token_id)

    def take_started(self) -> Started | None:
        """Once, with the first output."""
        if self._has_started:
            return None
        self._has_started = True
        return Started(self.scheduled, prompt_logprobs=self.prompt_logprobs)
