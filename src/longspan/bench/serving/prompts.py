"""Where text of a given length comes from.

TokenIds   of the server's own vocabulary, drawn at random: every prompt has exactly as many tokens as asked.
           For /v1/completions of a server with /tokenize
Words      common English words, as many as should give the length asked. How many tokens a word and the
           frame of a chat have is measured with two short requests; what a prompt really had is reported
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

Content = str | list[int]

_COMMON = """
the of and to in is was for as on with by that it from at his an are were which this also be had or has
first one their its new after but who not they have her she two been other when there all during into
school time may years more most only over city some world would where later up such used many can state
about national out known university united then made name year than part team south work became three
through season house film under while people number between before second long town large line named
found group four well series music life area company small place game war home high day local five book
station public power against early great water system following family street since near form left best
church right law each came much road still last army island river white black party head county park
story record open field history land league college north west east king play built women men children
body union air light main order final
"""
WORDS = _COMMON.split()


class PromptSource(Protocol):
    """`frame`: tokens that a request has beside what is drawn for it."""

    @property
    def frame(self) -> int: ...

    def draw(self, length: int, noise: np.random.Generator) -> Content:
        """About `length` tokens; the same for the same state of `noise`."""
        ...

    def join(self, parts: Sequence[Content]) -> Content: ...


@dataclass(frozen=True)
class TokenIds:
    pool: Sequence[int]
    frame: int = 0

    def draw(self, length: int, noise: np.random.Generator) -> list[int]:
        return noise.choice(np.asarray(self.pool), size=length).tolist()

    def join(self, parts: Sequence[Content]) -> list[int]:
        return [token for part in parts for token in part]  # type: ignore[misc]


@dataclass(frozen=True)
class Words:
    tokens_per_word: float = 1.0
    frame: int = 0

    def draw(self, length: int, noise: np.random.Generator) -> str:
        count = max(1, round(length / self.tokens_per_word)) if length else 0
        return " ".join(noise.choice(np.asarray(WORDS), size=count).tolist())

    def join(self, parts: Sequence[Content]) -> str:
        return " ".join(str(part) for part in parts if part)


def words_from(shorter: tuple[int, int], longer: tuple[int, int]) -> Words:
    """From the tokens of two prompts: (words, tokens) of each."""
    tokens_per_word = (longer[1] - shorter[1]) / (longer[0] - shorter[0])
    if tokens_per_word <= 0:
        return Words()
    return Words(tokens_per_word, max(0, round(shorter[1] - tokens_per_word * shorter[0])))
