"""English text as the generators use it: sentences to fill contexts with, and words for random sentences."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path


@dataclass(frozen=True)
class Text:
    """`body` is plain text, one verse or paragraph a line."""

    body: str

    @classmethod
    def read(cls, path: str | Path) -> Text:
        return cls(Path(path).read_text(encoding="utf-8"))

    @cached_property
    def sentences(self) -> list[str]:
        """In order; a sentence longer than 300 characters is cut at a blank."""
        found = re.split(r"(?<=[.?!])\s+", self.body.replace("\n", " "))
        return [s[:300].rsplit(" ", 1)[0] if len(s) > 300 else s for s in found if len(s.split()) >= 4]

    @cached_property
    def words(self) -> list[str]:
        return sorted({w for w in re.findall(r"[A-Za-z]+", self.body) if 3 <= len(w) <= 9})

    def random_sentence(self, rng: random.Random, count: int | None = None) -> str:
        """Words drawn evenly from the vocabulary, so that only copying helps to predict them."""
        chosen = [rng.choice(self.words) for _ in range(count or rng.randrange(5, 16))]
        return " ".join([chosen[0].capitalize(), *chosen[1:]]) + "."
