"""Server-sent events, read from bytes that may be cut anywhere.

line    ends with LF, CRLF or CR. `data:` gives the event a line of data; one space after the colon is not
        part of it
event   ends with an empty line. Its data are its lines joined by LF; without any it is no event
other   comments and the fields event, id and retry are passed over, and so is what the end cuts off
"""

from __future__ import annotations

import re

_LINE_END = re.compile(rb"\r\n|\n|\r(?!\Z)")  # a CR that came last may be half of a CRLF


class EventReader:
    """Feed it bytes; it gives the data of each event that they complete."""

    def __init__(self) -> None:
        self._rest = b""
        self._lines: list[bytes] = []

    def feed(self, data: bytes) -> list[bytes]:
        *lines, self._rest = _LINE_END.split(self._rest + data)
        events = []
        for line in lines:
            if line.startswith(b"data:"):
                self._lines.append(line[5:].removeprefix(b" "))
            elif not line and self._lines:
                events.append(b"\n".join(self._lines))
                self._lines = []
        return events
