"""One set-up of logging for a server: what is logged, and each record as a line of text or as a JSON object.

A record may carry `fields`, a flat dict, by `extra={"fields": {...}}`. In text they follow the message as
key=value; in JSON they are members beside time, level, logger, message and exception. Whatever a client had a
hand in is escaped, so that no request can forge a line.
"""

from __future__ import annotations

import json
import logging
import re
import sys
from datetime import UTC, datetime
from typing import Any, TextIO

LEVELS = ("debug", "info", "warning", "error")
FORMATS = ("text", "json")

_PLAIN = re.compile(r"[!#-<>-\[\]-~]+")  # printable ASCII but space, quote, equals sign and backslash


def configure(
    level: str = "info", format: str = "text", *, access_log: bool = False, stream: TextIO | None = None
) -> None:
    """Sends all records to `stream` (stderr). Libraries below warning only where `level` is debug."""
    handler = logging.StreamHandler(stream) if stream else _StderrHandler()
    handler.setFormatter(_JsonFormatter() if format == "json" else _TextFormatter())
    root = logging.getLogger()
    root.handlers = [handler]
    own = logging.getLevelName(level.upper())
    libraries = own if level in ("debug", "error") else logging.WARNING
    root.setLevel(libraries)
    logging.getLogger("longspan").setLevel(own)
    # uvicorn's access log is asked for by a flag of its own.
    logging.getLogger("uvicorn.access").setLevel(logging.INFO if access_log else logging.WARNING)


class _TextFormatter(logging.Formatter):
    """2026-01-31 12:00:00.123 INFO longspan.requests: request id=a route=/v1/completions"""

    def __init__(self) -> None:
        super().__init__("%(asctime)s.%(msecs)03d %(levelname)s %(name)s: %(message)s", "%Y-%m-%d %H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:
        pairs = [f"{key}={_word(value)}" for key, value in _fields(record).items()]
        return " ".join([super().formatMessage(record), *pairs])


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        } | _fields(record)
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str)


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    """Those that have a value."""
    fields: dict[str, Any] = getattr(record, "fields", {})
    return {key: value for key, value in fields.items() if value is not None}


def _word(value: Any) -> str:
    """A value as one word: in quotes and escaped where it would not be one."""
    if isinstance(value, float):
        return f"{value:.4f}"
    text = ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
    return text if _PLAIN.fullmatch(text) else json.dumps(text)


class _StderrHandler(logging.StreamHandler):
    """Writes to stderr as it is at that moment: it may be another one than when logging was set up."""

    @property
    def stream(self) -> TextIO:
        return sys.stderr

    @stream.setter
    def stream(self, stream: TextIO) -> None:
        pass
