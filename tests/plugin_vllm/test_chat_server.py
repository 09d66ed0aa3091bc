"""`longspan cluster serve` as users start it: chats get the answers of `longspan serve`, token for token."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.cluster_servers import Running, read_events, running

from longspan import LLM, SamplingParams

TINY = Path(__file__).parents[2] / "models/k31-tiny"
PORT = 18500
FLAGS = ["--dtype", "float32", "--max-model-len", "2048", "--kv-cache-memory-bytes", str(64 << 20)]
QUESTION = {"role": "user", "content": "What is 417 + 286?"}
PARAMETERS = {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]}
TOOL = {"type": "function", "function": {"name": "calculator", "parameters": PARAMETERS}}
SCHEMA = {"type": "object", "properties": {"sum": {"enum": [702, 703]}}, "required": ["sum"]}
CALLED = {
    "role": "assistant",
    "content": None,
    "reasoning": "I ask.",
    "tool_calls": [
        {
            "id": "1",
            "type": "function",
            "function": {"name": "calculator", "arguments": '{"expression": "1+1"}'},
        }
    ],
}
CHATS: dict[str, dict[str, Any]] = {
    "thinking": {"messages": [QUESTION]},
    "without thinking": {"messages": [QUESTION], "chat_template_kwargs": {"thinking": False}},
    "tools": {"messages": [QUESTION], "tools": [TOOL]},
    "a call and its result": {
        "messages": [QUESTION, CALLED, {"role": "tool", "tool_call_id": "1", "content": "2"}],
        "tools": [TOOL],
    },
    "cut": {"messages": [QUESTION], "max_tokens": 7},
}


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    start = "import sys; from longspan.cli import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", start, "cluster", "serve", str(TINY), "--port", str(PORT), *FLAGS]
    quiet = {"VLLM_NO_USAGE_STATS": "1", "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    with running([*command, "--host", "127.0.0.1"], f"http://127.0.0.1:{PORT}", quiet) as server:
        yield server


@pytest.fixture(scope="module")
def embedded() -> LLM:
    return LLM(TINY, dtype="float32", max_model_len=2048, max_num_seqs=1, threads=1)


def ask(server: Running, **body: Any) -> dict[str, Any]:
    body = {"model": str(TINY), "temperature": 0, "max_tokens": 100, "return_token_ids": True} | body
    response = server.post("/v1/chat/completions", body)
    assert response.status_code == 200, response.text
    return response.json()


@pytest.mark.parametrize("chat", CHATS.values(), ids=CHATS)
def test_a_chat_is_answered_as_by_the_embedded_engine(server, embedded, chat):
    answer = ask(server, **chat)
    choice = answer["choices"][0]
    expected = embedded.chat(
        chat["messages"],
        SamplingParams(max_tokens=chat.get("max_tokens", 100), temperature=0),
        tools=chat.get("tools"),
        thinking=chat.get("chat_template_kwargs", {}).get("thinking", True),
    )[0]
    assert answer["prompt_token_ids"] == expected.prompt_token_ids
    assert choice["token_ids"] == expected.outputs[0].token_ids
    message, reply = choice["message"], expected.outputs[0]
    assert (message["reasoning"], message["content"]) == (reply.reasoning, reply.content)
    calls = [
        (call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls") or ()
    ]
    assert calls == [(call.name, call.arguments) for call in reply.tool_calls]
    assert choice["finish_reason"] == reply.finish_reason


@pytest.mark.parametrize(
    "chat", [*CHATS.values(), {"messages": [QUESTION], "tools": [TOOL], "tool_choice": "required"}]
)
def test_a_stream_adds_up_to_the_whole_answer(server, chat):
    whole = ask(server, **chat)["choices"][0]["message"]
    body = {"model": str(TINY), "temperature": 0, "max_tokens": 100, "stream": True} | chat
    deltas = [
        event["choices"][0]["delta"]
        for event in read_events(server.post("/v1/chat/completions", body))
        if event["choices"]
    ]
    for field in ("reasoning", "content"):
        assert "".join(delta.get(field) or "" for delta in deltas) == (whole[field] or "")
    pieces = [piece["function"] for delta in deltas for piece in delta.get("tool_calls") or ()]
    for field in ("name", "arguments"):
        joined = "".join(piece.get(field) or "" for piece in pieces)
        assert joined == "".join(call["function"][field] for call in whole.get("tool_calls") or ())


def test_an_answer_keeps_to_its_schema_and_thinks_before(server):
    form = {"type": "json_schema", "json_schema": {"name": "sum", "schema": SCHEMA}}
    message = ask(server, messages=[QUESTION], response_format=form)["choices"][0]["message"]
    assert json.loads(message["content"])["sum"] in (702, 703)
    assert message["reasoning"]


def test_a_forced_call_is_made(server):
    body = {"messages": [QUESTION], "tools": [TOOL], "tool_choice": "required"}
    choice = ask(server, **body)["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "calculator" and "expression" in json.loads(
        call["function"]["arguments"]
    )


def test_a_completion_is_constrained_from_its_first_token_on(server):
    body = {
        "model": str(TINY),
        "prompt": "1 2",
        "structured_outputs": {"regex": "[0-9]{3}"},
        "temperature": 0,
    }
    text = server.post("/v1/completions", body).json()["choices"][0]["text"]
    assert len(text) == 3 and text.isdigit()


def test_thinking_ends_at_its_budget(server):
    answer = ask(server, messages=[QUESTION], thinking_token_budget=6)
    message = answer["choices"][0]["message"]
    assert message["content"] and len(message["reasoning"]) < len("0+7+6=13 1+1")


def test_what_cannot_be_rendered_is_a_400_that_names_the_field(server):
    body = {"model": str(TINY), "messages": [QUESTION | {"colour": "red"}]}
    response = server.post("/v1/chat/completions", body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "messages[0].colour"
