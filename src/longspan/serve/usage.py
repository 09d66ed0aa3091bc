"""Counting tokens, the same for streamed and whole answers of every protocol."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Any

from longspan.engine.output import StepOutput
from longspan.engine.request import Request


class Usage:
    """Prompt tokens are counted once, however many choices read them; a reply's tokens include its markup.

    `cached_tokens` are those of the prompt tokens that choice 0 of each request took from the prefix cache.
    """

    def __init__(self, requests: Sequence[Request], reasoning_ends_at: Container[int] | None = None) -> None:
        """`reasoning_ends_at`: ids that end the reasoning a reply starts with; None: it starts with none."""
        self.prompt_tokens = sum(len(request.prompt_token_ids) for request in requests)
        self.cached_tokens = 0
        self.completion_tokens = 0
        self.reasoning_tokens = 0
        self._ends = reasoning_ends_at
        self._answering: set[int] = set()  # choices whose reasoning is over

    def add(self, step: StepOutput) -> None:
        self.completion_tokens += len(step.token_ids)
        if step.index == 0:
            self.cached_tokens += step.cached_tokens
        if self._ends is None or step.index in self._answering:
            return
        for token in step.token_ids:
            if token in self._ends:
                self._answering.add(step.index)
                return
            self.reasoning_tokens += 1

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens

    def as_json(self) -> dict[str, Any]:
        """The `usage` of chats and completions."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.total_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
        }
