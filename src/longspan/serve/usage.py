"""Counting tokens for the `usage` object, the same for streamed and whole answers."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

from longspan.engine.output import StepOutput


class Usage:
    """Prompt tokens are counted once, however many choices read them; a reply's tokens include its markup."""

    def __init__(self, prompt_tokens: int, reasoning_ends_at: Container[int] | None = None) -> None:
        """`reasoning_ends_at`: ids that end the reasoning a reply starts with; None: it starts with none."""
        self._prompt_tokens = prompt_tokens
        self._completion_tokens = 0
        self._reasoning_tokens = 0
        self._ends = reasoning_ends_at
        self._answering: set[int] = set()  # choices whose reasoning is over

    def add(self, step: StepOutput) -> None:
        self._completion_tokens += len(step.token_ids)
        if self._ends is None or step.index in self._answering:
            return
        for token in step.token_ids:
            if token in self._ends:
                self._answering.add(step.index)
                return
            self._reasoning_tokens += 1

    def as_json(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": self._completion_tokens,
            "total_tokens": self._prompt_tokens + self._completion_tokens,
            "prompt_tokens_details": {"cached_tokens": 0},  # there is no prefix cache
            "completion_tokens_details": {"reasoning_tokens": self._reasoning_tokens},
        }
