"""How many prompt tokens a step may take on while others are decoding, so that these don't wait too long."""

from __future__ import annotations

_MEMORY = 0.8  # weight of the past in the mean


class Pace:
    """Keeps steps that decode below `bound_seconds`, judged by the last steps; 0: no bound.

    A step takes at least one smallest cut of a prompt, so the bound holds up to that.
    """

    def __init__(self, bound_seconds: float, least_tokens: int) -> None:
        self._bound_seconds = bound_seconds
        self._least_tokens = least_tokens
        self._seconds_per_token: float | None = None

    def observe(self, num_tokens: int, seconds: float) -> None:
        """A step with prompt tokens has run. What it cost beside them counts as theirs, to be safe."""
        if num_tokens < self._least_tokens:
            return
        now = seconds / num_tokens
        before = self._seconds_per_token
        self._seconds_per_token = now if before is None else _MEMORY * before + (1 - _MEMORY) * now

    def limit(self, num_tokens: int) -> int:
        """Of `num_tokens` prompt tokens, those that a step beside decoding sequences may take."""
        if not self._bound_seconds or self._seconds_per_token is None:
            return num_tokens
        fitting = int(self._bound_seconds / self._seconds_per_token)
        return min(num_tokens, max(self._least_tokens, fitting))
