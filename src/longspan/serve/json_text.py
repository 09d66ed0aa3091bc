"""JSON as it comes in, which may be anything, and JSON that can always be sent."""

from __future__ import annotations

import json
import math
from json.scanner import py_make_scanner  # type: ignore[attr-defined]
from typing import Any

from fastapi import Response

from longspan.errors import RequestError

# C's scanner lets no other thread run until it is done: a quarter of a second for this many values.
MAX_MARKS = 1_000_000


def read_json(raw: bytes) -> Any:
    """The value of a body. Slow for large ones: run it in a thread. Raises RequestError.

    NaN and infinities, which JSON does not have, are refused: they would get into prompts.
    """
    try:
        text = raw.decode(json.detect_encoding(raw), "surrogatepass")
        marks = sum(map(raw.count, (b",", b"[", b"{")))
        return (_DECODER if marks <= MAX_MARKS else _YIELDING_DECODER).decode(text)
    except RecursionError as error:
        raise _unreadable("it is nested too deeply") from error
    except ValueError as error:
        raise _unreadable(str(error)) from error


def _unreadable(why: str) -> RequestError:
    return RequestError(f"The request body can't be read as JSON: {why}.")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:40]} is no finite number")
    return number


class _YieldingDecoder(json.JSONDecoder):
    """Python's own scanner: slower than C's, but other threads run in between."""

    def __init__(self) -> None:
        super().__init__(parse_float=_finite, parse_constant=_finite)
        self.scan_once = py_make_scanner(self)


_DECODER = json.JSONDecoder(parse_float=_finite, parse_constant=_finite)
_YIELDING_DECODER = _YieldingDecoder()


def json_bytes(value: Any) -> bytes:
    """A lone surrogate, which a client may have sent, becomes a question mark."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode("utf-8", errors="replace")


class JsonResponse(Response):
    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return json_bytes(content)
