"""Every error a user can meet. The message says what was found and what was expected; `remedy` what to do."""

from __future__ import annotations


class LongspanError(Exception):
    """Base of all errors raised on purpose. `str()` is the message followed by the remedy."""

    def __init__(self, message: str, *, remedy: str = "") -> None:
        self.message = message
        self.remedy = remedy
        super().__init__(f"{message} {remedy}".strip())


class ConfigError(LongspanError):
    """config.json or a file beside it lacks something, contradicts itself or asks the unknown."""


class CheckpointError(LongspanError):
    """Weights or tokenizer files are truncated, missing, of the wrong shape or dtype, or corrupt."""


class RequestError(LongspanError):
    """A request cannot be honoured as asked (HTTP 400). `param` names the offending field."""

    def __init__(self, message: str, *, param: str | None = None, remedy: str = "") -> None:
        self.param = param
        super().__init__(message, remedy=remedy)


class OverloadedError(LongspanError):
    """The request is fine but there is no room for it now (HTTP 429 or 503)."""


class CapacityError(LongspanError):
    """The options of an engine cannot be met by this machine or this model; says the largest legal number."""


class NonFiniteError(LongspanError):
    """The model produced NaN or infinity for one request; that request ends with this error, and no other."""


class EngineDeadError(LongspanError):
    """The engine's process has died, and with it all requests that it worked on (HTTP 500)."""


class PeerError(LongspanError):
    """A collective failed: another rank has died or did not answer in time. All ranks must start again."""


class DeadlineError(LongspanError):
    """The request was not finished within the time that it was given (HTTP 504)."""


class BenchError(LongspanError):
    """A server can't be measured as asked: it can't be reached, or the load or its file makes no sense."""
