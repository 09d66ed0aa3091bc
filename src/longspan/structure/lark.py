"""The rules of one grammar in llguidance's Lark-like syntax, as it is put together."""

from __future__ import annotations

from collections.abc import Iterable

from longspan.chat import Segment, Tokenizer


class Rules:
    """Rules and terminals that say the same are one."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._names: dict[str, str] = {}  # by body
        self._named: list[str] = []
        self._count = 0
        self.any_text = f"<[0-{tokenizer.n_base - 1}]>*"

    def tokens(self, segments: Iterable[Segment]) -> str:
        """Exactly the tokens that a prompt has for these segments."""
        return " ".join(f"<[{token_id}]>" for token_id in self._tokenizer.encode_segments(segments))

    def rule(self, body: str) -> str:
        """The name of a rule with this body."""
        return self._names.setdefault(body, self.new_name())

    def terminal(self, body: str) -> str:
        return self._names.setdefault(body, self.new_name("T"))

    def add(self, name: str, body: str) -> None:
        """A rule that is used by its name."""
        self._named.append(f"{name}: {body}")

    def new_name(self, letter: str = "r") -> str:
        self._count += 1
        return f"{letter}{self._count}"

    def __str__(self) -> str:
        return "\n".join([*self._named, *(f"{name}: {body}" for body, name in self._names.items())]) + "\n"
