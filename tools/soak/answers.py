"""Answers in one form, whether they came whole or as a stream, without what differs from run to run."""

from __future__ import annotations

from collections.abc import Iterable
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

    def set_usage(self, usage: dict[str, Any]) -> None:
        details = usage.get("completion_tokens_details") or {}
        self.usage = usage["prompt_tokens"], usage["completion_tokens"], details.get("reasoning_tokens", 0)
        self.total = usage["total_tokens"]
        self.cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)

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
    """No answer: the status, or that of the error event that ended a stream (0: the connection broke)."""

    status: int
    message: str


def whole(body: dict[str, Any]) -> Answer:
    """The answer in a response of either OpenAI route."""
    answer = Answer()
    answer.set_usage(body["usage"])
    for item in body["choices"]:
        choice = answer.choice(item["index"])
        message = item.get("message", {})
        choice.text = item.get("text") or message.get("content") or ""
        choice.reasoning = message.get("reasoning_content") or ""
        calls = [call["function"] for call in message.get("tool_calls") or ()]
        choice.calls = [[call["name"], call["arguments"]] for call in calls]
        choice.add_logprobs(item["logprobs"])
        choice.finish_reason, choice.stop_reason = item["finish_reason"], item["stop_reason"]
    return answer


def streamed(events: Iterable[dict[str, Any]]) -> Answer:
    """The answer that the events of a stream add up to."""
    answer = Answer()
    for event in events:
        if event.get("usage"):
            answer.set_usage(event["usage"])
        for item in event["choices"]:
            _add(answer.choice(item["index"]), item)
    return answer


def _add(choice: Choice, item: dict[str, Any]) -> None:
    if choice.finish_reason:
        raise ValueError(f"something came after the end of choice {item['index']}: {item}")
    delta = item.get("delta", {})
    choice.text += item.get("text") or delta.get("content") or ""
    choice.reasoning += delta.get("reasoning_content") or ""
    for call in delta.get("tool_calls") or ():
        if call["index"] == len(choice.calls):
            choice.calls.append([call["function"]["name"], ""])
        choice.calls[call["index"]][1] += call["function"]["arguments"]
    choice.add_logprobs(item["logprobs"])
    choice.finish_reason, choice.stop_reason = item["finish_reason"], item.get("stop_reason")
