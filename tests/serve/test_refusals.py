"""Bad input is refused by name, with what would have been accepted; everyone else is served on."""

from __future__ import annotations

import math
from typing import Any

import httpx
import openai
import pytest
from support.scripted import Running

USER = [{"role": "user", "content": "Salut !"}]
TOOL = {"type": "function", "function": {"name": "stock", "parameters": {}}}
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
CONTEXT = 512 * 16


def error(response: httpx.Response, status: int = 400) -> dict[str, Any]:
    assert response.status_code == status, response.text
    body = response.json()
    assert set(body) == {"error"} and set(body["error"]) == {"message", "type", "param", "code"}
    return body["error"]


@pytest.fixture(autouse=True)
def still_serves(server: Running):
    """Whatever was refused, the next request is answered."""
    yield
    server.say("<|close|>think<|sep|><|open|>response<|sep|>Fine.")
    answer = server.post(CHAT, {"messages": USER}).json()
    assert answer["choices"][0]["message"]["content"] == "Fine."


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"temprature": 1}, "temprature", "temperature"),
        ({"colour": "red"}, "colour", "Known fields"),
        ({"functions": [{}]}, "functions", "tools"),
        ({"function_call": "auto"}, "function_call", "tool_choice"),
        ({"audio": {"voice": "alloy"}}, "audio", "text"),
        ({"modalities": ["text", "audio"]}, "modalities", '["text"]'),
        ({"service_tier": "priority"}, "service_tier", "default"),
        ({"store": True}, "store", "false"),
        ({"prediction": {"type": "content", "content": "x"}}, "prediction", "leave it out"),
        ({"echo": True}, "echo", "false"),
        ({"best_of": 2}, "best_of", "`n`"),
        ({"early_stopping": True}, "early_stopping", "beam search"),
        ({"skip_special_tokens": False}, "skip_special_tokens", "true"),
        ({"temperature": -1}, "temperature", "at least 0"),
        ({"temperature": "warm"}, "temperature", "number"),
        ({"top_p": 0}, "top_p", "greater than 0"),
        ({"top_k": -2}, "top_k", "-1"),
        ({"min_p": 1.5}, "min_p", "1"),
        ({"n": 0}, "n", "1"),
        ({"max_tokens": 0}, "max_tokens", "from 1"),
        ({"max_tokens": True}, "max_tokens", "integer"),
        ({"max_tokens": CONTEXT}, "max_tokens", f"max_model_len is {CONTEXT}"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_completion_tokens", "one of them"),
        ({"logit_bias": {"2048": 1}}, "logit_bias", "2047"),
        ({"logit_bias": {"-1": 1}}, "logit_bias", "0"),
        ({"logit_bias": {"dog": 1}}, "logit_bias", "token ids"),
        ({"logit_bias": {"5": 101}}, "logit_bias", "100"),
        ({"stop_token_ids": [2048]}, "stop_token_ids", "2047"),
        ({"stop": [""]}, "stop", "non-empty"),
        ({"seed": 1.5}, "seed", "integer"),
        ({"top_logprobs": 2}, "top_logprobs", "logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "20"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "stream"),
        ({"stream": True, "stream_options": {"usage": True}}, "stream_options.usage", "include_usage"),
        ({"messages": [{"role": ["user"], "content": "x"}]}, "messages[0].role", "user"),
        ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs", "stream"),
        ({"reasoning_effort": "medium"}, "reasoning_effort", "low, high, max or none"),
        ({"chat_template_kwargs": {"think": True}}, "chat_template_kwargs.think", "enable_thinking"),
        ({"chat_template_kwargs": {"thinking": "yes"}}, "chat_template_kwargs.thinking", "true or false"),
        ({"chat_template_kwargs": {"thinking_effort": 3}}, "chat_template_kwargs.thinking_effort", "high"),
        ({"thinking": {"type": "sometimes"}}, "thinking", "disabled"),
        ({"thinking": False, "reasoning_effort": "max"}, "thinking", "contradict"),
        ({"tool_choice": "required"}, "tool_choice", "tools"),
        ({"tool_choice": "sometimes"}, "tool_choice", "auto"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice", "Declare"),
        (
            {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "price"}}},
            "tool_choice",
            "stock",
        ),
        ({"tools": [{"type": "custom"}]}, "tools[0]", "function"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools[0]", "name"),
        ({"add_generation_prompt": False}, "add_generation_prompt", "continue_final_message"),
        ({"continue_final_message": True}, "continue_final_message", "assistant"),
        ({"continue_final_message": True, "messages": ["x"]}, "continue_final_message", "assistant"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_chat_field_that_cannot_be_honoured_is_named(
    server: Running, stream: bool, fields: dict[str, Any], param: str, says: str
) -> None:
    if stream and ("stream" in fields or "stream_options" in fields):
        fields = fields | {"stream": True, "stream_options": {"usage": True}}
        param, says = "stream_options.usage", "include_usage"
    body = {"messages": USER, "stream": stream} | fields
    found = error(server.post(CHAT, body))
    assert found["param"] == param
    assert says in found["message"]
    assert found["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ("Hello", "messages"),
        (["Hello"], "messages[0]"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": "wizard", "content": "x"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": "x", "nmae": "y"}], "messages[0].nmae"),
        ([{"role": "user", "content": "x", "tool_calls": []}], "messages[0].tool_calls"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "input_audio"}]}], "messages[0].content[0].type"),
        ([*USER, {"role": "assistant", "audio": {"id": "a"}}], "messages[1].audio"),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"arguments": "{}"}}]}],
            "messages[0].tool_calls[0].function.name",
        ),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]}],
            "messages[0].tool_calls[0].function.arguments",
        ),
        ([{"role": "tool", "content": "42", "tool_call_id": "nobody"}], "messages[0]"),
    ],
)
def test_a_message_that_cannot_be_rendered_is_named(server: Running, messages: Any, param: str) -> None:
    assert error(server.post(CHAT, {"messages": messages}))["param"] == param


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"suffix": "end"}, "suffix", "middle"),
        ({"best_of": 3}, "best_of", "`n`"),
        ({"messages": USER}, "messages", "/v1/chat/completions"),
        ({"prompt": ""}, "prompt", "empty"),
        ({"prompt": []}, "prompt", "empty"),
        ({"prompt": [[]]}, "prompt", "empty"),
        ({"prompt": [2048]}, "prompt", "2047"),
        ({"prompt": [-1]}, "prompt", "-1"),
        ({"prompt": 7}, "prompt", "text"),
        ({"prompt": [True]}, "prompt", "token ids"),
        ({"prompt": [1.5]}, "prompt", "token ids"),
        ({"prompt": [1, "a"]}, "prompt[1]", "a string"),
        ({"prompt": ["a", None]}, "prompt[1]", "null"),
        ({"prompt": ["a", {}]}, "prompt[1]", "an object"),
        ({"prompt": [[1], 2]}, "prompt[1]", "a number"),
        ({"prompt": [[1], [2, True]]}, "prompt[1][1]", "a boolean"),
        ({"stop": ["a"] * 65}, "stop", "at most 64"),
        ({"stop": [1]}, "stop", "string"),
        ({"stop_token_ids": ["a"]}, "stop_token_ids[0]", "integer"),
        ({"logit_bias": {"5": "a"}}, "logit_bias", "number"),
        ({"x" * 5000: 1}, "x" * 80, "Known fields"),
        ({"prompt": [5] * CONTEXT, "max_tokens": None}, "prompt", f"{CONTEXT - 1} tokens or fewer"),
        ({"prompt": [5] * (CONTEXT + 1), "max_tokens": None}, "prompt", f"{CONTEXT - 1} tokens or fewer"),
        ({"prompt": [5] * (CONTEXT - 3), "max_tokens": 4}, "max_tokens", "Ask for 3 or fewer"),
        ({"max_tokens": 0}, "max_tokens", "from 1"),
        ({"echo": True, "logprobs": 1, "stream": True}, "echo", "stream"),
        ({"logprobs": 21}, "logprobs", "20"),
        ({"min_tokens": 20, "max_tokens": 10}, "min_tokens", "10"),
    ],
)
def test_a_completion_field_that_cannot_be_honoured_is_named(
    server: Running, fields: dict[str, Any], param: str, says: str
) -> None:
    found = error(server.post(TEXT, {"prompt": "In the beginning"} | fields))
    assert found["param"] == param
    assert says in found["message"]


def test_the_longest_prompt_leaves_room_for_one_token(server: Running) -> None:
    server.say("a")
    answer = server.post(TEXT, {"prompt": [5] * (CONTEXT - 1), "max_tokens": None}).json()
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["total_tokens"] == CONTEXT


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_none_are_refused(server: Running, value: float) -> None:
    text = f'{{"messages": [{{"role": "user", "content": "x"}}], "temperature": {value}}}'
    text = text.replace("nan", "NaN").replace("inf", "Infinity")
    headers = {"Content-Type": "application/json"}
    found = error(httpx.post(server.url + CHAT, content=text, headers=headers))
    assert "finite" in found["message"]


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_no_such_number_gets_into_a_prompt(server: Running, number: str) -> None:
    parameters = f'{{"type": "object", "default": {number}}}'
    tools = f'[{{"type": "function", "function": {{"name": "f", "parameters": {parameters}}}}}]'
    for field in (f'"tools": {tools}', f'"metadata": {{"k": {number}}}'):
        content = f'{{"messages": [{{"role": "user", "content": "x"}}], {field}}}'
        assert "finite" in error(httpx.post(server.url + CHAT, content=content))["message"]


def test_null_means_not_given(server: Running) -> None:
    server.say("<|close|>think<|sep|><|open|>response<|sep|>Fine.")
    nothing = dict.fromkeys(
        ["temperature", "top_p", "n", "stream", "stop", "tools", "functions", "audio", "seed", "max_tokens"]
    )
    answer = server.post(CHAT, {"messages": USER} | nothing).json()
    assert answer["choices"][0]["message"]["content"] == "Fine."


@pytest.mark.parametrize(
    "harmless",
    [
        {"user": "me", "metadata": {"k": "v"}, "store": False, "parallel_tool_calls": True},
        {"service_tier": "auto", "modalities": ["text"], "response_format": {"type": "text"}},
        {
            "safety_identifier": "me",
            "prompt_cache_key": "k",
            "prompt_cache_retention": "24h",
            "functions": [],
        },
        {"verbosity": "medium", "priority": 0, "use_beam_search": False, "skip_special_tokens": True},
    ],
)
def test_fields_that_change_nothing_are_accepted(server: Running, harmless: dict[str, Any]) -> None:
    server.say("<|close|>think<|sep|><|open|>response<|sep|>Fine.")
    assert server.post(CHAT, {"messages": USER} | harmless).status_code == 200


@pytest.mark.parametrize(
    "content",
    [
        '{"messages": [',
        "[1]",
        '"text"',
        "null",
        "",
        "[" * 100_000,
        b"\xff\xfe\x00",
        f'{{"prompt": "x", "seed": {"9" * 5000}}}',
        '{"prompt": "x", "logit_bias": {"\u00b2": 1}}',
        '{"prompt": [1, "a"]}',
        '{"\\ud800": 1}',
    ],
)
def test_a_body_that_cannot_be_read_is_refused(server: Running, content: str | bytes) -> None:
    error(httpx.post(server.url + TEXT, content=content))


@pytest.mark.parametrize("kind", [None, "text/plain", "application/x-www-form-urlencoded"])
def test_json_is_read_whatever_its_header_says(server: Running, kind: str | None) -> None:
    headers = {"Content-Type": kind} if kind else {}
    answer = httpx.post(server.url + TEXT, content='{"prompt": "x"}', headers=headers)
    assert answer.status_code == 200


@pytest.mark.parametrize("stream", ["false", "true"])
def test_a_lone_surrogate_is_text_like_any_other(server: Running, stream: str) -> None:
    content = f'{{"prompt": "a\\ud800", "echo": true, "request_id": "\\udfff", "stream": {stream}}}'
    answer = httpx.post(server.url + TEXT, content=content)
    assert answer.status_code == 200 and "a\ufffd" in answer.text


def test_more_choices_than_the_server_ever_takes_are_refused_and_not_queued(server: Running) -> None:
    assert "260 at a time" in error(server.post(TEXT, {"prompt": [[1]] * 261}))["message"]


def test_deep_json_in_a_tool_is_rendered_or_refused(server: Running) -> None:
    for depth in (200, 900, 980, 5000):
        parameters = '{"a":' * depth + "1" + "}" * depth
        tool = f'{{"type": "function", "function": {{"name": "f", "parameters": {parameters}}}}}'
        content = f'{{"messages": [{{"role": "user", "content": "x"}}], "tools": [{tool}], "max_tokens": 1}}'
        assert httpx.post(server.url + CHAT, content=content).status_code in (200, 400)


def test_an_unknown_model_is_not_found_and_the_served_ones_are_named(server: Running) -> None:
    for path, body in ((CHAT, {"messages": USER}), (TEXT, {"prompt": "x"}), ("/tokenize", {"prompt": "x"})):
        found = error(server.post(path, body | {"model": "gpt-4"}), 404)
        assert "tiny, alias" in found["message"] and found["param"] == "model"
    with pytest.raises(openai.NotFoundError):
        server.client().chat.completions.create(model="gpt-4", messages=[{"role": "user", "content": "x"}])


def test_unknown_paths_and_methods_are_refused_in_the_same_shape(server: Running) -> None:
    error(server.get("/v1/embeddings"), 404)
    error(server.get(CHAT), 405)


def test_a_sampling_mistake_in_a_stream_is_a_status_and_no_event(server: Running) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        server.client().chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "x"}], temperature=-1, stream=True
        )
    assert caught.value.param == "temperature"


def test_everything_banned_ends_this_request_with_an_error(server: Running) -> None:
    bias = {str(token): -100 for token in range(2048)}
    error(server.post(TEXT, {"prompt": "x", "logit_bias": bias}))
