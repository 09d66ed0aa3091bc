"""One conversation as it is held: what was said so far, and the body of the next request.

A completion goes on from the whole text before it; a chat gets the answers back as messages, with their
reasoning, as a client does that keeps a session.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from longspan.bench.serving.datasets import Conversation
from longspan.bench.serving.prompts import Content
from longspan.bench.serving.reply import Reply
from longspan.errors import BenchError

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
OURS = ("model", "prompt", "messages", "stream", "stream_options", "max_tokens")  # not for --extra-body


@dataclass(frozen=True)
class Dialect:
    """What all requests have in common."""

    endpoint: str
    model: str
    ignore_eos: bool = False
    extra: dict[str, Any] = field(default_factory=dict)

    def body(self, said: dict[str, Any], output_len: int) -> bytes:
        """`said`: the field that holds the prompt."""
        body = {"model": self.model, **said, "max_tokens": output_len, "stream": True}
        body["stream_options"] = {"include_usage": True}
        if self.ignore_eos:
            body["ignore_eos"] = True
        return json.dumps(body | self.extra).encode()


class Dialogue:
    """Ask for the body of each turn in order; tell it the answer in between."""

    def __init__(self, conversation: Conversation, dialect: Dialect) -> None:
        if conversation.opening and dialect.endpoint != CHAT:
            raise BenchError(
                "A conversation of the file begins with a system message, which a completion can't hold.",
                remedy=f"Add --endpoint {CHAT}.",
            )
        self.turns = conversation.turns
        self._dialect = dialect
        self._messages = list(conversation.opening)
        self._text: Content | None = None
        self._first = self._body(0)  # made before the clock runs: a long prompt takes its time

    def body(self, turn: int) -> bytes:
        return self._body(turn) if turn else self._first

    def answered(self, reply: Reply) -> None:
        if self._dialect.endpoint == CHAT:
            self._messages.append({"role": "assistant", "content": reply.text, **reply.reasoning})
        elif isinstance(self._text, str):
            self._text += reply.text

    def _body(self, turn: int) -> bytes:
        content, output_len = self.turns[turn].content, self.turns[turn].output_len
        if self._dialect.endpoint == CHAT:
            self._messages.append({"role": "user", "content": content})
            return self._dialect.body({"messages": self._messages}, output_len)
        self._text = content if self._text is None else f"{self._text}\n{content}"
        return self._dialect.body({"prompt": self._text}, output_len)
