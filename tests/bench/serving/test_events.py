"""Server-sent events and answers: the same wherever the bytes are cut."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longspan.bench.serving.events import EventReader
from longspan.bench.serving.reply import ExchangeError, Reply

STREAM = (
    b": a comment\n\ndata: one\n\ndata:two\r\ndata: lines\r\n\r\nevent: x\nid: 7\ndata:  spaced\n\n"
    b"retry: 5\n\ndata: \xc3\xa9\r\rdata: [DONE]\n\ndata: cut off"
)
EVENTS = [b"one", b"two\nlines", b" spaced", b"\xc3\xa9", b"[DONE]"]


def events_of(*parts: bytes) -> list[bytes]:
    reader = EventReader()
    return [event for part in parts for event in reader.feed(part)]


def test_events_are_the_same_for_every_split() -> None:
    assert events_of(STREAM) == EVENTS
    for i in range(len(STREAM) + 1):
        assert events_of(STREAM[:i], STREAM[i:]) == EVENTS, i
    assert events_of(*(STREAM[i : i + 1] for i in range(len(STREAM)))) == EVENTS


@given(st.lists(st.integers(0, len(STREAM)), max_size=6))
def test_events_are_the_same_for_any_splits(cuts: list[int]) -> None:
    edges = [0, *sorted(cuts), len(STREAM)]
    assert events_of(*(STREAM[a:b] for a, b in pairwise(edges))) == EVENTS


@given(st.lists(st.binary(max_size=9), max_size=9))
def test_any_bytes_can_be_read(parts: list[bytes]) -> None:
    assert events_of(*parts) == events_of(b"".join(parts)) or b"\r" in b"".join(parts)


def sse(*events: Any) -> bytes:
    return b"".join(
        b"data: " + (e if isinstance(e, bytes) else json.dumps(e).encode()) + b"\n\n" for e in events
    )


def text(said: str, finish: str | None = None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": said, "finish_reason": finish}]}


def delta(finish: str | None = None, **fields: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": fields, "finish_reason": finish}]}


USAGE = {"prompt_tokens": 9, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 8}}


def test_a_completion_is_timed_by_its_chunks_and_counted_by_its_usage() -> None:
    reply = Reply()
    reply.feed(sse(text("In ")), 1.0)
    reply.feed(sse(text("the"), text(" be")), 2.0)  # two in one read
    reply.feed(sse(text("", "length")), 3.0)
    reply.feed(sse({"choices": [], "usage": USAGE}, b"[DONE]"), 4.0)
    reply.close()
    assert (reply.chunks, reply.ended, reply.text) == ([1.0, 2.0, 2.0], 3.0, "In the be")
    assert (reply.prompt_tokens, reply.output_tokens, reply.cached_tokens) == (9, 4, 8)
    assert reply.finish_reason == "length"


def test_the_role_of_a_chat_is_no_token_and_reasoning_is() -> None:
    reply = Reply()
    reply.feed(sse(delta(role="assistant", content="")), 1.0)
    reply.feed(sse(delta(reasoning_content="Hm.")), 2.0)
    reply.feed(sse(delta(content="Yes")), 3.0)
    reply.feed(sse(delta(tool_calls=[{"index": 0}])), 4.0)
    reply.feed(sse(delta("stop")), 5.0)
    assert (reply.chunks, reply.ended) == ([2.0, 3.0, 4.0], 5.0)
    assert (reply.text, reply.reasoning) == ("Yes", {"reasoning_content": "Hm."})


def test_reasoning_under_two_names_is_one_chunk_and_goes_back_once() -> None:
    reply = Reply()
    reply.feed(sse(delta(reasoning="Hm.", reasoning_content="Hm.")), 1.0)
    assert (reply.chunks, reply.reasoning) == ([1.0], {"reasoning_content": "Hm."})


def test_without_usage_chunks_are_counted() -> None:
    reply = Reply()
    reply.feed(sse(text("a"), text("b", "stop")), 1.0)
    assert (reply.usage_tokens, reply.output_tokens) == (None, 2)


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (sse({"error": {"message": "out of pages"}}), "error in the stream"),
        (b"data: {\n\n", "not JSON"),
        (b"data: 3\n\n", "no answer"),
        (sse({"choices": ["x"]}), "no answer"),
        (sse({"choices": {"a": 1}}), "no answer"),
        (sse(text("half")), "cut off"),
        (b"", "cut off"),
        (b"<html>", "cut off"),
    ],
)
def test_what_is_no_answer_is_an_error_of_its_kind(data: bytes, kind: str) -> None:
    reply = Reply()
    with pytest.raises(ExchangeError) as caught:
        reply.feed(data, 1.0)
        reply.close()
    assert caught.value.kind == kind
