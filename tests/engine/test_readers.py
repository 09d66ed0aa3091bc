from __future__ import annotations

import pytest

from longspan.chat import (
    ContentDelta,
    ReasoningDelta,
    ReplyParser,
    Segment,
    Tokenizer,
    ToolCallEnd,
    collect,
)
from longspan.engine.output import FinishReason
from longspan.engine.readers import ChatReader, TextReader, TokenReader
from longspan.engine.request import SamplingParams

CALL = '<|open|>call tool="f" index="1"<|sep|><|close|>call<|sep|>'
REPLY = (
    "let me STOP and think<|close|>think<|sep|><|open|>response<|sep|>It is STOP here<|close|>response<|sep|>"
)


def ids(tokenizer: Tokenizer, markup: str) -> list[int]:
    return tokenizer.encode_segments([Segment(markup, special=True)])


def read_text(tokenizer: Tokenizer, token_ids: list[int], reason: FinishReason = "length", **params):
    """-> text, reason, stop string, tokens that were read."""
    reader = TextReader(tokenizer, SamplingParams(**params))
    deltas = []
    count = 0
    for token_id in token_ids:
        deltas += reader.push(token_id)
        count += 1
        if reader.done:
            break
    rest, reason = reader.finish(reason)
    return "".join(delta.text for delta in deltas + rest), reason, reader.stop_string, count


def read_chat(
    tokenizer: Tokenizer,
    markup: str,
    reason: FinishReason = "stop",
    *,
    thinking: bool = True,
    max_calls: int | None = None,
    **params,
):
    """-> reply, reason, stop string, events."""
    reader = ChatReader(
        ReplyParser(tokenizer, thinking=thinking), SamplingParams(**params), max_calls=max_calls
    )
    events = []
    for token_id in ids(tokenizer, markup):
        events += reader.push(token_id)
        if reader.done:
            break
    rest, reason = reader.finish(reason)
    events += rest
    return collect(events), reason, reader.stop_string, events


def test_text_of_tokens_comes_as_they_come(tokenizer: Tokenizer) -> None:
    reader = TextReader(tokenizer, SamplingParams())
    assert [reader.push(byte) for byte in b"hi"] != [[], []]
    assert read_text(tokenizer, list(b"hello"))[0] == "hello"


@pytest.mark.parametrize("text", ["안녕 👩‍👩‍👧!", "déjà", "a\u0301"])
def test_characters_of_several_tokens_come_whole(tokenizer: Tokenizer, text: str) -> None:
    assert read_text(tokenizer, list(text.encode()))[0] == text


def test_a_character_cut_off_at_the_end_is_shown_as_broken(tokenizer: Tokenizer) -> None:
    assert read_text(tokenizer, list("aé".encode())[:-1])[0] == "a\ufffd"


def test_special_tokens_are_silent_unless_asked_for(tokenizer: Tokenizer) -> None:
    token_ids = [97, tokenizer.special["<|sep|>"], 98]
    assert read_text(tokenizer, token_ids)[0] == "ab"
    assert read_text(tokenizer, token_ids, skip_special_tokens=False)[0] == "a<|sep|>b"


@pytest.mark.parametrize(
    ("stop", "include", "expected"),
    [
        ("wor", False, ("hello ", "wor", 9)),
        ("wor", True, ("hello wor", "wor", 9)),
        (["zzz", "o w"], False, ("hell", "o w", 7)),
        ("h", False, ("", "h", 1)),
        ("worlds", False, ("hello world", None, 11)),
    ],
)
def test_a_stop_string_ends_the_text_before_or_after_it(
    tokenizer: Tokenizer, stop: str | list[str], include: bool, expected: tuple
) -> None:
    text, reason, matched, count = read_text(
        tokenizer, list(b"hello world"), stop=stop, include_stop_str_in_output=include
    )
    assert (text, matched, count) == expected
    assert reason == "length"


def test_what_could_become_a_stop_string_is_held_back_and_then_shown(tokenizer: Tokenizer) -> None:
    reader = TextReader(tokenizer, SamplingParams(stop="abcd"))
    assert [len(reader.push(byte)) for byte in b"xabc"] == [1, 0, 0, 0]
    assert [delta.text for delta in reader.push(ord("z"))] == ["abcz"]
    assert reader.push(ord("a")) == []
    assert [delta.text for delta in reader.finish("length")[0]] == ["a"]


def test_stop_strings_do_not_count_within_min_tokens(tokenizer: Tokenizer) -> None:
    assert read_text(tokenizer, list(b"ababab"), stop="ab", min_tokens=2)[0] == "ab"
    assert read_text(tokenizer, list(b"ababab"), stop="ab", min_tokens=3)[0] == "abab"


def test_a_model_without_a_tokenizer_is_read_in_silence() -> None:
    reader = TokenReader()
    assert reader.push(3) == []
    assert reader.finish("stop") == ([], "stop")


def test_a_chat_is_read_into_reasoning_and_content(tokenizer: Tokenizer) -> None:
    reply, reason, _, _ = read_chat(tokenizer, REPLY)
    assert (reply.reasoning, reply.content) == ("let me STOP and think", "It is STOP here")
    assert reason == "stop"


@pytest.mark.parametrize(("include", "content"), [(False, "It is "), (True, "It is STOP")])
def test_stop_strings_apply_to_the_answer_only(tokenizer: Tokenizer, include: bool, content: str) -> None:
    reply, reason, matched, _ = read_chat(tokenizer, REPLY, stop="STOP", include_stop_str_in_output=include)
    assert (reply.reasoning, reply.content) == ("let me STOP and think", content)
    assert (reason, matched) == ("stop", "STOP")


def test_stop_strings_do_not_apply_to_tool_calls(tokenizer: Tokenizer) -> None:
    call = (
        '<|open|>tools<|sep|><|open|>call tool="STOP" index="1"<|sep|>'
        '<|open|>argument key="q" type="string"<|sep|>STOP<|close|>argument<|sep|><|close|>call<|sep|>'
    )
    reply, reason, matched, _ = read_chat(tokenizer, "<|close|>think<|sep|>" + call, stop="STOP")
    assert matched is None
    assert [(c.name, c.arguments) for c in reply.tool_calls] == [("STOP", '{"q": "STOP"}')]
    assert reason == "tool_calls"


def test_a_held_back_beginning_of_a_stop_string_comes_before_the_tool_call(tokenizer: Tokenizer) -> None:
    markup = "Now ST<|close|>response<|sep|><|open|>tools<|sep|>" + CALL
    reply, reason, _, events = read_chat(tokenizer, markup, thinking=False, stop="STOP")
    assert (reply.content, reason) == ("Now ST", "tool_calls")
    last_text = max(i for i, event in enumerate(events) if isinstance(event, ContentDelta))
    assert all(isinstance(event, ContentDelta) for event in events[: last_text + 1])


def test_a_reply_cut_in_its_reasoning_has_no_content(tokenizer: Tokenizer) -> None:
    reply, reason, _, events = read_chat(tokenizer, "let me", reason="length")
    assert (reply.reasoning, reply.content, reason) == ("let me", None, "length")
    assert all(isinstance(event, ReasoningDelta) for event in events)


@pytest.mark.parametrize(("max_calls", "calls"), [(None, 2), (3, 2), (2, 2), (1, 1)])
def test_the_reply_ends_after_so_many_calls(tokenizer: Tokenizer, max_calls: int | None, calls: int) -> None:
    markup = "<|close|>response<|sep|><|open|>tools<|sep|>" + CALL * 2
    reply, reason, matched, events = read_chat(tokenizer, markup, thinking=False, max_calls=max_calls)
    assert len(reply.tool_calls) == calls
    assert sum(isinstance(event, ToolCallEnd) for event in events) == calls
    assert (reason, matched) == ("tool_calls", None)


def test_calls_that_are_not_allowed_are_left_out(tokenizer: Tokenizer) -> None:
    markup = "Hi<|close|>response<|sep|><|open|>tools<|sep|>" + CALL * 2
    reply, reason, _, _ = read_chat(tokenizer, markup, thinking=False, max_calls=0)
    assert (reply.content, reply.tool_calls, reason) == ("Hi", (), "stop")


def test_a_call_that_was_cut_off_is_not_the_reason(tokenizer: Tokenizer) -> None:
    markup = "<|close|>response<|sep|><|open|>tools<|sep|>" + CALL[: CALL.index("<|close|>")]
    assert read_chat(tokenizer, markup, thinking=False)[1] == "stop"
    assert (
        read_chat(tokenizer, markup + "<|close|>call<|sep|>", reason="length", thinking=False)[1] == "length"
    )
