"""One choice of a request while it is being served."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence as Items
from functools import cached_property

import torch
from torch import Tensor

from longspan.engine.output import Started, TokenLogprobs
from longspan.engine.request import Request
from longspan.engine.token_history import TokenHistory
from longspan.memory.memory import SequenceMemory
from longspan.memory.prefix_cache import Checkpoint, page_digests
from longspan.memory.swap import Swapped
from longspan.structure import Vocabulary

BAN = -100
"""A logit_bias of this bans a token, whatever its logit and the temperature."""


class Sequence:
    """Prompt and output of choice `index`, its memory while it has some, its own stream of random numbers.

    A random number is a function of `stream` and of how many tokens came before it, so batch mates and
    preemption can't change it. `num_in_flight` of its next tokens are being chosen by steps that are
    planned or running, so that `tokens` has them not yet.
    """

    def __init__(
        self, request: Request, index: int, seed: int, order: int = 0, vocabulary: Vocabulary | None = None
    ) -> None:
        """`vocabulary` None: of a model without a tokenizer."""
        self.request = request
        self.params = request.params
        self.index = index
        self.key = (request.priority, order)  # lower goes first
        self.tokens = list(request.prompt_token_ids)
        self.num_prompt_tokens = len(self.tokens)
        self.num_in_flight = 0
        self.ended = False
        self.constraint = request.structure.start(vocabulary) if request.structure and vocabulary else None
        self.stream = random.Random(f"{seed}:{index}").getrandbits(64)
        self.history = TokenHistory(self.tokens) if self.params.penalises else None
        self.arrived = time.monotonic()
        self.deadline = None if request.timeout is None else self.arrived + request.timeout
        self.scheduled: float | None = None
        self._has_started = False
        wants_prompt = self.params.prompt_logprobs is not None and index == 0
        # The first token has nothing before it that could predict it.
        self.prompt_logprobs: list[TokenLogprobs | None] | None = [None] if wants_prompt else None
        self._num_planned_logprobs = 1

        self.memory: SequenceMemory | None = None
        self.swapped: Swapped | None = None  # what it had when it was preempted
        self.line = -1  # of `BatchState`, while it has memory
        self.num_cached_tokens = 0  # of the prompt, when first scheduled
        self.branch_points: set[int] = set()  # numbers of tokens after which others went another way
        self.rolling: Checkpoint | None = None  # the last one of its reply, moved on with it
        self.planned_states: set[int] = set()  # numbers of tokens whose state the steps in flight will keep
        self._digests: list[bytes] = []

    @property
    def num_computed(self) -> int:
        """Tokens that are in memory, or will be by the steps scheduled."""
        return self.memory.num_tokens if self.memory else 0

    @property
    def num_uncomputed(self) -> int:
        """Tokens that the model has yet to see, those in flight included; 1 while decoding."""
        return len(self.tokens) + self.num_in_flight - self.num_computed

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
        """How many the steps scheduled so far will not give."""
        if self.prompt_logprobs is None:
            return 0
        return self.num_prompt_tokens - self._num_planned_logprobs

    def plan_prompt_logprobs(self, start: int, num_tokens: int) -> range:
        """Rows of a step over these tokens that predict prompt tokens whose log-probabilities are wanted.

        The row of position p predicts token p + 1; those computed again have theirs already.
        """
        if self.prompt_logprobs is None:
            return range(0)
        first = max(self._num_planned_logprobs - 1 - start, 0)
        rows = range(first, max(first, min(self.num_prompt_tokens - 1 - start, num_tokens)))
        self._num_planned_logprobs += len(rows)
        return rows

    def digests(self, num_tokens: int, page_size: int) -> Items[bytes]:
        """Names of the pages of its first `num_tokens` tokens, for the prefix cache."""
        count = num_tokens // page_size
        if count > len(self._digests):
            salt = self.request.cache_salt.encode(errors="surrogatepass")
            page_digests(self.tokens[: count * page_size], page_size, salt, self._digests)
        return self._digests[:count]

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
        return Started(self.scheduled, self.num_cached_tokens, self.prompt_logprobs)
