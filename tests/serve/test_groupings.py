"""Every route: a stream adds up to the whole answer, however many tokens come in a step.

A step gives a token today and will give several with speculation; hold-backs, tool calls and usage must not
depend on it.
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from support.scripted import Running
from support.xtml_replies import CALL, CUT_CALL, END, THINK_END, TWO_CALLS

from longspan.engine.output import StepOutput

CHAT, TEXT, RESPONSES, MESSAGES = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
)
FUNCTION = {"name": "f", "parameters": {"type": "object", "properties": {"k": {"type": "string"}}}}
USER = [{"role": "user", "content": "Salut !"}]
PLAIN = "God created the heaven and 하늘 👩‍👩‍👧 the earth. "


def merged(steps: list[StepOutput]) -> StepOutput:
    first, last = steps[0], steps[-1]
    return replace(
        first,
        deltas=[delta for step in steps for delta in step.deltas],
        token_ids=[token for step in steps for token in step.token_ids],
        logprobs=[entry for step in steps for entry in step.logprobs],
        finish=last.finish,
    )


async def grouped(steps: AsyncIterator[StepOutput], size: int) -> AsyncIterator[StepOutput]:
    """`size` steps of a choice in one; what ends a choice is not held back."""
    waiting: dict[tuple[str, int], list[StepOutput]] = {}
    async for step in steps:
        group = waiting.setdefault((step.request_id, step.index), [])
        group.append(step)
        if len(group) == size or step.finish:
            yield merged(group)
            group.clear()


@pytest.fixture
def group_by(server: Running, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    run = server.service.run

    def set_size(size: int) -> None:
        @asynccontextmanager
        async def run_grouped(requests: Any, **options: Any) -> AsyncIterator[AsyncIterator[StepOutput]]:
            async with run(requests, **options) as steps:
                yield grouped(steps, size)

        monkeypatch.setattr(server.service, "run", run_grouped)

    return set_size


def answer(server: Running, path: str, body: dict[str, Any], stream: bool) -> Any:
    """The answer, or all events of a stream, without ids and times that differ from request to request."""
    headers = {"X-Request-Id": "same"}
    found = server.post(path, body | {"stream": stream}, headers=headers)
    assert found.status_code == 200, found.text
    text = re.sub(r"call_[0-9a-f]{32}", "call", found.text)
    text = re.sub(r'"(created|created_at|completed_at|e2e_latency)":[0-9.e-]+', r'"\1":0', text)
    if not stream:
        return json.loads(text)
    lines = [line for line in text.split("\n") if line.startswith("data: ") and line != "data: [DONE]"]
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def chat_of(events: list[dict[str, Any]]) -> Any:
    """Choices and usage of a chat's chunks."""
    choices: dict[int, dict[str, Any]] = {}
    for event in events:
        for part in event["choices"]:
            choice = choices.setdefault(
                part["index"], {"message": {"content": "", "calls": {}}, "tokens": []}
            )
            message, delta = choice["message"], part["delta"]
            message["content"] += delta.get("content", "")
            if "reasoning_content" in delta:
                message["reasoning"] = message.get("reasoning", "") + delta["reasoning_content"]
            for piece in delta.get("tool_calls", ()):
                function = piece["function"]
                call = message["calls"].setdefault(piece["index"], {"arguments": ""} | function)
                if "id" not in piece:
                    call["arguments"] += function["arguments"]
            choice["tokens"] += (part["logprobs"] or {"content": []})["content"]
            choice["end"] = (part["finish_reason"], part.get("stop_reason"))
    return choices, events[-1]["usage"]


def whole_chat(whole: dict[str, Any]) -> Any:
    choices = {}
    for choice in whole["choices"]:
        message = choice["message"]
        calls = {i: call["function"] for i, call in enumerate(message.get("tool_calls", ()))}
        seen: dict[str, Any] = {"content": message["content"] or "", "calls": calls}
        if "reasoning_content" in message:
            seen["reasoning"] = message["reasoning_content"]
        tokens = (choice["logprobs"] or {"content": []})["content"]
        end = (choice["finish_reason"], choice["stop_reason"])
        choices[choice["index"]] = {"message": seen, "tokens": tokens, "end": end}
    return choices, whole["usage"]


def text_of(events: list[dict[str, Any]]) -> Any:
    choices: dict[int, dict[str, Any]] = {}
    for event in events:
        for part in event["choices"]:
            choice = choices.setdefault(part["index"], {"text": "", "logprobs": {}})
            choice["text"] += part["text"]
            for name, column in (part["logprobs"] or {}).items():
                choice["logprobs"].setdefault(name, []).extend(column)
            choice["end"] = (part["finish_reason"], part["stop_reason"])
    return choices, events[-1]["usage"]


def whole_text(whole: dict[str, Any]) -> Any:
    return {
        choice["index"]: {
            "text": choice["text"],
            "logprobs": choice["logprobs"] or {},
            "end": (choice["finish_reason"], choice["stop_reason"]),
        }
        for choice in whole["choices"]
    }, whole["usage"]


def message_of(events: list[dict[str, Any]]) -> Any:
    message: dict[str, Any] = {}
    fields = {"thinking_delta": "thinking", "text_delta": "text", "input_json_delta": "partial_json"}
    for event in events:
        match event["type"]:
            case "message_start":
                message = event["message"]
            case "content_block_start":
                message["content"].append(event["content_block"] | {"partial_json": ""})
            case "content_block_delta":
                field = fields[event["delta"]["type"]]
                message["content"][event["index"]][field] += event["delta"][field]
            case "message_delta":
                message |= event["delta"] | {"usage": event["usage"]}
    for block in message["content"]:
        arguments = block.pop("partial_json")
        if block["type"] == "tool_use" and message["stop_reason"] == "tool_use":
            block["input"] = json.loads(arguments)
    return message


def generated(events: list[dict[str, Any]]) -> Any:
    last = {event.get("index", 0): event for event in events}
    return [last[index] for index in sorted(last)]


ROUTES: dict[str, tuple[Callable, Callable]] = {
    CHAT: (chat_of, whole_chat),
    TEXT: (text_of, whole_text),
    RESPONSES: (lambda events: events[-1]["response"], lambda whole: whole),
    MESSAGES: (message_of, lambda whole: whole),
    "/generate": (generated, lambda whole: whole if isinstance(whole, list) else [whole]),
}
USAGE = {"stream_options": {"include_usage": True}}


@pytest.mark.parametrize(
    ("path", "reply", "body"),
    [
        (CHAT, f"Think halt.{THINK_END}Now halt.{END}", {"stop": ["halt"]}),
        (CHAT, CALL, {"n": 2, "logprobs": True, "top_logprobs": 1}),
        (CHAT, TWO_CALLS, {}),
        (CHAT, CUT_CALL, {"max_tokens": 40}),
        (RESPONSES, CALL, {}),
        (RESPONSES, TWO_CALLS, {}),
        (RESPONSES, CUT_CALL, {"max_output_tokens": 40}),
        (RESPONSES, f"Think halt.{THINK_END}Now halt.{END}", {"stop": ["halt"]}),
        (MESSAGES, CALL, {}),
        (MESSAGES, TWO_CALLS, {}),
        (MESSAGES, "Only thinking", {"max_tokens": 5}),
        (MESSAGES, f"Think halt.{THINK_END}Now halt.{END}", {"stop_sequences": ["halt"]}),
        (TEXT, PLAIN, {"logprobs": 1, "max_tokens": 50, "n": 2}),
        (TEXT, PLAIN, {"stop": ["the earth", "zzz"], "max_tokens": 50, "prompt": ["a", "b"]}),
        ("/generate", PLAIN, {"return_logprob": True, "logprob_start_len": 0, "text": ["a", "bc"]}),
        ("/generate", PLAIN, {"sampling_params": {"stop": ["the earth"], "n": 2}}),
    ],
)
def test_a_stream_adds_up_to_the_whole_answer_for_every_grouping(
    server: Running, group_by: Callable[[int], None], path: str, reply: str, body: dict[str, Any]
) -> None:
    given: dict[str, dict[str, Any]] = {
        CHAT: {"messages": USER, "tools": [{"type": "function", "function": FUNCTION}]},
        RESPONSES: {"input": "Salut !", "tools": [{"type": "function"} | FUNCTION]},
        MESSAGES: {
            "messages": USER,
            "max_tokens": 500,
            "tools": [{"name": "f", "input_schema": FUNCTION["parameters"]}],
            "thinking": {"type": "adaptive"},
        },
        TEXT: {"prompt": "In the beginning"},
        "/generate": {"text": "In the beginning"},
    }
    join, view = ROUTES[path]
    server.say(reply)
    body = given[path] | body
    streamed = body | (USAGE if path in (CHAT, TEXT) else {})
    expected = view(answer(server, path, body, stream=False))
    for size in (1, 2, 3, 7, 1000):
        group_by(size)
        assert view(answer(server, path, body, stream=False)) == expected
        assert join(answer(server, path, streamed, stream=True)) == expected
