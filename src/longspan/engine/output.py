"""What comes out: `TokenOutput`s of the core, and the `StepOutput`s that the front makes of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from longspan.errors import LongspanError

FinishReason = Literal["stop", "length", "tool_calls", "abort", "error"]


@dataclass(frozen=True)
class Logprob:
    """Log-probability of one token and its rank, 1 = most likely, before temperature and everything else."""

    logprob: float
    rank: int


TokenLogprobs = dict[int, Logprob]
"""Token id -> Logprob of the token that came first, then of the top N by rank (which may contain it)."""


@dataclass(frozen=True)
class Started:
    """What is known of a choice once it has given its first output."""

    scheduled: float | None  # when it was first given memory, on `time.monotonic`'s clock
    cached_tokens: int = 0  # prompt tokens that came from the prefix cache
    prompt_logprobs: list[TokenLogprobs | None] | None = None  # of choice 0, if asked for


@dataclass(frozen=True)
class End:
    """The core has forgotten the choice. `error` is set exactly where `reason` is "error"."""

    reason: FinishReason
    stop_token: int | None = None  # the one of `stop_token_ids` that was chosen
    error: LongspanError | None = None


@dataclass(frozen=True)
class TokenOutput:
    """What one step of the core gave one choice: tokens, its end, or both. Plain: it may cross processes."""

    request_id: str
    index: int
    token_ids: list[int]
    time: float  # `time.monotonic` when they were chosen
    logprobs: list[TokenLogprobs] = field(default_factory=list)  # one per token id, if asked for
    started: Started | None = None  # with the first output
    end: End | None = None


@dataclass(frozen=True)
class TextDelta:
    """More text of a completion."""

    text: str


@dataclass(frozen=True)
class Times:
    """Seconds on `time.monotonic`'s clock; None where the choice ended before it came so far."""

    arrived: float
    scheduled: float | None
    first_token: float | None
    finished: float


@dataclass(frozen=True)
class Finish:
    """The end of one choice. `error` is set exactly where `reason` is "error"."""

    reason: FinishReason
    times: Times
    stop_reason: int | str | None = None  # the stop token id or stop string that matched; None for EOS
    error: LongspanError | None = None


@dataclass(frozen=True)
class StepOutput:
    """What one step added to one choice. Text that could begin a stop string comes later than its tokens.

    `deltas` are `TextDelta`s from a `TextReader`, events of `longspan.chat` from a `ChatReader`.
    """

    request_id: str
    index: int
    deltas: list[Any]
    token_ids: list[int]
    logprobs: list[TokenLogprobs] = field(default_factory=list)  # one per token id, if asked for
    prompt_logprobs: list[TokenLogprobs | None] | None = (
        None  # with the first output of choice 0, if asked for
    )
    cached_tokens: int = 0  # in the first output: prompt tokens taken from the prefix cache
    finish: Finish | None = None
