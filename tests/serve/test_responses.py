"""/v1/responses with the official client: items, events, what is refused, what is sent back."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from openai.types.responses import Response
from support.scripted import Running
from support.xtml_replies import CALL, CUT_CALL, END, THINK_END, TWO_CALLS

PATH = "/v1/responses"
TOOL = {
    "type": "function",
    "name": "f",
    "description": "Looks up.",
    "parameters": {"type": "object", "properties": {"k": {"type": "string"}}},
    "strict": False,
}
REPLIES = [
    f"Think.{THINK_END}Bonjour 한국어 👩‍👩‍👧.{END}",
    f"{THINK_END}{END}",
    "Only thinking, cut off",
    CALL,
    TWO_CALLS,
    CUT_CALL,
]


def create(server: Running, **body: Any) -> Response:
    return server.client().responses.create(**({"model": "tiny", "input": "Salut !"} | body))


def error(server: Running, **body: Any) -> dict[str, Any]:
    answer = server.post(PATH, {"input": "x"} | body)
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]


def plain(response: Response) -> dict[str, Any]:
    """A response without what differs from request to request."""
    text = response.model_dump_json(exclude={"created_at", "completed_at"})
    fields = json.loads(text.replace(response.id, "ID"))
    for i, item in enumerate(fields["output"]):
        if "call_id" in item:
            item["call_id"] = f"call_{i}"
    return fields


@pytest.mark.parametrize("reply", REPLIES)
@pytest.mark.parametrize("limit", [None, 1, 20])
def test_a_stream_adds_up_to_the_whole_response(server: Running, reply: str, limit: int | None) -> None:
    server.say(reply)
    body = {"tools": [TOOL], "max_output_tokens": limit}
    whole = create(server, **body)
    events = list(server.client().responses.create(model="tiny", input="Salut !", stream=True, **body))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[-1].type == f"response.{whole.status}"
    assert plain(events[-1].response) == plain(whole)

    output: list[dict[str, Any]] = []  # put together from the deltas
    for event in events[2:-1]:
        assert event.output_index == len(output) - (event.type != "response.output_item.added")
        match event.type:
            case "response.output_item.added":
                output.append(event.item.model_dump())
            case "response.content_part.added":
                output[-1]["content"] = [event.part.model_dump()]
            case "response.reasoning_text.delta" | "response.output_text.delta":
                output[-1]["content"][0]["text"] += event.delta
            case "response.function_call_arguments.delta":
                output[-1]["arguments"] += event.delta
            case "response.output_item.done":
                assert event.item.model_dump() == output[-1] | {"status": event.item.status}
                output[-1]["status"] = event.item.status
    assert output == [item.model_dump() for item in events[-1].response.output]


def test_reasoning_answer_and_calls_are_items_in_their_order(server: Running) -> None:
    server.say(CALL)
    response = create(server, tools=[TOOL])
    reasoning, message, call = response.output
    assert reasoning.content[0].text == "Hm."
    assert response.output_text == message.content[0].text == "Sure."
    assert (call.name, json.loads(call.arguments), call.status) == ("f", {"k": "v"}, "completed")
    assert len({item.id for item in response.output}) == 3 and call.call_id.startswith("call_")


def test_the_items_of_a_response_sent_back_extend_the_prompt_token_for_token(server: Running) -> None:
    server.say(CALL)
    first = create(server, tools=[TOOL], instructions="Be brief.")
    turn = server.model.script.prompts[-1] + server.model.script.encode(CALL)
    result = {"type": "function_call_output", "call_id": first.output[-1].call_id, "output": "42"}
    items = [
        {"role": "user", "content": "Salut !"},
        *[item.model_dump() for item in first.output],
        result,
    ]
    server.say(f"Ok.{THINK_END}42{END}")
    create(server, tools=[TOOL], instructions="Be brief.", input=items)
    assert server.model.script.prompts[-1][: len(turn)] == turn


def test_instructions_roles_and_parts_are_rendered(server: Running) -> None:
    server.say(f"{THINK_END}x{END}")
    items = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Two."}]},
        {
            "role": "user",
            "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}],
        },
        {"role": "assistant", "content": [{"type": "output_text", "text": "c", "annotations": []}]},
        {"role": "user", "content": "d"},
    ]
    create(server, instructions="One.", input=items, reasoning={"effort": "low"})
    prompt = server.last_prompt()
    places = [prompt.index(text) for text in ("One.", "Two.", "ab<", ">c<", ">d<")]
    assert places == sorted(places) and "`thinking_effort=low`" in prompt


def test_two_turns_of_the_assistant_are_two_messages(server: Running) -> None:
    server.say(f"{THINK_END}x{END}")
    call = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
    said = {"role": "assistant", "content": "said"}
    thought = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "thought"}]}
    for items, turns in (([thought, said, call], 1), ([said, thought, call], 2), ([call, said], 2)):
        create(server, input=[{"role": "user", "content": "a"}, *items])
        assert server.last_prompt().count('message role="assistant"') == turns + 1


def test_a_response_cut_by_the_limit_says_so(server: Running) -> None:
    server.say("A thought that does not end")
    response = create(server, max_output_tokens=3)
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert response.output[0].status == "incomplete" and response.output_text == ""
    server.say(CUT_CALL)
    call = create(server, tools=[TOOL], max_output_tokens=server.say(CUT_CALL)).output[-1]
    assert call.type == "function_call" and call.status == "incomplete"


@pytest.mark.parametrize("stream", [False, True])
def test_a_schema_in_text_format_is_obeyed(server: Running, stream: bool) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"]}
    kind = {"type": "json_schema", "name": "A", "schema": schema | {"additionalProperties": False}}
    server.say(f"Hm.{THINK_END}No.{END}")
    body = {"input": "x", "text": {"format": kind}, "temperature": 0, "max_output_tokens": 200}
    answer = create(server, **body, stream=stream)
    response = list(answer)[-1].response if stream else answer
    assert json.loads(response.output_text) == {"a": 1}


def test_a_named_function_is_called(server: Running) -> None:
    server.say(f"No.{THINK_END}No.{END}")
    choice = {"type": "function", "name": "f"}
    response = create(server, tools=[TOOL], tool_choice=choice, temperature=0, max_output_tokens=200)
    assert [item.name for item in response.output if item.type == "function_call"] == ["f"]


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "input"),
        ({"conversation": "c"}, "conversation", "input"),
        ({"store": True}, "store", "false"),
        ({"background": True}, "background", "waits"),
        ({"truncation": "auto"}, "truncation", "never cut"),
        ({"top_logprobs": 2}, "top_logprobs", "/v1/chat/completions"),
        ({"include": ["file_search_call.results"]}, "include[0]", "encrypted"),
        ({"max_tokens": 5}, "max_tokens", "max_output_tokens"),
        ({"max_output_tokens": 0}, "max_output_tokens", "from 1"),
        ({"max_output_tokens": 9000}, "max_output_tokens", "max_model_len"),
        ({"temperature": -1}, "temperature", "at least 0"),
        ({"reasoning": {"effort": "medium"}}, "reasoning.effort", "low, high, max"),
        ({"reasoning": {"effort": 3}}, "reasoning.effort", "a string"),
        ({"reasoning": {"summary": "detailed"}}, "reasoning.summary", "not summarised"),
        ({"reasoning": {"efort": "low"}}, "reasoning.efort", "effort"),
        ({"text": {"format": {"type": "xml"}}}, "text.format", "json_schema"),
        ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format", "schema"),
        (
            {"text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": "objct"}}}},
            "text.format.schema",
            "objct",
        ),
        ({"text": {"verbosity": "high"}}, "text.verbosity", "medium"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "function"),
        ({"tools": [{"type": "function"}]}, "tools[0]", "name"),
        ({"tools": [TOOL | {"nmae": "x"}]}, "tools[0].nmae", "name"),
        ({"tool_choice": "required"}, "tool_choice", "tools"),
        ({"tool_choice": {"type": "function", "name": "g"}, "tools": [TOOL]}, "tool_choice", "f"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice", "required"),
        ({"input": []}, "input", "at least one"),
        ({"input": ["x"]}, "input[0]", "an object"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type", "function_call"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role", "developer"),
        ({"input": [{"role": "user", "content": 5}]}, "input[0].content", "parts"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input[0].content[0].type",
            "text",
        ),
        ({"input": [{"role": "user", "contnet": "x"}]}, "input[0].contnet", "content"),
        (
            {"input": [{"type": "function_call", "name": "f", "call_id": "a"}]},
            "input[0].arguments",
            "a string",
        ),
        (
            {"input": [{"type": "function_call_output", "call_id": "a", "output": "x"}]},
            "input[0]",
            "unknown tool",
        ),
        (
            {"input": [{"type": "reasoning", "encrypted_content": "gAAA"}]},
            "input[0].encrypted_content",
            "Leave",
        ),
        ({"stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation", "false"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_field_that_cannot_be_honoured_is_named(
    server: Running, stream: bool, fields: dict[str, Any], param: str, says: str
) -> None:
    found = error(server, stream=stream, **fields)
    assert found["param"] == param
    assert says in found["message"]


def test_fields_that_change_nothing_are_accepted(server: Running) -> None:
    server.say(f"{THINK_END}Fine.{END}")
    response = create(
        server,
        store=False,
        background=False,
        truncation="disabled",
        metadata={"k": "v"},
        user="me",
        include=["reasoning.encrypted_content"],
        reasoning={"summary": "auto"},
        text={"format": {"type": "text"}, "verbosity": "medium"},
        service_tier="auto",
    )
    assert (response.output_text, response.metadata, response.store) == ("Fine.", {"k": "v"}, False)


def test_a_failure_in_mid_stream_is_the_last_event(server: Running) -> None:
    def fail() -> None:
        server.model.before_step = lambda: None
        raise RuntimeError("broken kernel")

    server.say("Think.")
    server.model.before_step = fail
    events = list(server.client().responses.create(model="tiny", input="x", stream=True))
    assert events[-1].type == "response.failed"
    assert "broken kernel" in events[-1].response.error.message
    server.model.before_step = fail
    with pytest.raises(openai.InternalServerError, match="broken kernel"):
        create(server)
