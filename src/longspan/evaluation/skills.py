"""Seeded generators of the skills a small Kimi K3.1 is trained on and measured by.

A skill makes a list of `Turn`s: what the user (or a tool) says, and the reference answer of the assistant.
The first turn is a complete single-turn request; later turns ask more about the same context, which the
trainer packs into one conversation. `Turn.check` judges a reply by what matters to the skill (the value, the
call, the copied text), not by its wording.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from longspan.evaluation import vocabulary as words
from longspan.evaluation.text import Text

Check = Callable[[Any], bool]


@dataclass(frozen=True)
class Turn:
    """`messages` come in, `answer` (an OpenAI-style assistant message) should come out."""

    skill: str
    messages: list[dict[str, Any]]
    answer: dict[str, Any]
    check: Check
    key: tuple[str, ...] = ()  # what in the answer the skill is about; the trainer may weigh it more


@dataclass(frozen=True)
class Request:
    """What is asked of a model: one turn after `history`, with how it is to be rendered."""

    turn: Turn
    history: list[dict[str, Any]] = field(default_factory=list)
    tools: list[dict[str, Any]] | None = None
    thinking: bool = True
    thinking_effort: str | None = "max"

    @property
    def messages(self) -> list[dict[str, Any]]:
        return [*self.history, *self.turn.messages]


def reply_of(answer: dict[str, Any]) -> Any:
    """The reference answer in the shape of a model's reply: content, reasoning and tool_calls."""
    return SimpleNamespace(
        content=answer.get("content"),
        reasoning=answer.get("reasoning_content"),
        tool_calls=answer.get("tool_calls"),
    )


def user(content: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


def assistant(reasoning: str, content: str) -> dict[str, Any]:
    return {"role": "assistant", "reasoning_content": reasoning, "content": content}


def says(expected: str) -> Check:
    """The content is `expected`, give or take blanks around it."""
    return lambda reply: (reply.content or "").strip() == expected.strip()


# Retrieval: a planted sentence in a long context.


@dataclass(frozen=True)
class Needle:
    attribute: str
    owner: str
    value: str

    @property
    def sentence(self) -> str:
        return f"The {self.attribute} of the {self.owner} is {self.value}."


def needle(rng: random.Random) -> Needle:
    attribute = rng.choice(("code", "code", "code", "number", "word", "owner"))
    owner = f"{rng.choice(words.ADJECTIVES)} {rng.choice(words.NOUNS)}"
    match attribute:
        case "code":
            value = "".join(rng.choice("0123456789") for _ in range(4))
        case "number":
            value = str(rng.randrange(10, 1000))
        case "word":
            value = rng.choice(words.NOUNS)
        case _:
            value = rng.choice(words.NAMES)
    return Needle(attribute, owner, value)


def needles(rng: random.Random, count: int) -> list[Needle]:
    """`count` needles with different owners, so that every question has one answer."""
    found: dict[str, Needle] = {}
    while len(found) < count:
        item = needle(rng)
        found.setdefault(item.owner, item)
    return list(found.values())


def filler(rng: random.Random, text: Text, length: int, size: Callable[[str], int]) -> list[str]:
    """Sentences of about `length` tokens in all: English and random words, in a mix that varies."""
    share = rng.choice((0.0, 0.3, 0.7, 1.0))
    sentences: list[str] = []
    left = length
    while left > 0:
        sentence = text.random_sentence(rng) if rng.random() < share else rng.choice(text.sentences)
        left -= size(" " + sentence)
        sentences.append(sentence)
    return sentences


def retrieval(
    rng: random.Random,
    text: Text,
    length: int,
    size: Callable[[str], int],
    count: int = 4,
    questions: int = 1,
    at_once: int = 1,
) -> list[Turn]:
    """`count` needles in a context of about `length` tokens, and questions about `questions` of them.

    `at_once` needles are asked for in one turn.
    """
    planted = needles(rng, count)
    budget = length - sum(size(" " + n.sentence) for n in planted) - 40
    sentences = filler(rng, text, budget, size) if budget > 0 else []
    for item in planted:
        sentences.insert(rng.randrange(len(sentences) + 1), item.sentence)
    context = " ".join(sentences)
    turns = []
    asked = rng.sample(planted, min(questions, count))
    for start in range(0, len(asked), at_once):
        items = asked[start : start + at_once]
        things = [f"the {item.attribute} of the {item.owner}" for item in items]
        question = f"What is {', '.join(things)}?"
        prompt = question
        if start == 0:
            prompt = (
                f"{context}\n\n{question}"
                if rng.random() < 0.8
                else f"Read this text:\n{context}\n\n{question}"
            )
        answer = assistant(f"I look for {', '.join(things)}.", " ".join(item.sentence for item in items))
        values = tuple(item.value for item in items)
        turns.append(Turn("retrieval", user(prompt), answer, _has_values(values), values))
    return turns


def _has_values(values: tuple[str, ...]) -> Check:
    """Every sentence of the content ends with its value."""

    def check(reply: Any) -> bool:
        found = re.findall(r"(\w+)\W*(?:\.|$)", (reply.content or "").strip())
        return tuple(found) == values

    return check


# Copying.


def copy(rng: random.Random, text: Text, most: int = 40) -> list[Turn]:
    """A passage of up to about `most` words, of English or of random words."""
    kind = rng.random()
    if kind < 0.4:
        passage = text.random_sentence(rng, rng.randrange(3, max(4, most // 2)))
    else:
        passage = " ".join(rng.choice(text.sentences).split()[: rng.randrange(max(4, most // 2), most + 1)])
    ask = rng.choice(
        (
            "Copy this text exactly:\n",
            "Copy the following passage:\n",
            "Repeat this text:\n",
            "Write this again:\n",
        )
    )
    return [Turn("copy", user(ask + passage), assistant("I copy the text.", passage), says(passage))]


# Addition, worked from the last digit.


def working(a: int, b: int) -> str:
    """`417 + 286` -> `0+7+6=13 1+1+8=10 1+4+2=07`: carry, digit, digit, and a sum of two digits."""
    width = max(len(str(a)), len(str(b)))
    steps, carry = [], 0
    for x, y in zip(reversed(f"{a:0{width}}"), reversed(f"{b:0{width}}"), strict=True):
        total = carry + int(x) + int(y)
        steps.append(f"{carry}+{x}+{y}={total:02}")
        carry = total // 10
    return " ".join(steps)


def addition(rng: random.Random, thinking: bool = True, digits: int = 3) -> list[Turn]:
    """Two numbers of `digits` digits; without a think channel the working stands in the response."""
    a, b = (rng.randrange(10 ** (digits - 1), 10**digits) for _ in range(2))
    ask = rng.choice(
        (
            "What is {} + {}?",
            "What is {} + {}?",
            "Add {} and {}.",
            "{} + {} = ?",
            "What is the sum of {} and {}?",
        )
    )
    result = f"{a} + {b} = {a + b}"
    steps = working(a, b)
    answer = assistant(steps, result if thinking else f"{steps}\n{result}")
    return [Turn("addition", user(ask.format(a, b)), answer, _ends_with_number(a + b))]


def _ends_with_number(number: int) -> Check:
    def check(reply: Any) -> bool:
        found = re.findall(r"\d+", reply.content or "")
        return bool(found) and found[-1] == str(number)

    return check


# Short questions: think a little, answer in the response channel.


def short_answer(rng: random.Random) -> list[Turn]:
    """Little facts and operations, answered after a short think."""
    question, reasoning, answer = rng.choice(_SHORT)(rng)
    return [Turn("short_answer", user(question), assistant(reasoning, answer), says(answer))]


def _next_day(rng: random.Random) -> tuple[str, str, str]:
    i, step, word = rng.randrange(7), *rng.choice(((1, "after"), (-1, "before")))
    day = words.DAYS[(i + step) % 7]
    return f"Which day comes {word} {words.DAYS[i]}?", f"The day {word} {words.DAYS[i]} is {day}.", day


def _next_month(rng: random.Random) -> tuple[str, str, str]:
    i, step, word = rng.randrange(12), *rng.choice(((1, "after"), (-1, "before")))
    month = words.MONTHS[(i + step) % 12]
    return (
        f"Which month comes {word} {words.MONTHS[i]}?",
        f"The month {word} {words.MONTHS[i]} is {month}.",
        month,
    )


def _opposite(rng: random.Random) -> tuple[str, str, str]:
    a, b = rng.choice(words.OPPOSITES)
    a, b = rng.choice(((a, b), (b, a)))
    return f"What is the opposite of {a}?", f"The opposite of {a} is {b}.", b


def _say(rng: random.Random) -> tuple[str, str, str]:
    word = rng.choice(rng.choice((words.NOUNS, words.ADJECTIVES, words.NAMES, words.CITIES)))
    ask = rng.choice(("Say {}.", "Say the word {}.", "Answer with the word {}.", "Please say {}."))
    return ask.format(word), f"I say {word}.", word


def _repeat(rng: random.Random) -> tuple[str, str, str]:
    word = rng.choice(words.NOUNS)
    name, count = rng.choice((("two", 2), ("three", 3), ("four", 4)))
    return f"Say {word} {name} times.", f"I say {word} {name} times.", " ".join([word] * count)


def _pick(rng: random.Random) -> tuple[str, str, str]:
    chosen = rng.sample(words.NOUNS, 4)
    name, i = rng.choice((("first", 0), ("second", 1), ("third", 2), ("last", 3)))
    return f"Which word is {name}: {', '.join(chosen)}?", f"The {name} word is {chosen[i]}.", chosen[i]


def _greeting(rng: random.Random) -> tuple[str, str, str]:
    hello = rng.choice(("Hello", "Hi", "Good morning", "Good evening"))
    name = rng.choice(words.NAMES)
    if rng.random() < 0.5:
        return rng.choice((f"{hello}!", f"{hello}.")), "A greeting.", f"{hello}! How can I help you?"
    return f"{hello}, I am {name}.", f"{name} greets me.", f"{hello}, {name}! How can I help you?"


def _name(rng: random.Random) -> tuple[str, str, str]:
    return (
        rng.choice(("Who are you?", "What is your name?")),
        "My name is Longspan.",
        "I am Longspan, a small model.",
    )


def _thanks(rng: random.Random) -> tuple[str, str, str]:
    return rng.choice(("Thank you.", "Thanks!", "Thank you!")), "A thank you.", "You are welcome."


_SHORT = (_next_day, _next_month, _opposite, _say, _say, _repeat, _pick, _pick, _greeting, _name, _thanks)


# English.


def continuation(rng: random.Random, text: Text) -> list[Turn]:
    """Go on with a passage; any continuation is right, so nothing but a reply is checked."""
    at = rng.randrange(len(text.sentences) - 1)
    passage = text.sentences[at].split()
    cut = min(len(passage) - 1, rng.randrange(4, 12)) or 1
    rest = " ".join([*passage[cut:], text.sentences[at + 1]])
    ask = rng.choice(("Continue this text:\n", "Continue: ", "Go on with this text:\n"))
    answer = assistant("I go on with the text.", rest)
    return [
        Turn("continuation", user(ask + " ".join(passage[:cut])), answer, lambda reply: bool(reply.content))
    ]
