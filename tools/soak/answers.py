"""Answers of all routes in one form, without what differs from run to run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Choice:
    """One choice. Tool calls are [name, arguments]; log-probabilities as they came."""

    text: str = ""
    reasoning: str = ""
    calls: list[list[str]] = field(default_factory=list)
    logprobs: dict[str, list[Any]] = field(default_factory=dict)
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def add_logprobs(self, given: dict[str, Any] | None) -> None:
        for name, items in (given or {}).items():
            if items is not None:
                self.logprobs.setdefault(name, []).extend(items)

    def message(self) -> dict[str, Any]:
        """What a client sends back in its next turn."""
        message: dict[str, Any] = {"role": "assistant", "content": self.text or None}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.calls:
            message["tool_calls"] = [
                {"id": f"call_{i}", "type": "function", "function": {"name": name, "arguments": arguments}}
                for i, (name, arguments) in enumerate(self.calls)
            ]
        return message


@dataclass
class Answer:
    """A finished answer; `cached` tokens depend on who asked before, so they are not compared."""

    choices: dict[int, Choice] = field(default_factory=dict)
    usage: tuple[int, int, int] = (0, 0, 0)  # of prompt, completion, reasoning
    total: int = field(default=0, compare=False)
    cached: int = field(default=0, compare=False)

    def choice(self, index: int) -> Choice:
        return self.choices.setdefault(index, Choice())

    def set_usage(self, prompt: int, completion: int, reasoning: int, total: int, cached: int) -> None:
        self.usage = prompt, completion, reasoning
        self.total, self.cached = total, cached

    def problem(self) -> str | None:
        """What can't be right whatever was asked."""
        prompt, completion, reasoning = self.usage
        if self.total != prompt + completion:
            return f"usage does not add up: {self.usage} and {self.total} in all"
        if not 0 <= self.cached <= prompt or not 0 <= reasoning <= completion:
            return f"usage is impossible: {self.usage} with {self.cached} cached"
        unfinished = [index for index, choice in self.choices.items() if not choice.finish_reason]
        return f"choices {unfinished} have no finish_reason" if unfinished else None


@dataclass(frozen=True)
class Failure:
    """No answer: the status, or that of the error event that ended a stream (0: it ended without a word)."""

    status: int
    message: str
