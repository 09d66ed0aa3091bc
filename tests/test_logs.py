"""How a record looks as text and as JSON, and which records are let through."""

from __future__ import annotations

import io
import json
import logging
import sys
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longspan import logs

LOGGERS = ("", "longspan", "uvicorn.access")


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    """Logging of this process as it was before."""
    root = logging.getLogger()
    handlers, levels = root.handlers, {name: logging.getLogger(name).level for name in LOGGERS}
    yield
    root.handlers = handlers
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)


def logged(level: str, format: str, name: str, at: int, message: str, **fields: object) -> str:
    """What stands in the log after one record."""
    stream = io.StringIO()
    logs.configure(level, format, stream=stream)
    logging.getLogger(name).log(at, message, extra={"fields": fields} if fields else None)
    return stream.getvalue()


def test_fields_follow_the_message_as_words() -> None:
    line = logged(
        "info", "text", "longspan.x", logging.INFO, "request", id="a-1", ttft=0.12345678, finish=["stop"]
    )
    assert line.endswith(" INFO longspan.x: request id=a-1 ttft=0.1235 finish=stop\n")


def test_json_has_an_object_per_line() -> None:
    line = logged("info", "json", "longspan.x", logging.INFO, "request", id="a", status=200, ttft=None)
    found = json.loads(line)
    assert found.pop("time").endswith("+00:00")
    assert found == {"level": "info", "logger": "longspan.x", "message": "request", "id": "a", "status": 200}


def test_an_exception_stays_with_its_record() -> None:
    stream = io.StringIO()
    logs.configure("info", "json", stream=stream)
    try:
        raise RuntimeError("broken")
    except RuntimeError:
        logging.getLogger("longspan").exception("a step failed")
    (line,) = stream.getvalue().splitlines()
    assert "RuntimeError: broken" in json.loads(line)["exception"]


@pytest.mark.parametrize("level", logs.LEVELS)
def test_the_level_is_that_of_our_own_records(level: str) -> None:
    for name in logs.LEVELS:
        shown = logged(level, "text", "longspan.engine", logging.getLevelName(name.upper()), "x") != ""
        assert shown == (logs.LEVELS.index(name) >= logs.LEVELS.index(level))


def test_libraries_are_heard_from_warning_on_unless_debugging() -> None:
    for level, shown in (("debug", True), ("info", False), ("warning", False)):
        assert bool(logged(level, "text", "httpx", logging.INFO, "x")) == shown
    assert logged("info", "text", "httpx", logging.WARNING, "x")
    assert not logged("error", "text", "httpx", logging.WARNING, "x")


@pytest.mark.parametrize("asked", [False, True])
def test_the_access_log_has_a_flag_of_its_own(asked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("uvicorn.access"), "propagate", True)
    stream = io.StringIO()
    logs.configure("warning", "text", access_log=asked, stream=stream)
    logging.getLogger("uvicorn.access").info('%s - "%s %s HTTP/%s" %d', "1.2.3.4:5", "GET", "/", "1.1", 200)
    assert ('1.2.3.4:5 - "GET / HTTP/1.1" 200' in stream.getvalue()) == asked


def test_it_is_set_up_anew_each_time_and_writes_to_stderr_by_default() -> None:
    logs.configure("info", "json")
    logs.configure("info", "text")
    (handler,) = logging.getLogger().handlers
    assert isinstance(handler, logging.StreamHandler) and handler.stream is sys.stderr


@settings(max_examples=50)
@given(value=st.text())
def test_no_value_can_forge_a_line_or_a_field(value: str) -> None:
    line = logged("info", "text", "longspan.x", logging.INFO, "request", id=value, status=200)
    assert line.count("\n") == 1 and line.isascii()
    head, rest = line.split(" id=")[0], line.split(" id=", 1)[1]
    assert head.endswith("request")
    if rest.startswith('"'):
        found, end = json.JSONDecoder().raw_decode(rest)
        assert (found, rest[end:]) == (value, " status=200\n")
    else:
        assert rest == f"{value} status=200\n"
    assert json.loads(logged("info", "json", "x", logging.WARNING, "m", id=value))["id"] == value
