"""The arguments of one call, from XTML to JSON text, piece by piece."""

from __future__ import annotations

import json


class ArgumentWriter:
    """Every method returns the JSON text that became final by it.

    A string value is escaped as it arrives. A value of another type is passed through when it is complete, if
    it is JSON, and becomes a string if it is not. A key that comes twice stands twice in the text; readers of
    JSON take the last. A `json` block is passed through raw, JSON or not. Nothing raises and no text is lost.
    """

    def __init__(self) -> None:
        self._form = ""  # "", "arguments" or "json"
        self._in_value = False
        self._held: list[str] | None = None  # a value that is not a string, until it is complete
        self._blank = True

    @property
    def in_value(self) -> bool:
        return self._in_value

    def can_open(self, tag: str) -> bool:
        """Whether it may come now: a call has one `json` block, or any number of `argument`s."""
        return not self._form or (self._form == "arguments" and tag == "argument")

    def open_argument(self, key: str, kind: str) -> str:
        head = ", " if self._form else "{"
        self._form, self._in_value, self._blank = "arguments", True, False
        self._held = None if kind == "string" else []
        return f"{head}{json.dumps(key, ensure_ascii=False)}: " + ('"' if self._held is None else "")

    def open_json(self) -> str:
        self._form, self._in_value = "json", True
        return ""

    def text(self, text: str) -> str:
        if self._form == "json":
            self._blank = self._blank and not text.strip()
            return text
        if self._held is None:
            return json.dumps(text, ensure_ascii=False)[1:-1]
        self._held.append(text)
        return ""

    def close_value(self) -> str:
        """The end of an argument or block."""
        was_string = self._form == "arguments" and self._held is None
        self._in_value = False
        if was_string:
            return '"'
        value, self._held = "".join(self._held or ()), None
        if self._form == "json":
            return ""
        return value if _is_json(value) else json.dumps(value, ensure_ascii=False)

    def close(self) -> str:
        """The end of the call, outside of any value."""
        if self._form == "arguments":
            return "}"
        return "{}" if self._blank else ""

    def cut(self) -> str:
        """The reply ended here: what is held comes out as it is."""
        value, self._held = "".join(self._held or ()), None
        return value


def _is_json(text: str) -> bool:
    try:
        json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return False
    return True


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")
