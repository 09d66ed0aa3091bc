"""Stop strings in a text that arrives in pieces."""

from __future__ import annotations

from collections.abc import Sequence


def held_suffix(text: str, targets: Sequence[str]) -> int:
    """Length of the longest end of `text` that is the beginning, but not the whole, of a target."""
    longest = max(map(len, targets), default=0)
    for length in range(min(longest - 1, len(text)), 0, -1):
        tail = text[-length:]
        if any(len(target) > length and target.startswith(tail) for target in targets):
            return length
    return 0


class StopMatcher:
    """Finds stop strings across pieces and holds back what may yet become one.

    The stop string that is complete first wins; of two that end together, the longer. So the result is the
    same for every split into pieces. `include` leaves the stop string in the text; what follows is dropped.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self._stops = [stop for stop in stops if stop]
        self._include = include
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> tuple[str, str | None]:
        """-> (text to emit, the stop string met so far or None)."""
        if self.matched is not None:
            return "", self.matched
        text = self._held + text
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            end, start, self.matched = min(found)
            self._held = ""
            return text[: end if self._include else start], self.matched
        keep = len(text) - held_suffix(text, self._stops)
        self._held = text[keep:]
        return text[:keep], None

    def flush(self) -> str:
        """What was held back, when the text is over."""
        held, self._held = self._held, ""
        return held
