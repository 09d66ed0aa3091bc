"""The log of requests: one line for each that was answered, none of its text, no storms."""

from __future__ import annotations

import logging
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from support.scripted import Hold, Running

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
SECRET = "xylophone"


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture, server: Running) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, "longspan")
    return caplog


def fields(caplog: pytest.LogCaptureFixture, count: int) -> list[dict[str, Any]]:
    """Those of the lines about requests; waits for so many, for they come when the client has its answer."""
    for _ in range(1000):
        found: list[Any] = [r for r in caplog.records if r.name == "longspan.requests"]
        if len(found) >= count:
            break
        time.sleep(0.005)
    assert len(found) == count
    return [record.fields for record in found]


@pytest.mark.parametrize("stream", [False, True])
def test_a_finished_request_is_one_line_with_its_numbers(
    server: Running, lines: pytest.LogCaptureFixture, stream: bool
) -> None:
    length = server.say("Fine.") + 1
    body = {"prompt": [[1, 2, 3], [4, 5]], "n": 2, "stream": stream, "max_tokens": 40}
    answer = server.post(TEXT, body, headers={"X-Request-Id": "mine"})
    (found,) = fields(lines, 1)
    assert found.pop("id") == answer.headers["X-Request-Id"] == "mine"
    assert 0 < found.pop("ttft") <= found.pop("seconds")
    numbers = {"prompt_tokens": 5, "cached_tokens": 0, "output_tokens": 4 * length}
    nothing = {"trace_id": None, "error": None, "abandoned": None}
    assert found == {"route": TEXT, "status": 200, "finish": ["stop"] * 4} | numbers | nothing


def test_what_was_said_is_never_logged(server: Running, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    server.say(f"{SECRET} and {SECRET}")
    message = {"role": "user", "content": SECRET}
    for stream in (False, True):
        server.post(TEXT, {"prompt": SECRET, "stop": [f"{SECRET}!"], "stream": stream})
        server.post(CHAT, {"messages": [message], "stream": stream, "user": SECRET})
        server.post("/tokenize", {"prompt": SECRET})
    ours = [record for record in caplog.records if not record.name.startswith("http")]
    assert len(ours) >= 6
    assert not any(SECRET in f"{record.getMessage()} {record.__dict__}" for record in ours)


def test_looking_is_not_logged_and_a_refusal_is(server: Running, lines: pytest.LogCaptureFixture) -> None:
    for path in ("/health", "/metrics", "/v1/models", "/nowhere"):
        server.get(path)
    server.post(TEXT, {"prompt": ""})
    (found,) = fields(lines, 1)
    assert (found["route"], found["status"]) == (TEXT, 400)
    assert "output_tokens" not in found and found["finish"] is None


def test_a_failure_names_its_kind(server: Running, lines: pytest.LogCaptureFixture) -> None:
    def fail() -> None:
        server.model.before_step = lambda: None
        raise RuntimeError("broken kernel")

    server.model.before_step = fail
    server.post(TEXT, {"prompt": "x"})
    (found,) = fields(lines, 1)
    assert (found["status"], found["error"]) == (500, "LongspanError")


def test_a_request_that_was_ended_from_outside_is_a_line_as_any_other(
    server: Running, lines: pytest.LogCaptureFixture
) -> None:
    server.say("word ", repeat=3000)
    hold = Hold(server.model, after=2)
    body = {"prompt": "x", "max_tokens": 4000, "ignore_eos": True, "request_id": "mine"}
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(server.post, TEXT, body)
        assert hold.reached.wait(30)
        assert server.post("/abort_request", {"rid": "mine"}).json() == {"aborted": 1}
        hold.release()
        assert answer.result().status_code == 499
    found = {line["route"]: line for line in fields(lines, 2)}[TEXT]
    assert (found["status"], found["error"], found["abandoned"]) == (499, "AbortedError", None)


@pytest.mark.parametrize("stream", [False, True])
def test_a_storm_of_hang_ups_is_silent_but_at_debug(
    server: Running, caplog: pytest.LogCaptureFixture, stream: bool
) -> None:
    caplog.set_level(logging.DEBUG, "longspan")
    server.say("word ", repeat=3000)
    for _ in range(10):
        hold = Hold(server.model)
        endless = {"prompt": "x", "max_tokens": 4000, "ignore_eos": True, "stream": stream}
        server.post_and_leave(TEXT, endless, hold.reached)
        hold.release()
    assert all(line["abandoned"] for line in fields(caplog, 10))
    ours = [record for record in caplog.records if record.name.startswith("longspan")]
    assert {record.levelno for record in ours} == {logging.DEBUG}
    assert len(ours) <= 20, "few lines for each, even so"
