"""Errors that end one request while it is being served."""

from __future__ import annotations

from longspan.errors import LongspanError, NonFiniteError, RequestError


def unexpected(error: Exception) -> LongspanError:
    """An error of ours as it is, any other in words that a caller can do something with."""
    if isinstance(error, LongspanError):
        return error
    return LongspanError(
        f"The engine failed while it worked on this request: {type(error).__name__}: {error}.",
        remedy="Its log says where; other requests go on.",
    )


def non_finite() -> NonFiniteError:
    return NonFiniteError(
        "The model computed NaN or infinity for this request, so there is no answer to give.",
        remedy="If a tensor of the checkpoint is corrupt, the log names it; otherwise try --dtype float32.",
    )


def non_finite_edits() -> NonFiniteError:
    return NonFiniteError(
        "The penalties of this request make NaN or infinity of the model's logits.",
        remedy="Bring repetition_penalty nearer to 1.",
    )


def nothing_left() -> RequestError:
    return RequestError(
        "Every token is banned, so none can be chosen.",
        param="logit_bias",
        remedy="Leave some token, or the end of the text, without a bias of -100.",
    )
