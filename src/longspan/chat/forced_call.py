"""Makes a reply call a tool, for `tool_choice` "required" or one named function."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Literal

from longspan.chat import xtml
from longspan.chat.tokenizer import Tokenizer
from longspan.errors import RequestError


class ForcedToolCall:
    """Which ids may come next, so that the reply holds a complete call of one of `names`.

    Thinking is free. Then follow an empty response, the opening of the tools channel and the header of a
    call, all forced but for the name, which the model chooses. In the call it may write arguments of any key
    and value, and must close what it opened. After the first complete call everything is free again. The
    forced tokens are those that `render` gives for the same turn. Only a limit on tokens cuts the call off.
    """

    def __init__(self, tokenizer: Tokenizer, names: Sequence[str], *, thinking: bool) -> None:
        """`thinking`: the prompt opened the think channel, otherwise the response channel.

        Raises RequestError without names, and CheckpointError if the tokenizer has no chat tokens.
        """
        if not names or not all(names):
            raise RequestError("A forced tool call needs the name of at least one function.", param="tools")
        encode = tokenizer.encode_segments
        self._open, self._close, self._sep = map(tokenizer.special_id, (xtml.OPEN, xtml.CLOSE, xtml.SEP))
        self._special = tuple(tokenizer.special.values())
        header = xtml.open_tag("call", [("tool", "NAME"), ("index", "1")])
        name_at = header.index(xtml.Segment("NAME"))
        quote, *self._after_name = encode(header[name_at + 1 :])
        # With the quote behind it a name that begins another one is told apart.
        self._names: dict = {}
        for name in names:
            node = self._names
            for token_id in [*tokenizer.encode(xtml.escape(name)), quote]:
                node = node.setdefault(token_id, {})
        to_name = [*xtml.close_tag("response"), *xtml.open_tag("tools"), *header[:name_at]]
        self._after_think = encode([*xtml.close_tag("think"), *xtml.open_tag("response"), *to_name])[1:]
        argument = [xtml.Segment("argument"), xtml.Segment(" key"), xtml.Segment('="')]
        self._after_open = encode(argument)
        self._argument_end = encode(xtml.close_tag("argument"))[1:]
        self._call_end = encode(xtml.close_tag("call"))[1:]
        self._forced = deque([] if thinking else encode(to_name))
        self._state: Literal["think", "name", "call", "key", "value", "free"] = (
            "think" if thinking else "name"
        )

    def allowed(self) -> list[int] | None:
        """Ids that may come next; None: all but `forbidden`."""
        if self._forced:
            return [self._forced[0]]
        match self._state:
            case "name":
                return list(self._names)
            case "call":
                return [self._open, self._close]
        return None

    def forbidden(self) -> list[int]:
        """Ids that may not come next where `allowed` is None."""
        match self._state:
            case "think" | "value":
                return [token_id for token_id in self._special if token_id != self._close]
            case "key":
                return [token_id for token_id in self._special if token_id != self._sep]
        return []

    def push(self, token_id: int) -> None:
        """The next token. Raises ValueError for one that was not allowed."""
        allowed = self.allowed()
        if token_id in self.forbidden() if allowed is None else token_id not in allowed:
            raise ValueError(f"token {token_id} was not allowed here: the caller must keep to allowed()")
        if self._forced:
            self._forced.popleft()
            return
        match self._state:
            case "think" if token_id == self._close:
                self._go(self._after_think, "name")
            case "name":
                self._names = self._names[token_id]
                if not self._names:
                    self._go(self._after_name, "call")
            case "call" if token_id == self._open:
                self._go(self._after_open, "key")
            case "call":
                self._go(self._call_end, "free")
            case "key" if token_id == self._sep:
                self._state = "value"
            case "value" if token_id == self._close:
                self._go(self._argument_end, "call")

    def _go(self, forced: list[int], state: Literal["name", "call", "key", "free"]) -> None:
        """Next come the ids `forced`, and then `state` decides."""
        self._forced.extend(forced)
        self._state = state
