"""Counts of tokens: the same streamed or not, equal to the ids that went in and came out."""

from __future__ import annotations

from typing import Any

import pytest
from support.scripted import Running

THINK_END = "<|close|>think<|sep|><|open|>response<|sep|>"
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}
CALL = (
    f"Hm.{THINK_END}<|close|>response<|sep|><|open|>tools<|sep|>"
    '<|open|>call tool="f" index="1"<|sep|>'
    '<|open|>argument key="k" type="string"<|sep|>v<|close|>argument<|sep|>'
    "<|close|>call<|sep|><|close|>tools<|sep|><|close|>message<|sep|><|end_of_msg|>"
)


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize(
    ("reply", "fields"),
    [
        (f"One two three{THINK_END}Four five 한국어.<|close|>response<|sep|><|end_of_msg|>", {}),
        (CALL, {"tools": [TOOL]}),
        (f"A thought without an end, cut off{THINK_END}x<|end_of_msg|>", {"max_tokens": 4}),
        (f"Never mind{THINK_END}One stop two<|end_of_msg|>", {"stop": "stop"}),
    ],
)
def test_streamed_usage_equals_whole_usage_and_the_ids(
    server: Running, n: int, reply: str, fields: dict[str, Any]
) -> None:
    server.say(reply)
    messages = [{"role": "user", "content": "Count."}]
    body: dict[str, Any] = {"model": "tiny", "messages": messages, "n": n, "logprobs": True} | fields
    whole = server.client().chat.completions.create(**body)
    assert whole.usage
    ids = [entry for choice in whole.choices for entry in (choice.logprobs and choice.logprobs.content) or ()]
    assert whole.usage.completion_tokens == len(ids)
    assert whole.usage.prompt_tokens == len(server.model.script.prompts[-1])
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens

    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(server.client().chat.completions.create(**body, stream=True, stream_options=options))
    assert chunks[-1].choices == [] and chunks[-1].usage == whole.usage
    running = [chunk.usage.completion_tokens for chunk in chunks if chunk.usage]
    assert running == sorted(running)
    assert [chunk for chunk in chunks if not chunk.choices] == chunks[-1:]


def test_usage_is_streamed_only_if_asked_for(server: Running) -> None:
    server.say(f"x{THINK_END}y")
    messages: Any = [{"role": "user", "content": "x"}]
    for options in (None, {"include_usage": False}):
        chunks = server.client().chat.completions.create(
            model="tiny", messages=messages, stream=True, stream_options=options
        )
        assert all(chunk.usage is None and chunk.choices for chunk in chunks)


def test_reasoning_tokens_are_those_before_the_channel_closes(server: Running) -> None:
    thought = "One two three"
    server.say(f"{thought}{THINK_END}Four<|end_of_msg|>")
    body = {"messages": [{"role": "user", "content": "x"}]}
    details = server.post("/v1/chat/completions", body).json()["usage"]["completion_tokens_details"]
    assert details["reasoning_tokens"] == len(server.engine.tokenizer.encode(thought))
    server.say("Four<|end_of_msg|>")
    details = server.post("/v1/chat/completions", body | {"thinking": False}).json()["usage"]
    assert details["completion_tokens_details"]["reasoning_tokens"] == 0


def test_completions_count_all_prompts_once_and_all_choices(server: Running) -> None:
    length = server.say("a b c") + 1  # and the end of the message
    body = {"model": "tiny", "prompt": [[1, 2, 3], [4]], "n": 2, "max_tokens": 50}
    whole = server.client().completions.create(**body).usage
    assert whole and (whole.prompt_tokens, whole.completion_tokens) == (4, 4 * length)
    *_, last = server.client().completions.create(**body, stream=True, stream_options={"include_usage": True})
    assert last.usage == whole and last.choices == []
