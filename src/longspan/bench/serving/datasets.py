"""The conversations of a load.

    random   lengths uniform in [(1 - r) n, (1 + r) n]; the first turn begins with one of `num_prefixes`
             shared prefixes; each further turn of a conversation adds as much again
    trace    one request a line, as in Mooncake's open traces: {"timestamp": milliseconds, "input_length",
             "output_length", "hash_ids": [...]}. Each hash stands for a block of 512 tokens, the same
             wherever it occurs: prefixes that were shared are shared again. Without hash_ids nothing is
    jsonl    one conversation a line (or a JSON array of them): {"prompt": "..."}, {"messages": [...]} or
             ShareGPT's {"conversations": [{"from": "human", "value": "..."}, ...]}, optionally with
             "output_length". Turns are what the user says; recorded answers give way to real ones

`seed` fixes lengths, `fill` fixes text: points of a sweep have the same lengths and fresh text, so that no
point finds the cache filled by the one before.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from longspan.bench.serving.prompts import Content, PromptSource
from longspan.errors import BenchError

TRACE_BLOCK = 512
_USERS = ("human", "user")


@dataclass(frozen=True)
class Turn:
    """What the user adds, how many tokens that is to be (None: unknown), and how many to answer with."""

    content: Content
    input_len: int | None
    output_len: int


@dataclass(frozen=True)
class Conversation:
    """`opening`: messages before the first turn. `at`: seconds from the start; None: as arrivals say."""

    turns: Sequence[Turn]
    opening: Sequence[dict[str, Any]] = ()
    at: float | None = None

    @property
    def longest(self) -> int | None:
        """Tokens at the end of its last answer; None where the file did not say."""
        lengths = [turn.input_len for turn in self.turns]
        if None in lengths or self.opening:
            return None
        return sum(turn.input_len + turn.output_len for turn in self.turns)  # type: ignore[operator]


@dataclass(frozen=True)
class Lengths:
    """Of random conversations, in tokens."""

    input_len: int
    output_len: int
    range_ratio: float = 0.0
    prefix_len: int = 0
    num_prefixes: int = 1
    turns: int = 1

    def draw(self, count: int, seed: int) -> list[list[tuple[int, int]]]:
        """(input, output) of each turn of each conversation."""
        noise = np.random.default_rng([seed, 0xB])

        def around(length: int) -> np.ndarray:
            low = max(1, int(length * (1 - self.range_ratio)))
            return noise.integers(low, int(length * (1 + self.range_ratio)) + 1, size=(count, self.turns))

        inputs, outputs = around(self.input_len).tolist(), around(self.output_len).tolist()
        return [list(zip(i, o, strict=True)) for i, o in zip(inputs, outputs, strict=True)]


def random_conversations(
    lengths: Lengths, count: int, source: PromptSource, seed: int, fill: int
) -> list[Conversation]:
    which = np.random.default_rng([seed, 0xC]).integers(lengths.num_prefixes, size=count).tolist()
    noise = np.random.default_rng([seed, fill, 0xD])
    prefixes = [source.draw(lengths.prefix_len, noise) for _ in range(lengths.num_prefixes)]
    conversations = []
    for prefix, turns in zip(which, lengths.draw(count, seed), strict=True):
        held = []
        for input_len, output_len in turns:
            content = source.draw(max(1, input_len - source.frame), noise)
            if not held:
                content = source.join([prefixes[prefix], content])
                input_len += lengths.prefix_len
            held.append(Turn(content, input_len, output_len))
        conversations.append(Conversation(held))
    return conversations


@dataclass(frozen=True)
class TraceLine:
    at: float  # seconds from the first line
    input_len: int
    output_len: int
    hash_ids: Sequence[int]


def read_trace(path: Path, limit: int | None = None) -> list[TraceLine]:
    """Raises BenchError naming the line. `limit`: no more than so many lines."""
    lines: list[TraceLine] = []
    began = 0.0
    for where, content in _objects(path, limit):
        at = _number(content, "timestamp", where) / 1000
        began = began if lines else at
        if lines and at - began < lines[-1].at:
            raise BenchError(
                f"{where}: its timestamp lies before that of the line before.", remedy="Sort it."
            )
        hashes = content.get("hash_ids", [])
        if not isinstance(hashes, list) or not all(type(h) is int and h >= 0 for h in hashes):
            raise BenchError(f"{where}: hash_ids is no list of whole numbers from 0.")
        input_len = int(_number(content, "input_length", where, 1))
        if hashes and not (len(hashes) - 1) * TRACE_BLOCK < input_len <= len(hashes) * TRACE_BLOCK:
            raise BenchError(
                f"{where}: {len(hashes)} hash_ids don't fit an input_length of {input_len}: "
                f"each stands for {TRACE_BLOCK} tokens, the last for what is left."
            )
        output_len = int(_number(content, "output_length", where, 1))
        lines.append(TraceLine(at - began, input_len, output_len, hashes))
    return lines


def trace_conversations(
    lines: Sequence[TraceLine], speed: float, scale: float, source: PromptSource, seed: int, fill: int
) -> list[Conversation]:
    """`speed` divides the times, `scale` multiplies all lengths, those of blocks too."""
    block = max(1, round(TRACE_BLOCK * scale))
    rest = np.random.default_rng([seed, fill, 0xE])
    conversations = []
    for line in lines:
        input_len, output_len = (max(1, round(n * scale)) for n in (line.input_len, line.output_len))
        wanted = max(1, input_len - source.frame)
        parts: list[Content] = []
        for hash_id in line.hash_ids:
            length = min(block, wanted - block * len(parts))
            if length <= 0:
                break
            parts.append(source.draw(length, np.random.default_rng([seed, fill, 0xF, hash_id])))
        missing = wanted - block * len(parts)
        if missing > 0:
            parts.append(source.draw(missing, rest))
        conversations.append(
            Conversation([Turn(source.join(parts), input_len, output_len)], at=line.at / speed)
        )
    return conversations


def read_conversations(path: Path, output_len: int, turns: int, limit: int | None) -> list[Conversation]:
    """At most `turns` turns of each. `output_len` where the file doesn't say. Raises BenchError."""
    found = []
    for where, content in _objects(path, limit):
        opening, said = _said(content, where)
        if not said:
            raise BenchError(
                f"{where}: found no user's words.",
                remedy='A line is {"prompt": "..."}, {"messages": [...]} or {"conversations": [...]}.',
            )
        length = (
            int(_number(content, "output_length", where, 1)) if "output_length" in content else output_len
        )
        found.append(Conversation([Turn(text, None, length) for text in said[:turns]], opening))
    return found


def _said(content: dict[str, Any], where: str) -> tuple[list[dict[str, Any]], list[str]]:
    """Messages before the user's first, and what the user says."""
    if isinstance(content.get("prompt"), str):
        return [], [content["prompt"]]
    messages = content.get("messages", content.get("conversations"))
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        return [], []
    opening: list[dict[str, Any]] = []
    said: list[str] = []
    for message in messages:
        role = message.get("role", message.get("from"))
        text = message.get("content", message.get("value"))
        if not isinstance(role, str) or not isinstance(text, str):
            raise BenchError(f"{where}: a message lacks its role or its text.")
        if role in _USERS:
            said.append(text)
        elif role == "system" and not said:
            opening.append({"role": "system", "content": text})
    return opening, said


def _objects(path: Path, limit: int | None) -> Iterator[tuple[str, dict[str, Any]]]:
    """(where it stands, object) of each line, or of each item of a JSON array."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise BenchError(f"{path} is no text in UTF-8: {error}.") from None
    if text.lstrip().startswith("["):
        try:
            items = [(f"{path}, item {i}", item) for i, item in enumerate(json.loads(text), 1)]
        except ValueError as error:
            raise BenchError(f"{path} begins as a JSON array, but is none: {error}.") from None
    else:
        numbered = [(i, line) for i, line in enumerate(text.splitlines(), 1) if line.strip()]
        items = [(f"{path}, line {i}", line) for i, line in numbered]
    if not items:
        raise BenchError(f"{path} is empty.", remedy="Give a file with a JSON object on each line.")
    for where, item in items[:limit]:
        try:
            content = json.loads(item) if isinstance(item, str) else item
        except ValueError as error:
            raise BenchError(f"{where}: not JSON: {error}.") from None
        if not isinstance(content, dict):
            raise BenchError(f"{where}: a JSON object is expected.")
        yield where, content


def _number(content: dict[str, Any], name: str, where: str, least: float = 0) -> float:
    value = content.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value < 1e15:
        shown = "is missing" if value is None else f"is {value!r}"
        raise BenchError(f"{where}: `{name}` {shown}.", remedy=f"Give a number of at least {least:g}.")
    return value
