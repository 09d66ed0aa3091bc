"""One choice of a request while it is being served."""

from __future__ import annotations

import random
import time

from longspan.engine.output import Finish, FinishReason, Times, TokenLogprobs
from longspan.engine.request import Request
from longspan.errors import LongspanError
from longspan.memory.memory import SequenceMemory


class Sequence:
    """Prompt and output of choice `index`, its memory while it has some, and its own random numbers.

    Random numbers depend on the seed and on how many tokens were drawn, on nothing else, so batch mates and
    preemption can't change them.
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
        self.random = random.Random(f"{seed}:{index}")
        self.output_counts: dict[int, int] = {}
        self.finish: Finish | None = None
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
        self.output_counts[token_id] = self.output_counts.get(token_id, 0) + 1
        if self.constraint:
            self.constraint.push(token_id)

    def end(
        self,
        reason: FinishReason,
        stop_reason: int | str | None = None,
        error: LongspanError | None = None,
    ) -> Finish:
        times = Times(self.arrived, self.scheduled, self.first_token, time.monotonic())
        self.finish = Finish(reason, times, stop_reason, error)
        return self.finish
