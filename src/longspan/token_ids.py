"""Token ids as a caller gives them: a list, a tuple, an array or a tensor -> a plain list. Needs no torch."""

from __future__ import annotations

from operator import index
from typing import Any

from longspan.errors import RequestError


def to_token_ids(value: Any, vocab_size: int, param: str = "prompt") -> list[int]:
    """One sequence of integers, of whatever integer type. Raises RequestError, naming `param`, for others."""
    items = plain(value)
    if not isinstance(items, list | tuple):
        raise _not_ids(param, f"`{param}` is {shown(value)}.")
    ids = []
    for position, item in enumerate(items):
        try:
            ids.append(index(_no_bool(plain(item))))
        except TypeError:
            raise _not_ids(param, f"Item {position} of `{param}` is {shown(item)}.") from None
    low, high = min(ids, default=0), max(ids, default=0)
    if low < 0 or high >= vocab_size:
        raise RequestError(
            f"`{param}` has the token id {shown(low if low < 0 else high)}.",
            param=param,
            remedy=f"The model has ids 0 to {vocab_size - 1}.",
        )
    return ids


def plain(value: Any) -> Any:
    """An array or a tensor as lists and numbers, a range as a list, anything else as it is."""
    if isinstance(value, range):
        return list(value)
    return value.tolist() if hasattr(value, "tolist") else value


def shown(value: Any, length: int = 80) -> str:
    """`repr` for a message: short, and never an error itself."""
    try:
        text = repr(value)
    except ValueError:  # an integer of more digits than Python prints
        return f"<{type(value).__name__} too long to show>"
    return text if len(text) <= length else f"{text[:length]}..."


def _no_bool(item: Any) -> Any:
    if isinstance(item, bool):
        raise TypeError
    return item


def _not_ids(param: str, found: str) -> RequestError:
    return RequestError(found, param=param, remedy="Token ids are one list of integers.")
