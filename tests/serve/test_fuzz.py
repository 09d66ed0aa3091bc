"""Bodies that are nearly right, texts that are hardly JSON, and replies of any tokens, on all routes.

Whatever comes, the answer is as /openapi.json says, nothing is a server error, and the server goes on.
LONGSPAN_FUZZ multiplies the number of examples.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic_core import from_json
from support.scripted import Reciter, Running, ScriptedModel, running_server

from longspan.chat import Tokenizer
from longspan.chat.xtml import CONTROL_TOKENS
from longspan.errors import RequestError
from longspan.serve.json_text import read_json

FUZZ = int(os.environ.get("LONGSPAN_FUZZ", "1"))
CHAT, TEXT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
GENERATE = "/generate"
RIGHT = {
    CHAT: {"messages": [{"role": "user", "content": "x"}]},
    TEXT: {"prompt": "x"},
    RESPONSES: {"input": "x"},
    MESSAGES: {"messages": [{"role": "user", "content": "x"}], "max_tokens": 20},
    GENERATE: {"text": "x"},
}


def fuzz(examples: int) -> Any:
    return settings(max_examples=examples * FUZZ, suppress_health_check=list(HealthCheck))


@pytest.fixture(scope="module")
def fuzzed(tokenizer: Tokenizer) -> Iterator[Running]:
    """A server of short contexts, so that no request takes long."""
    model = ScriptedModel(tokenizer, Reciter(tokenizer))
    with running_server(model, tokenizer, num_pages=32, page_size=8, max_queue=8) as server:
        server.say("thought<|close|>think<|sep|><|open|>response<|sep|>answer<|close|>response<|sep|>")
        yield server
        server.wait_until_idle()


@pytest.fixture(scope="module")
def client(fuzzed: Running) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=fuzzed.url, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def document(client: httpx.Client) -> dict[str, Any]:
    return client.get("/openapi.json").json()


def check(document: dict[str, Any], path: str, response: httpx.Response) -> None:
    """The answer is one of those that the document describes, and no server error but a deadline's."""
    assert response.status_code < 500 or response.status_code == 504, response.text
    described = document["paths"][path]["post"]["responses"]
    status = str(response.status_code)
    content = described[status if status in described else "default"]["content"]
    kind = response.headers["content-type"].partition(";")[0]
    assert kind in content
    if kind == "application/json":
        jsonschema.validate(response.json(), content[kind]["schema"])
    else:
        for event in events_of(response):
            assert isinstance(event, dict)


def events_of(response: httpx.Response) -> list[dict[str, Any]]:
    """The JSON objects of a stream, which must have ended in order."""
    assert response.text.endswith("\n\n")
    lines = [line for line in response.text.split("\n") if line.startswith("data: ")]
    return [json.loads(line[6:]) for line in lines if line != "data: [DONE]"]


# --- bodies --------------------------------------------------------------------------------------

ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 2) | st.sampled_from([64, 2**31, 2**63, 10**30, -(10**30)]),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(st.characters(), max_size=4),
    st.sampled_from(["<|end_of_msg|>", "\ud800", "\x00", "auto", "none", "required", "text", "json_object"]),
)
ANY = st.recursive(
    ODD, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
)
WORDS = st.sampled_from(["", "x", "안녕", "<|open|>", "a b c", "\ud800"])
FUNCTION = st.fixed_dictionaries(
    {"name": st.sampled_from(["f", "a.b", ""]) | ODD},
    optional={
        "description": WORDS | ODD,
        "parameters": st.sampled_from(
            [
                {"type": "object", "properties": {"a": {"type": "string"}}},
                {"type": "object", "properties": {"a": {"$ref": "#"}}},
                {"type": "wrong"},
                {"$ref": "#/nowhere"},
                {"properties": {"a": {"pattern": "("}}},
            ]
        )
        | ANY,
        "strict": ODD,
    },
)
TOOLS = st.lists(
    st.fixed_dictionaries({"type": st.just("function"), "function": FUNCTION})
    | FUNCTION.map(lambda function: {"type": "function"} | function)
    | ANY,
    max_size=2,
)
PART_TYPES = st.sampled_from(["text", "input_text", "image_url", "refusal", "tool_use", "tool_result"])
PARTS = st.lists(
    st.fixed_dictionaries(
        {"type": PART_TYPES | ODD},
        optional={
            "text": WORDS | ODD,
            "refusal": ODD,
            "id": ODD,
            "tool_use_id": WORDS,
            "input": ANY,
            "name": WORDS,
        },
    ),
    max_size=2,
)
ARGUMENTS = st.just('{"a": 1}') | ANY
CALL = st.fixed_dictionaries(
    {"type": st.just("function") | ODD},
    optional={
        "id": WORDS | ODD,
        "function": st.fixed_dictionaries({}, optional={"name": WORDS, "arguments": ARGUMENTS}),
    },
)
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "system", "assistant", "tool", "developer"]) | ODD},
    optional={
        "content": WORDS | PARTS | ANY,
        "tool_calls": st.lists(CALL, max_size=2) | ODD,
        "tool_call_id": WORDS | ODD,
        "reasoning_content": WORDS | ODD,
        "name": WORDS | ODD,
        "tools": TOOLS,
    },
)
ITEM = st.fixed_dictionaries(
    {"type": st.sampled_from(["message", "reasoning", "function_call", "function_call_output"]) | ANY},
    optional={
        "role": st.sampled_from(["user", "assistant"]) | ODD,
        "content": WORDS | PARTS,
        "call_id": WORDS | ODD,
        "name": WORDS | ODD,
        "arguments": st.just("{}") | ODD,
        "output": WORDS | PARTS | ODD,
        "summary": ANY,
    },
)
JSON_SCHEMA = st.fixed_dictionaries({}, optional={"schema": ANY, "name": WORDS})
FORMAT = st.fixed_dictionaries(
    {"type": st.sampled_from(["text", "json_object", "json_schema", "regex"]) | ANY},
    optional={
        "json_schema": st.fixed_dictionaries({}, optional={"schema": ANY, "name": WORDS}),
        "schema": ANY,
    },
)
FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "stream": st.booleans(),
    "stream_options": st.fixed_dictionaries({}, optional={"include_usage": st.booleans()}) | ANY,
    "n": st.integers(1, 3) | ODD,
    "max_tokens": st.integers(1, 30) | ODD,
    "temperature": st.floats(0, 2) | ODD,
    "top_p": st.floats(0.1, 1) | ODD,
    "top_k": st.integers(-1, 50) | ODD,
    "seed": st.integers(-5, 5) | ODD,
    "stop": WORDS | st.lists(WORDS, max_size=3) | ANY,
    "stop_token_ids": st.lists(st.integers(-1, 2050) | ODD, max_size=3),
    "logprobs": st.integers(0, 3) | st.booleans() | ODD,
    "top_logprobs": st.integers(0, 3) | ODD,
    "prompt_logprobs": st.integers(0, 2) | ODD,
    "echo": st.booleans() | ODD,
    "logit_bias": st.dictionaries(
        st.sampled_from(["1", "1794", "-1", "x", "99999"]), st.integers(-101, 101) | ODD
    ),
    "min_tokens": st.integers(0, 5) | ODD,
    "ignore_eos": st.booleans() | ODD,
    "tools": TOOLS,
    "tool_choice": st.sampled_from(["auto", "none", "required"])
    | ANY
    | st.just({"type": "tool", "name": "f"}),
    "parallel_tool_calls": st.booleans() | ODD,
    "response_format": FORMAT | ANY,
    "structured_outputs": st.fixed_dictionaries(
        {}, optional={"regex": WORDS, "json": ANY, "choice": ANY, "grammar": WORDS, "json_object": ODD}
    ),
    "guided_regex": st.sampled_from(["a+", "(", "[a-z]{1,99999}", "(?=x)", ""]) | ODD,
    "guided_grammar": st.sampled_from(["start: X", "root ::= root", "", "start: start"]) | ODD,
    "reasoning_effort": st.sampled_from(["none", "low", "high", "max"]) | ODD,
    "thinking": st.sampled_from([{"type": "enabled"}, {"type": "enabled", "budget_tokens": 5}]) | ANY,
    "chat_template_kwargs": st.dictionaries(st.sampled_from(["thinking", "thinking_effort", "x"]), ODD),
    "continue_final_message": st.booleans() | ODD,
    "add_generation_prompt": st.booleans() | ODD,
    "timeout": st.floats(0, 5) | ODD,
    "priority": st.integers(-3, 3) | ODD,
    "cache_salt": WORDS | ODD,
    "request_id": WORDS | ODD,
    "text": st.fixed_dictionaries({}, optional={"format": FORMAT | ANY, "verbosity": ODD}),
    "reasoning": st.fixed_dictionaries({}, optional={"effort": ANY, "summary": ANY}),
    "include": st.lists(WORDS | ODD, max_size=2),
    "instructions": WORDS | ODD,
    "system": WORDS | PARTS | ANY,
    "output_config": st.fixed_dictionaries({}, optional={"effort": ANY, "format": FORMAT | ANY}),
    "max_output_tokens": st.integers(1, 30) | ODD,
    "stop_sequences": st.lists(WORDS | ODD, max_size=2),
    "metadata": ANY,
    "input_ids": st.lists(st.integers(-1, 2050), max_size=5) | ANY,
    "sampling_params": st.fixed_dictionaries(
        {},
        optional={
            "n": st.integers(1, 3) | ODD,
            "max_new_tokens": st.integers(1, 30) | ODD,
            "temperature": st.floats(0, 2) | ODD,
            "stop": ANY,
            "regex": WORDS,
            "json_schema": ANY,
            "logit_bias": ANY,
        },
    )
    | ANY,
    "rid": WORDS | ANY,
    "return_logprob": st.booleans() | st.lists(st.booleans(), max_size=3),
    "logprob_start_len": st.integers(-2, 3) | ANY,
    "top_logprobs_num": st.integers(-1, 3) | ANY,
    "extra_key": WORDS | ODD,
}
PROMPTS = {
    CHAT: {"messages": st.lists(MESSAGE, max_size=4) | ANY},
    TEXT: {"prompt": WORDS | st.lists(st.integers(-1, 2050), max_size=5) | st.lists(WORDS, max_size=2) | ANY},
    RESPONSES: {"input": WORDS | st.lists(ITEM | MESSAGE, max_size=4) | ANY},
    MESSAGES: {"messages": st.lists(MESSAGE, max_size=4) | ANY},
    GENERATE: {"text": WORDS | st.lists(WORDS, max_size=3) | ANY},
}


@st.composite
def nearly_right(draw: st.DrawFn, document: dict[str, Any], path: str) -> dict[str, Any]:
    """A right body in which a few fields are drawn anew, so that what comes late is reached too."""
    schema = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    known = sorted(FIELDS.keys() & schema["properties"].keys())
    body = dict(RIGHT[path])
    if draw(st.booleans()):
        body |= draw(st.fixed_dictionaries(PROMPTS[path]))
    for name in draw(st.lists(st.sampled_from(known), max_size=3, unique=True)):
        body[name] = draw(FIELDS[name])
    return body


@pytest.mark.parametrize("path", RIGHT)
@fuzz(40)
@given(st.data())
def test_a_body_that_is_nearly_right_is_served_or_refused(
    client: httpx.Client, document: dict[str, Any], path: str, data: st.DataObject
) -> None:
    body = data.draw(nearly_right(document, path))
    check(document, path, client.post(path, content=json.dumps(body).encode()))


# --- texts ---------------------------------------------------------------------------------------

MARKS = [b"{", b"}", b"[", b"]", b'"', b":", b",", b" ", b"\n", b"//", b"'"]
NUMBERS = [b"1", b"-", b"-0", b"1e999", b"1e-400", b"9" * 4400, b"NaN", b"-Infinity"]
TEXTS = [b'"prompt"', b'"messages"', b'"\\ud800"', b'"\\u00', b'"a": 1, "a": 2', b"null", b"true"]
BYTES = [b"\xff", b"\xed\xa0\x80", b"\x00", b"\xef\xbb\xbf", b"\xff\xfe"]
DEEP = [b"[" * 3000, b'{"a":' * 2000]
PIECES = st.sampled_from([*MARKS, *NUMBERS, *TEXTS, *BYTES, *DEEP])


@fuzz(300)
@given(st.lists(PIECES, max_size=12).map(b"".join) | st.binary(max_size=40))
def test_any_bytes_are_read_as_json_or_refused(raw: bytes) -> None:
    try:
        value = read_json(raw)
    except RequestError as error:
        assert "can't be read as JSON" in str(error)
    else:
        json.dumps(value, allow_nan=False)


@pytest.mark.parametrize("path", [*RIGHT, "/tokenize", "/detokenize", f"{MESSAGES}/count_tokens"])
@fuzz(8)
@given(st.lists(PIECES, max_size=8).map(b"".join))
def test_a_body_that_is_hardly_json_is_refused_and_the_next_is_served(
    client: httpx.Client, document: dict[str, Any], path: str, raw: bytes
) -> None:
    response = client.post(path, content=raw)
    assert response.status_code == 400
    check(document, path, response)


def test_the_last_of_two_fields_of_one_name_counts(client: httpx.Client) -> None:
    answer = client.post(TEXT, content=b'{"prompt": "x", "max_tokens": -1, "max_tokens": 2}')
    assert answer.json()["usage"]["completion_tokens"] == 2


# --- replies -------------------------------------------------------------------------------------

TAGS = [
    *("think", "response", "tools", "call", "json", 'call tool="f"', 'call tool="f" index="1"'),
    *('argument key="a" type="number"', 'argument key="b" type="string"'),
]
SAID = ["x", " ", "안", "\n", "</", '{"a":', "{", "}", "[", "1", "-", "nul", "tru", '"', '{"a": 1}']
WHOLE_TAGS = [f"{mark}{tag}<|sep|>" for tag in TAGS for mark in ("<|open|>", "<|close|>")]
MARKUP = st.lists(st.sampled_from([*CONTROL_TOKENS, *TAGS, *SAID, *WHOLE_TAGS]), max_size=16).map("".join)


@pytest.mark.parametrize("path", RIGHT)
@fuzz(25)
@given(st.data())
def test_any_reply_is_told_and_a_stream_adds_up_to_the_whole(
    fuzzed: Running, client: httpx.Client, document: dict[str, Any], path: str, data: st.DataObject
) -> None:
    script = fuzzed.model.script
    ids = st.lists(st.integers(0, 2047), max_size=12)
    reply = data.draw(st.lists(MARKUP.map(script.encode) | ids, max_size=3))
    script.say_ids([token for part in reply for token in part])
    body = RIGHT[path] | LENGTH.get(path, {"max_tokens": 60})
    whole, stream = (client.post(path, json=body | {"stream": stream}) for stream in (False, True))
    check(document, path, whole)
    check(document, path, stream)
    assert whole.status_code == stream.status_code == 200
    assert TOLD[path](whole.json()) == ADDED[path](events_of(stream))


LENGTH: dict[str, Any] = {
    RESPONSES: {"max_output_tokens": 60},
    GENERATE: {"sampling_params": {"max_new_tokens": 60}},
}


def _chat_told(answer: dict[str, Any]) -> list[Any]:
    message = answer["choices"][0]["message"]
    calls = [call["function"] for call in message.get("tool_calls", ())]
    said = [message["content"] or "", message.get("reasoning_content", "")]
    return [*said, calls, answer["choices"][0]["finish_reason"]]


def _chat_added(events: list[dict[str, Any]]) -> list[Any]:
    text = reasoning = ""
    calls: list[dict[str, Any]] = []
    for event in events:
        delta = event["choices"][0]["delta"]
        text += delta.get("content") or ""
        reasoning += delta.get("reasoning_content") or ""
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                calls.append({"name": call["function"]["name"], "arguments": ""})
            calls[call["index"]]["arguments"] += call["function"]["arguments"]
    return [text, reasoning, calls, events[-1]["choices"][0]["finish_reason"]]


def _items(response: dict[str, Any]) -> list[Any]:
    unlike = {"id", "call_id"}
    return [
        response["status"],
        *({k: v for k, v in item.items() if k not in unlike} for item in response["output"]),
    ]


def _message_told(message: dict[str, Any]) -> list[Any]:
    blocks = [{k: v for k, v in block.items() if k != "id"} for block in message["content"]]
    return [message["stop_reason"], blocks]


def arguments_so_far(text: str) -> dict[str, Any]:
    """Of a call that was cut off: what is complete of its arguments."""
    try:
        value = from_json(text, allow_partial=True)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _message_added(events: list[dict[str, Any]]) -> list[Any]:
    """As Anthropic's client does: the input of a call is what of its JSON has come."""
    blocks: list[dict[str, Any]] = []
    texts: list[str] = []
    for event in events:
        if event["type"] == "content_block_start":
            blocks.append({k: v for k, v in event["content_block"].items() if k != "id"})
            texts.append("")
        elif event["type"] == "content_block_delta":
            _, text = [value for name, value in event["delta"].items()]
            texts[event["index"]] += text
    for block, text in zip(blocks, texts, strict=True):
        if block["type"] == "tool_use":
            block["input"] = arguments_so_far(text)
        else:
            block[block["type"]] = text
    return [events[-2]["delta"]["stop_reason"], blocks]


TOLD = {
    CHAT: _chat_told,
    TEXT: lambda answer: [answer["choices"][0]["text"], answer["choices"][0]["finish_reason"]],
    RESPONSES: _items,
    MESSAGES: _message_told,
    GENERATE: lambda answer: [answer["text"], answer["meta_info"]["finish_reason"]],
}
ADDED = {
    CHAT: _chat_added,
    TEXT: lambda events: [
        "".join(event["choices"][0]["text"] for event in events),
        events[-1]["choices"][0]["finish_reason"],
    ],
    RESPONSES: lambda events: _items(events[-1]["response"]),
    MESSAGES: _message_added,
    GENERATE: lambda events: [events[-1]["text"], events[-1]["meta_info"]["finish_reason"]],
}
