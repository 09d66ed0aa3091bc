"""The pool: requests whose answers are fixed by what they ask, each with the answer of the lone run.

Temperature 0 or a seed make every one of them deterministic. Whatever else is said when they are sent (stream
or not, priority, salt, deadline) must not change the answer.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from soak.answers import Answer
from soak.protocols import CHAT, GENERATE, MESSAGES, RESPONSES, TEXT

NUM_PREFIXES = 6
LONGEST_WORDS = 700  # about three tokens each with a small vocabulary


@dataclass(frozen=True)
class Case:
    """A request of the pool, without `model` and `stream`."""

    kind: str
    path: str
    body: dict[str, Any]


Ask = Callable[[Case], Answer]


class Workload:
    """Makes cases, by a seed."""

    def __init__(self, seed: int, text: str) -> None:
        self._random = random.Random(seed)
        self._words = text.split()
        self._prefixes = [self._some_words(60 * 2**i // 2) for i in range(NUM_PREFIXES)]

    def pool(self, size: int, ask: Ask) -> Iterator[tuple[Case, Answer]]:
        """At least `size` cases with their answers; `ask` gives the answer of a case that runs alone."""
        makers = [
            self._short, self._short, self._long, self._choices, self._logprobs, self._prompts, self._stops,
            self._prefixed, self._growing, self._chat, self._tools, self._penalties, self._response,
            self._message, self._generate, self._schema, self._object,
        ]  # fmt: skip
        count = turn = 0
        while count < size:
            # Every kind comes early, so that a small pool has them all.
            case = makers[turn % len(makers)]()
            new = [(case, ask(case)), *(self._conversation(ask) if turn % 5 == 4 else ())]
            yield from new
            count += len(new)
            turn += 1

    def _conversation(self, ask: Ask) -> Iterator[tuple[Case, Answer]]:
        """Turns of one chat, each of which sends all that was said before."""
        messages: list[dict[str, Any]] = [{"role": "system", "content": self._random.choice(self._prefixes)}]
        for _ in range(self._random.randint(2, 4)):
            messages.append({"role": "user", "content": self._question()})
            body = {"messages": list(messages), "max_tokens": self._random.randint(10, 60), "temperature": 0}
            case = Case("conversation", CHAT, body)
            answer = ask(case)
            yield case, answer
            messages.append(answer.choices[0].message() | {"tool_calls": None})

    def _some_words(self, count: int) -> str:
        start = self._random.randrange(max(len(self._words) - count, 1))
        return " ".join(self._words[start : start + count])

    def _question(self) -> str:
        a, b = self._random.randint(1, 999), self._random.randint(1, 999)
        return self._random.choice(
            [f"What is {a} + {b}?", f"What comes after: {self._some_words(8)}", self._some_words(5)]
        )

    def _sampling(self) -> dict[str, Any]:
        if self._random.random() < 0.5:
            return {"temperature": 0}
        given = {"temperature": self._random.choice([0.3, 0.8, 1.5]), "seed": self._random.randrange(2**40)}
        extra = self._random.choice([{}, {"top_p": 0.9}, {"top_k": 20}, {"min_p": 0.05}])
        return given | extra

    def _short(self) -> Case:
        body = {"prompt": self._some_words(self._random.randint(1, 12)), "max_tokens": 1 + self._tokens(40)}
        return Case("short", TEXT, body | self._sampling())

    def _long(self) -> Case:
        prompt = self._some_words(self._random.randint(200, LONGEST_WORDS))
        return Case("long", TEXT, {"prompt": prompt, "max_tokens": 1 + self._tokens(60)} | self._sampling())

    def _growing(self) -> Case:
        """A reply that needs page after page, which others must give up."""
        body = {"prompt": self._some_words(20), "max_tokens": self._random.randint(120, 300)}
        return Case("growing", TEXT, body | {"ignore_eos": True} | self._sampling())

    def _choices(self) -> Case:
        body = {"prompt": self._some_words(30), "max_tokens": 30, "n": self._random.randint(2, 4)}
        return Case("n", TEXT, body | {"temperature": 0.9, "seed": self._random.randrange(2**40)})

    def _logprobs(self) -> Case:
        body = {"prompt": self._some_words(10), "max_tokens": 12, "logprobs": self._random.randint(0, 5)}
        return Case("logprobs", TEXT, body | self._sampling())

    def _prompts(self) -> Case:
        prompts = [self._some_words(self._random.randint(1, 40)) for _ in range(self._random.randint(2, 3))]
        return Case("prompts", TEXT, {"prompt": prompts, "max_tokens": 16, "echo": True} | self._sampling())

    def _stops(self) -> Case:
        stop = [" the ", "\n", " and", "of"][: self._random.randint(1, 4)]
        body = {"prompt": self._some_words(20), "max_tokens": 60, "stop": stop}
        return Case("stop", TEXT, body | self._sampling())

    def _penalties(self) -> Case:
        body = {"prompt": self._some_words(20), "max_tokens": 40, "repetition_penalty": 1.3}
        return Case("penalties", TEXT, body | {"frequency_penalty": 0.4} | self._sampling())

    def _prefixed(self) -> Case:
        prompt = f"{self._random.choice(self._prefixes)} {self._some_words(4)}"
        return Case("prefix", TEXT, {"prompt": prompt, "max_tokens": 1 + self._tokens(30)} | self._sampling())

    def _chat(self) -> Case:
        body: dict[str, Any] = {"messages": [{"role": "user", "content": self._question()}]}
        body |= {"max_completion_tokens": 1 + self._tokens(80)}
        if self._random.random() < 0.4:
            body["chat_template_kwargs"] = {"thinking": False}
        if self._random.random() < 0.3:
            body |= {"logprobs": True, "top_logprobs": 2}
        return Case("chat", CHAT, body | self._sampling())

    def _tools(self) -> Case:
        parameters = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
        function = {"name": "get_weather", "description": "Get the weather.", "parameters": parameters}
        body: dict[str, Any] = {
            "messages": [{"role": "user", "content": "What is the weather in Paris?"}],
            "tools": [{"type": "function", "function": function}],
            "tool_choice": self._random.choice(["auto", "required", "none"]),
            "max_tokens": 120,
        }
        return Case("tools", CHAT, body | self._sampling())

    def _response(self) -> Case:
        body = {"input": self._question(), "instructions": self._some_words(5), "max_output_tokens": 50}
        return Case("responses", RESPONSES, body | self._sampling())

    def _message(self) -> Case:
        body = {"messages": [{"role": "user", "content": self._question()}], "max_tokens": 50}
        thinking = {"thinking": {"type": "enabled"}} if self._random.random() < 0.5 else {}
        return Case("messages", MESSAGES, body | thinking | self._sampling())

    def _generate(self) -> Case:
        given = {"max_new_tokens": 30, "n": self._random.randint(1, 2), "temperature": 0.7}
        given["sampling_seed"] = self._random.randrange(2**40)
        return Case("generate", GENERATE, {"text": self._some_words(20), "sampling_params": given})

    def _schema(self) -> Case:
        schema = {
            "type": "object",
            "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"enum": [1, 2, 3]}},
            "required": ["name", "age"],
            "additionalProperties": False,
        }
        form = {"type": "json_schema", "json_schema": {"name": "person", "schema": schema}}
        return Case("json schema", CHAT, self._formatted(form))

    def _object(self) -> Case:
        return Case("json object", CHAT, self._formatted({"type": "json_object"}))

    def _formatted(self, form: dict[str, Any]) -> dict[str, Any]:
        return {
            "messages": [{"role": "user", "content": self._question()}],
            "response_format": form,
            "chat_template_kwargs": {"thinking": self._random.random() < 0.3},
            "max_tokens": 80,
        } | self._sampling()

    def _tokens(self, most: int) -> int:
        """Up to `most`, small ones more often."""
        return int(self._random.random() ** 2 * most)


def text_of(model: Path) -> str:
    """Words to ask about: the checkpoint's own held-out text, or numbers."""
    file = model / "heldout.txt"
    return file.read_text() if file.exists() else " ".join(map(str, range(20_000)))
