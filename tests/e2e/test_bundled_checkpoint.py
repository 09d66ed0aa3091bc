"""The bundled checkpoint behind the real server, asked with the official client what it was trained on.

Questions are fresh ones of `longspan.evaluation`, always the same; most of them must be answered right, and a
stream must say the same as a whole answer for all of them.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.subprocess_server import ServerProcess

from longspan.chat import Tokenizer
from longspan.evaluation.runner import fresh_requests
from longspan.evaluation.skills import Request
from longspan.evaluation.text import Text

ASKED, RIGHT = 16, 13


def body_of(request: Request) -> dict[str, Any]:
    body = {"model": "k31-tiny", "messages": request.messages, "temperature": 0, "max_tokens": 256}
    return body | {"tools": request.tools} if request.tools else body


def whole(server: ServerProcess, body: dict[str, Any]) -> tuple[SimpleNamespace, Any]:
    answer = server.client().chat.completions.create(**body)
    message = answer.choices[0].message.model_dump()
    calls = [{"function": call["function"]} for call in message.get("tool_calls") or ()]
    return SimpleNamespace(
        content=message["content"],
        reasoning=message.get("reasoning_content"),
        tool_calls=calls,
        finish_reason=answer.choices[0].finish_reason,
    ), answer.usage


def streamed(server: ServerProcess, body: dict[str, Any]) -> tuple[SimpleNamespace, Any]:
    content = reasoning = ""
    calls: list[dict[str, str]] = []
    reason = usage = None
    stream = server.client().chat.completions.create(
        **body, stream=True, stream_options={"include_usage": True}
    )
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            delta = choice.delta.model_dump()
            content += delta.get("content") or ""
            reasoning += delta.get("reasoning_content") or ""
            for piece in delta.get("tool_calls") or ():
                if piece["id"]:
                    calls.append({"function": {"arguments": "", "name": piece["function"]["name"]}})
                calls[piece["index"]]["function"]["arguments"] += piece["function"]["arguments"]
            reason = choice.finish_reason or reason
    return SimpleNamespace(
        content=content or None, reasoning=reasoning or None, tool_calls=calls, finish_reason=reason
    ), usage


@pytest.mark.parametrize(
    ("skill", "length"),
    [
        ("retrieval", 512),
        ("retrieval", 1500),
        ("addition", None),
        ("tool_call", None),
        ("tool_result", None),
        ("short_answer", None),
    ],
)
def test_the_server_answers_streaming_and_not(
    tiny_server: ServerProcess, tiny_dir: Path, skill: str, length: int | None
) -> None:
    tokenizer, text = Tokenizer.from_dir(tiny_dir), Text.read(tiny_dir / "heldout.txt")
    requests = fresh_requests(skill, ASKED, text, 20, length, lambda part: len(tokenizer.encode(part)))
    bodies = [body_of(request) for request in requests]
    with ThreadPoolExecutor(ASKED) as pool:
        answers = list(pool.map(lambda body: whole(tiny_server, body), bodies))
        streams = list(pool.map(lambda body: streamed(tiny_server, body), bodies))
    for (_, first), (_, second) in zip(answers, streams, strict=True):
        assert second.prompt_tokens_details.cached_tokens >= (second.prompt_tokens - 1) // 64 * 64
        second.prompt_tokens_details = first.prompt_tokens_details
    assert streams == answers
    assert sum(bool(reply.reasoning) for reply, _ in answers) >= RIGHT
    right = sum(request.turn.check(reply) for request, (reply, _) in zip(requests, answers, strict=True))
    assert right >= RIGHT, answers
    expected = "tool_calls" if skill == "tool_call" else "stop"
    assert sum(reply.finish_reason == expected for reply, _ in answers) >= RIGHT


def test_the_question_of_the_welcome_is_answered(tiny_server: ServerProcess) -> None:
    assert "What is 417 + 286?" in tiny_server.welcome
    body = {"model": "k31-tiny", "messages": [{"role": "user", "content": "What is 417 + 286?"}]}
    reply, _ = whole(tiny_server, body | {"temperature": 0})
    assert "703" in reply.content


def test_a_tool_is_called_and_its_result_told(tiny_server: ServerProcess) -> None:
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    function = {"name": "get_weather", "description": "Get the weather of a city.", "parameters": parameters}
    body: dict[str, Any] = {
        "model": "k31-tiny",
        "messages": [{"role": "user", "content": "What is the weather in Paris?"}],
        "tools": [{"type": "function", "function": function}],
        "temperature": 0,
    }
    client = tiny_server.client()
    message = client.chat.completions.create(**body).choices[0].message
    (call,) = message.tool_calls or ()
    assert (call.function.name, "Paris" in call.function.arguments) == ("get_weather", True)
    result = {"role": "tool", "tool_call_id": call.id, "content": "21 degrees"}
    body["messages"] += [message.model_dump(), result]
    told = client.chat.completions.create(**body).choices[0].message
    assert "21" in (told.content or "") and not told.tool_calls


@pytest.mark.parametrize("thinking", [True, False])
def test_a_required_call_is_made_whatever_was_said(tiny_server: ServerProcess, thinking: bool) -> None:
    function = {"name": "phone", "parameters": {"type": "object", "properties": {"name": {"type": "string"}}}}
    answer = tiny_server.client().chat.completions.create(
        model="k31-tiny",
        messages=[{"role": "user", "content": "Call Anna."}],
        tools=[{"type": "function", "function": function}],
        tool_choice="required",
        temperature=0,
        max_tokens=300,
        extra_body={"chat_template_kwargs": {"thinking": thinking}},
    )
    (call,) = answer.choices[0].message.tool_calls or ()
    assert call.function.name == "phone"
    assert answer.choices[0].finish_reason == "tool_calls"
