"""Structured output over HTTP: honoured in every mode of thinking, or refused by the name of the part."""

from __future__ import annotations

import json
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from support.scripted import Running

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
USER = [{"role": "user", "content": "Salut !"}]
THINK_END = "<|close|>think<|sep|><|open|>response<|sep|>"
END = "<|close|>response<|sep|><|close|>message<|sep|><|end_of_msg|>"
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["Ann", "Bob"]}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}
THINKING = [{}, {"thinking": {"type": "enabled"}}, {"reasoning_effort": "none"}]


def chat(server: Running, **fields: Any) -> list[dict[str, Any]]:
    """The choices of a chat; joined from the chunks where it is a stream."""
    body = {"messages": USER, "temperature": 0, "max_tokens": 400} | fields
    answer = server.post(CHAT, body)
    assert answer.status_code == 200, answer.text
    if not body.get("stream"):
        return [
            choice["message"] | {"finish_reason": choice["finish_reason"]}
            for choice in answer.json()["choices"]
        ]
    joined: dict[int, dict[str, Any]] = {}
    for line in answer.text.splitlines():
        if not line.startswith("data: {"):
            continue
        for choice in json.loads(line.removeprefix("data: "))["choices"]:
            message = joined.setdefault(choice["index"], {"content": None, "reasoning_content": None})
            for name in ("content", "reasoning_content"):
                if text := choice["delta"].get(name):
                    message[name] = (message[name] or "") + text
            message["finish_reason"] = choice["finish_reason"]
    return [joined[index] for index in sorted(joined)]


def refusal(server: Running, path: str, fields: dict[str, Any]) -> tuple[str, str]:
    """The field that a 400 names, and what it says."""
    start = {"messages": USER} if path == CHAT else {"prompt": "x"}
    answer = server.post(path, start | fields)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    return error["param"], error["message"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("thinking", THINKING, ids=["default", "on", "off"])
@pytest.mark.parametrize("said", ['{"name": "Bob", "age": 42}', "Sure! Here it is: Bob, 42.", ""])
def test_a_schema_holds_whether_there_is_thinking_or_not(
    server: Running, thinking: dict[str, Any], said: str, stream: bool
) -> None:
    thinks = "reasoning_effort" not in thinking
    server.say((f"Hm, {{a person}}.{THINK_END}" if thinks else "") + said + END)
    (message,) = chat(server, response_format=FORMAT, stream=stream, **thinking)
    value = json.loads(message["content"])
    Draft202012Validator(SCHEMA).validate(value)
    assert message["finish_reason"] == "stop"
    assert message.get("reasoning_content") == ("Hm, {a person}." if thinks else None)
    if said.startswith("{"):
        assert message["content"] == said
    prompt = server.last_prompt()
    assert "`response_format=json_schema`" in prompt and '"maximum":99' in prompt


@pytest.mark.parametrize("max_tokens", [1, 3])
@pytest.mark.parametrize("stream", [False, True])
def test_a_limit_inside_thinking_gives_no_half_answer(server: Running, max_tokens: int, stream: bool) -> None:
    server.say(f"A long thought that does not come to an end{THINK_END}{{}}{END}")
    (message,) = chat(server, response_format=FORMAT, max_tokens=max_tokens, stream=stream)
    assert (message["content"], message["finish_reason"]) == (None, "length")
    assert message["reasoning_content"]


def test_an_object_of_any_kind_is_asked_for_by_json_object(server: Running) -> None:
    server.say(f'{THINK_END}{{"a": [1, null]}} and more{END}')
    (message,) = chat(server, response_format={"type": "json_object"}, max_tokens=2000)
    assert json.loads(message["content"]) == {"a": [1, None]}
    assert "`response_format=json_object`" in server.last_prompt()


@pytest.mark.parametrize("thinking", THINKING, ids=["default", "on", "off"])
@pytest.mark.parametrize(
    "fields",
    [
        {"structured_outputs": {"choice": ["left", "right"]}},
        {"guided_choice": ["left", "right"]},
        {"structured_outputs": {"regex": "left|right"}},
        {"guided_regex": "left|right"},
        {"guided_grammar": 'root ::= "left" | "right"'},
        {"structured_outputs": {"grammar": 'start: "left" | "right"', "json": None}},
    ],
)
def test_vllms_fields_and_their_older_names_shape_chats_and_completions(
    server: Running, fields: dict[str, Any], thinking: dict[str, Any]
) -> None:
    script = f"right{END}" if "reasoning_effort" in thinking else f"Hm.{THINK_END}right{END}"
    server.say(script)
    (message,) = chat(server, **fields, **thinking)
    assert (message["content"], message["finish_reason"]) == ("right", "stop")
    assert "response_format" not in server.last_prompt()
    server.say("Well, right")
    answer = server.post(COMPLETIONS, {"prompt": "x", "temperature": 0, **fields}).json()["choices"][0]
    assert (answer["text"] in ("left", "right"), answer["finish_reason"]) == (True, "stop")


def test_a_completion_may_have_a_response_format(server: Running) -> None:
    server.say('{"name": "Ann", "age": 7}')
    body = {"prompt": ["a", "b"], "n": 2, "response_format": FORMAT, "max_tokens": 90, "temperature": 0}
    choices = server.post(COMPLETIONS, body).json()["choices"]
    assert [choice["text"] for choice in choices] == ['{"name": "Ann", "age": 7}'] * 4


def test_every_choice_has_a_constraint_of_its_own(server: Running) -> None:
    server.say(f"Hm.{THINK_END}No.{END}")
    messages = chat(server, response_format=FORMAT, n=3, temperature=1, seed=4)
    assert len(messages) == 3
    for message in messages:
        Draft202012Validator(SCHEMA).validate(json.loads(message["content"]))


def test_an_answer_that_the_client_began_is_completed(server: Running) -> None:
    server.say(f'"Bob", "age": 42}}{END}')
    messages = [*USER, {"role": "assistant", "content": '{"name": '}]
    fields = {"messages": messages, "continue_final_message": True, "add_generation_prompt": False}
    (message,) = chat(server, response_format=FORMAT, reasoning_effort="none", **fields)
    assert json.loads('{"name": ' + message["content"]) == {"name": "Bob", "age": 42}
    fields["messages"] = [*USER, {"role": "assistant", "content": "So: {"}]
    assert refusal(server, CHAT, {"response_format": FORMAT, "reasoning_effort": "none", **fields})[0] == (
        "response_format.json_schema.schema"
    )


PERSON = {"type": "function", "function": {"name": "greet", "parameters": SCHEMA, "strict": True}}
LOOK = {
    "type": "function",
    "function": {"name": "look", "parameters": {"properties": {"🍕": {"type": "integer"}}}},
}


@pytest.mark.parametrize("thinking", THINKING, ids=["default", "on", "off"])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "greet"}}])
def test_a_forced_call_has_arguments_of_the_schema(
    server: Running, choice: Any, thinking: dict[str, Any]
) -> None:
    server.say(f"I'd rather not.{THINK_END}No.{END}")
    (message,) = chat(server, tools=[PERSON], tool_choice=choice, **thinking)
    (call,) = message["tool_calls"]
    Draft202012Validator(SCHEMA).validate(json.loads(call["function"]["arguments"]))
    assert (message["content"], message["finish_reason"]) == (None, "tool_calls")


def test_a_call_of_a_strict_function_obeys_though_nobody_forced_it(server: Running) -> None:
    call = (
        '<|open|>tools<|sep|><|open|>call tool="greet" index="1"<|sep|>'
        '<|open|>argument key="name" type="string"<|sep|>Zoe<|close|>argument<|sep|>'
        "<|close|>call<|sep|><|close|>tools<|sep|><|close|>message<|sep|><|end_of_msg|>"
    )
    server.say(f"Hm.{THINK_END}<|close|>response<|sep|>{call}")
    (message,) = chat(server, tools=[PERSON, LOOK])
    Draft202012Validator(SCHEMA).validate(json.loads(message["tool_calls"][0]["function"]["arguments"]))
    server.say(f"Hm.{THINK_END}Just words, <|sep|>no call.{END}")
    (message,) = chat(server, tools=[PERSON, LOOK])
    assert (message["content"] or "").startswith("Just words")


def test_an_answer_beside_tools_obeys_and_calls_are_free(server: Running) -> None:
    call = (
        '<|open|>tools<|sep|><|open|>call tool="look" index="1"<|sep|>'
        '<|open|>argument key="🍕" type="string"<|sep|>many<|close|>argument<|sep|>'
        "<|close|>call<|sep|><|close|>tools<|sep|><|close|>message<|sep|><|end_of_msg|>"
    )
    server.say(f"Hm.{THINK_END}<|close|>response<|sep|>{call}")
    (message,) = chat(server, tools=[LOOK], response_format=FORMAT)
    assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == {"🍕": "many"}
    assert message["content"] is None
    server.say(f'Hm.{THINK_END}{{"name": "Zoe", "age": 5}}{END}')
    (message,) = chat(server, tools=[LOOK], response_format=FORMAT)
    Draft202012Validator(SCHEMA).validate(json.loads(message["content"]))


UNKNOWN = {"properties": {"a": {"if": {}}}}
BAD = {
    "type": "function",
    "function": {"name": "bad", "parameters": {"properties": {"x": {"pattern": "(?=a)"}}}},
}


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"response_format": {"type": "xml"}}, "response_format", "json_schema"),
        ({"response_format": "json"}, "response_format", "dictionary"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": UNKNOWN}}},
            "response_format.json_schema.schema.properties.a",
            "if",
        ),
        ({"structured_outputs": {}}, "structured_outputs.json_object", "None of"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs.regex", "one of them"),
        ({"structured_outputs": {"jsn": {}}}, "structured_outputs.jsn", "Known"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex", "can't be enforced"),
        ({"guided_regex": "("}, "guided_regex", "can't be enforced"),
        ({"guided_json": {"not": {}}}, "guided_json", "not"),
        ({"guided_json": {}, "guided_choice": ["a"]}, "guided_choice", "one of them"),
        ({"guided_json": {}, "structured_outputs": {"regex": "a"}}, "structured_outputs", "one of them"),
        ({"guided_choice": []}, "guided_choice", "one or more"),
        (
            {"response_format": {"type": "json_object"}, "guided_json": {}},
            "structured_outputs",
            "one of them",
        ),
    ],
)
def test_what_cannot_be_enforced_is_named(
    server: Running, path: str, fields: dict[str, Any], param: str, says: str
) -> None:
    named, message = refusal(server, path, fields)
    assert named == param and says in message


def test_the_tool_whose_schema_cannot_be_enforced_is_named(server: Running) -> None:
    body = {"tools": [LOOK, BAD], "tool_choice": "required"}
    assert refusal(server, CHAT, body)[0] == "tools[1].function.parameters.properties.x"
    messages = [{"role": "system", "tools": [LOOK, BAD]}, *USER]
    where = "messages[0].tools[1].function.parameters.properties.x"
    assert refusal(server, CHAT, {"messages": messages, "tool_choice": "required"})[0] == where
    server.say(f"Hm.{THINK_END}Fine.{END}")
    (message,) = chat(server, tools=[LOOK, BAD])  # nobody asked to enforce it
    assert message["content"] == "Fine."
