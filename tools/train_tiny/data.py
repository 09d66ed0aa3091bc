"""Training sequences: packed conversations in the XTML format, and plain English.

A conversation is rendered message by message with `longspan.chat.render` and encoded segment by segment, so
the ids are those a server would produce. Loss weight is 1 on what the assistant writes after the generation
prompt and small elsewhere.
"""

from __future__ import annotations

import random
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from longspan.chat import Tokenizer, render
from longspan.evaluation import skills, tool_skill, vocabulary
from longspan.evaluation.skills import Turn
from longspan.evaluation.text import Text


@dataclass(frozen=True)
class Weights:
    """Loss weights; what the assistant writes has 1, but for what a turn calls its key."""

    prompt: float = 0.05
    english: float = 0.5
    key: float = 1.0


@dataclass(frozen=True)
class Options:
    """How one conversation is rendered."""

    tools: list[dict[str, Any]] | None = None
    system: str | None = None
    thinking: bool = True
    effort: str | None = "max"


def draw_options(
    rng: random.Random, tools: list[dict[str, Any]] | None = None, header: float = 0.9
) -> Options:
    """`header`: how often a thinking-effort message, which a server adds by default, stands in front."""
    system = rng.choice(vocabulary.SYSTEM_PROMPTS) if rng.random() < 0.25 else None
    effort = rng.choices(("max", "high", "low"), (6, 1, 1))[0] if rng.random() < header else None
    return Options(tools, system, rng.random() > 0.12, effort)


@dataclass
class Sequence:
    """Token ids, their loss weights (of predicting that token), and the answers as (skill, start, end)."""

    ids: list[int]
    weights: list[float]
    answers: list[tuple[str, int, int]]


class Builder:
    """Turns turns into ids for one tokenizer and one English text."""

    def __init__(self, tokenizer: Tokenizer, text: Text, weights: Weights = Weights()) -> None:
        self.weights = weights
        self.tokenizer = tokenizer
        self.text = text
        self.size = lru_cache(maxsize=200_000)(lambda s: len(tokenizer.encode(s)))

    def begin(self, options: Options) -> Sequence:
        effort = options.effort if options.thinking else None
        messages = [{"role": "system", "content": options.system}] if options.system else []
        segments = render(
            messages,
            options.tools,
            thinking=options.thinking,
            thinking_effort=effort,
            add_generation_prompt=False,
        )
        ids = self.tokenizer.encode_segments(segments)
        return Sequence(ids, [self.weights.prompt] * len(ids), [])

    def add(self, sequence: Sequence, turn: Turn, options: Options) -> None:
        prompt = render(turn.messages, thinking=options.thinking)
        answer = turn.answer
        if options.effort == "low" and options.thinking and turn.skill != "addition":
            answer = answer | {"reasoning_content": ""}
        opening = len(render([], thinking=options.thinking))
        segments = render([answer], thinking=options.thinking, add_generation_prompt=False)[opening:]
        head, tail = self.tokenizer.encode_segments(prompt), self.tokenizer.encode_segments(segments)
        sequence.ids += head + tail
        sequence.weights += [self.weights.prompt] * len(head) + self.tail_weights(tail, turn.key)
        sequence.answers.append((turn.skill, len(sequence.ids) - len(tail), len(sequence.ids)))

    def tail_weights(self, tail: list[int], key: tuple[str, ...]) -> list[float]:
        """1 for every id, and the key's weight for those that overlap an occurrence of it."""
        weights = [1.0] * len(tail)
        pieces = [self.tokenizer.token_bytes(i) for i in tail]
        joined = b"".join(pieces)
        ends = list(accumulate(map(len, pieces)))
        for part in key:
            at = joined.find(part.encode())
            while at >= 0:
                first, last = bisect_right(ends, at), bisect_left(ends, at + len(part))
                weights[first : last + 1] = [self.weights.key] * (last + 1 - first)
                at = joined.find(part.encode(), at + 1)
        return weights

    def turns(
        self, rng: random.Random, kind: str, options: Options, length: int, declared: list[Any]
    ) -> list[Turn]:
        match kind:
            case "retrieval":
                most = max(3, min(24, length // 30))
                if self.weights.key > 1:  # ask for more at a time, and for all of them
                    most = max(3, min(24, length // 18))
                    count, at_once = rng.randrange(2, most + 1), rng.choice((1, 2, 4, 6, 8))
                    return skills.retrieval(
                        rng, self.text, length, self.size, count, 3 + 5 * at_once, at_once
                    )
                count, questions = rng.randrange(1, most + 1), rng.randrange(3, 10)
                return skills.retrieval(rng, self.text, length, self.size, count, questions)
            case "copy":
                return skills.copy(rng, self.text, rng.choice((10, 20, 40, 60)))
            case "addition":
                digits = 3 if rng.random() < 0.85 else rng.choice((1, 2))
                return skills.addition(rng, options.thinking, digits)
            case "tool":
                return tool_skill.call(rng, declared)
            case "short":
                return skills.short_answer(rng)
            case _:
                return skills.continuation(rng, self.text)

    def conversation(
        self, rng: random.Random, length: int, mix: dict[str, float], header: float = 0.9
    ) -> Sequence:
        """At least `length` ids: turns of one or several kinds, drawn by weight from `mix`."""
        kinds = list(mix)
        first = rng.choices(kinds, list(mix.values()))[0]
        if first == "english":
            return self.english(rng, length)
        declared = (
            tool_skill.declare(rng, rng.randrange(1, 2 + min(3, length // 250))) if first == "tool" else []
        )
        options = draw_options(rng, [d.tool for d in declared] or None, header)
        sequence = self.begin(options)
        # Either one kind throughout, or after the first whatever comes.
        others = [k for k in kinds if k not in ("english", "retrieval") and (k != "tool" or declared)]
        single = rng.random() < (0.8 if first == "retrieval" else 0.5)
        kind = first
        while len(sequence.ids) < length:
            room = length - len(sequence.ids)
            context = (
                int(room * rng.uniform(0.15, 0.5 if length < 1000 else 0.85))
                if not sequence.answers
                else min(room, rng.randrange(60, 240))
            )
            for turn in self.turns(rng, kind, options, context, declared):
                self.add(sequence, turn, options)
            kind = first if single else rng.choices(others, [mix[k] for k in others])[0]
        return sequence

    def english(self, rng: random.Random, length: int) -> Sequence:
        ids: list[int] = []
        at = rng.randrange(len(self.text.sentences))
        while len(ids) < length:
            sentence = self.text.sentences[at % len(self.text.sentences)]
            ids += self.tokenizer.encode(sentence if not ids else " " + sentence)
            at += 1
        return Sequence(ids, [self.weights.english] * len(ids), [("english", 0, len(ids))])

    def batch(
        self, rng: random.Random, size: int, length: int, mix: dict[str, float], header: float = 0.9
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Inputs [B,T], targets [B,T] and loss weights [B,T]."""
        drawn = [self.conversation(rng, length + 1, mix, header) for _ in range(size)]
        ids = torch.tensor([s.ids[: length + 1] for s in drawn])
        weights = torch.tensor([s.weights[1 : length + 1] for s in drawn])
        return ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), weights


def tokenizer_texts(text: Text, seed: int = 0, conversations: int = 3000) -> Iterator[str]:
    """What the tokenizer is trained on: a fifth of the English, and every segment of many conversations."""
    rng = random.Random(seed)
    yield from text.sentences[::5]
    for i in range(conversations):
        kind = ("tool", "short", "copy", "addition", "retrieval")[i % 5]
        declared = tool_skill.declare(rng, 2)
        options = draw_options(rng, [d.tool for d in declared] if kind == "tool" else None)
        builder = _Measure(text)
        messages: list[dict[str, Any]] = []
        for turn in builder.turns(rng, kind, options, 120, declared):
            messages += [*turn.messages, turn.answer]
        for segment in render(
            messages, options.tools, thinking_effort=options.effort, add_generation_prompt=False
        ):
            if not segment.special:
                yield segment.text


class _Measure(Builder):
    """A builder without a tokenizer: sizes are guessed from the number of characters."""

    def __init__(self, text: Text) -> None:
        self.weights = Weights()
        self.text = text
        self.size = lambda s: len(s) // 4
