"""One choice of a request while it is being served."""

from __future__ import annotations

import random
import time

from longspan.engine.output import TokenLogprobs
from longspan.engine.request import Request
from longspan.memory.memory import SequenceMemory


class Sequence:
    """Prompt and output of choice `index`, its memory while it has some, its own stream of random numbers.

    A random number is a function of `stream` and of how many tokens came before it, so batch mates and
    preemption can't change it.
    """

    def __init__(self, request: Request, index: int, seed: int) -> None:
        self.request = request
        self.params = request.params
        self.index = index
        self.tokens = list(request.prompt_token_ids)
        self.num_prompt_tokens = len(self.tokens)
        self.memory: SequenceMemory | None = None
        self.reader = request.make_reader()
        self.constraint = request.make_constraint() if request.make_constraint else None
        self.stream = random.Random(f"{seed}:{index}").getrandbits(64)
        # Token -> times in the output, 0 for those of the prompt alone.
        self.token_counts = dict.fromkeys(self.tokens, 0) if self.params.penalises else None
        self.arrived = time.monotonic()
        self.scheduled: float | None = None
        self.first_token: float | None = None
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

    @property
    def num_missing_prompt_logprobs(self) -> int:
        if self.prompt_logprobs is None:
            return 0
        return self.num_prompt_tokens - len(self.prompt_logprobs)

    def append(self, token_id: int) -> None:
        if self.first_token is None:
            self.first_token = time.monotonic()
        self.tokens.append(token_id)
        if self.token_counts is not None:
            self.token_counts[token_id] = self.token_counts.get(token_id, 0) + 1
        if self.constraint:
            self.constraint.push(token_id)
