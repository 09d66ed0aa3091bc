"""/v1/messages with Anthropic's client: blocks, events, what is refused, what is sent back."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import pytest
from anthropic.types import Message
from support.scripted import Running
from support.xtml_replies import CALL, CUT_CALL, END, THINK_END, TWO_CALLS

PATH = "/v1/messages"
USER = [{"role": "user", "content": "Salut !"}]
TOOL = {
    "name": "f",
    "description": "Looks up.",
    "input_schema": {"type": "object", "properties": {"k": {"type": "string"}}},
}
THINKING = {"type": "enabled", "budget_tokens": 1024}
REPLIES = [
    f"Think.{THINK_END}Bonjour 한국어 👩‍👩‍👧.{END}",
    f"{THINK_END}{END}",
    "Only thinking, cut off",
    CALL,
    TWO_CALLS,
    CUT_CALL,
]


def client(server: Running, **options: Any) -> anthropic.Anthropic:
    return anthropic.Anthropic(**({"base_url": server.url, "api_key": "none", "max_retries": 0} | options))


def create(server: Running, **body: Any) -> Message:
    given = {"model": "tiny", "max_tokens": 2000, "messages": USER, "thinking": THINKING} | body
    return client(server).messages.create(**given)


def error(server: Running, status: int = 400, **body: Any) -> str:
    answer = server.post(PATH, {"max_tokens": 100, "messages": USER} | body)
    assert answer.status_code == status, answer.text
    found = answer.json()
    assert set(found) == {"type", "error", "request_id"} and set(found["error"]) == {"type", "message"}
    assert answer.headers["request-id"] == found["request_id"]
    return f"{found['error']['type']}: {found['error']['message']}"


def plain(message: Message) -> dict[str, Any]:
    """A message without what differs from request to request."""
    fields = message.model_dump(exclude={"id", "parsed_output"})
    for i, block in enumerate(fields["content"]):
        block.pop("parsed_output", None)
        if block["type"] == "tool_use":
            block["id"] = f"call_{i}"
    return fields


@pytest.mark.parametrize("reply", REPLIES)
@pytest.mark.parametrize("limit", [2000, 1025, 1, 20])
def test_a_stream_adds_up_to_the_whole_message(server: Running, reply: str, limit: int) -> None:
    server.say(reply)
    body = {"tools": [TOOL], "max_tokens": limit}
    if limit <= 1024:
        body["thinking"] = {"type": "adaptive"}
    whole = create(server, **body)
    given = {"model": "tiny", "messages": USER, "thinking": THINKING} | body
    with client(server).messages.stream(**given) as stream:
        kinds = [event.type for event in stream if event.type.startswith(("message", "content_block"))]
        added_up = stream.get_final_message()
    assert plain(added_up) == plain(whole)
    assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == len(whole.content)


def test_thinking_text_and_tools_are_blocks_in_their_order(server: Running) -> None:
    server.say(CALL)
    message = create(server, tools=[TOOL])
    thinking, text, use = message.content
    assert (thinking.thinking, text.text) == ("Hm.", "Sure.")
    assert (use.type, use.name, use.input) == ("tool_use", "f", {"k": "v"})
    assert (message.stop_reason, message.role, message.model) == ("tool_use", "assistant", "tiny")


def test_arguments_are_streamed_while_they_are_written(server: Running) -> None:
    server.say(CALL.replace(">v<", f">{'word ' * 200}<"))
    events = client(server).messages.create(
        model="tiny", max_tokens=2000, messages=USER, tools=[TOOL], thinking=THINKING, stream=True
    )
    deltas = [event.delta for event in events if event.type == "content_block_delta"]
    pieces = [delta.partial_json for delta in deltas if delta.type == "input_json_delta"]
    assert json.loads("".join(pieces)) == {"k": "word " * 200} and len(pieces) > 100


def test_the_blocks_of_a_message_sent_back_extend_the_prompt_token_for_token(server: Running) -> None:
    server.say(CALL)
    first = create(server, tools=[TOOL], system="Be brief.")
    turn = server.model.script.prompts[-1] + server.model.script.encode(CALL)
    result = {"type": "tool_result", "tool_use_id": first.content[-1].id, "content": "42"}
    told = {"role": "user", "content": [result, {"type": "text", "text": "And?"}]}
    messages = [*USER, {"role": "assistant", "content": first.content}, told]
    server.say(f"Ok.{THINK_END}42{END}")
    create(server, tools=[TOOL], system="Be brief.", messages=messages)
    assert server.model.script.prompts[-1][: len(turn)] == turn
    prompt = server.last_prompt()
    assert prompt.index(">42<") < prompt.index(">And?<")


@pytest.mark.parametrize(
    ("fields", "effort"),
    [
        ({}, None),
        ({"thinking": {"type": "disabled"}}, None),
        ({"thinking": {"type": "enabled", "budget_tokens": 4095}}, "low"),
        ({"thinking": {"type": "enabled", "budget_tokens": 4096}}, "high"),
        ({"thinking": {"type": "adaptive"}}, "max"),
        ({"thinking": {"type": "adaptive"}, "output_config": {"effort": "low"}}, "low"),
    ],
)
def test_thinking_is_off_unless_asked_for_and_a_budget_chooses_the_effort(
    server: Running, fields: dict[str, Any], effort: str | None
) -> None:
    server.say(f"{'' if effort is None else THINK_END}Straight.{END}")
    answer = server.post(PATH, {"max_tokens": 5000, "messages": USER} | fields).json()
    assert answer["content"] == [{"type": "text", "text": "Straight."}]
    prompt = server.last_prompt()
    assert prompt.endswith("response<|sep|>" if effort is None else "think<|sep|>")
    assert effort is None or f"`thinking_effort={effort}`" in prompt


@pytest.mark.parametrize("stream", [False, True])
def test_thinking_can_be_left_out(server: Running, stream: bool) -> None:
    server.say(f"Secret.{THINK_END}Open.{END}")
    answer = server.post(
        PATH,
        {"max_tokens": 100, "messages": USER, "stream": stream}
        | {"thinking": {"type": "adaptive", "display": "omitted"}},
    )
    blocks = answer.json()["content"] if not stream else []
    assert answer.status_code == 200 and "thinking_delta" not in answer.text and "Secret" not in answer.text
    assert stream or blocks == [{"type": "text", "text": "Open."}]


def test_an_assistants_message_that_stands_last_is_gone_on_with(server: Running) -> None:
    server.say(f" blue.{END}")
    messages = [*USER, {"role": "assistant", "content": "It is"}]
    message = create(server, messages=messages, thinking={"type": "disabled"})
    assert message.content[0].text == " blue."
    assert server.last_prompt().endswith("<|open|>response<|sep|>It is")


@pytest.mark.parametrize("stream", [False, True])
def test_stop_sequences_end_the_answer_and_are_named(server: Running, stream: bool) -> None:
    server.say(f"A halt here.{THINK_END}Now halt there.{END}")
    answer = create(server, stop_sequences=["zzz", "halt"], stream=stream)
    if stream:
        *_, delta, stop = answer
        assert (delta.delta.stop_reason, delta.delta.stop_sequence) == ("stop_sequence", "halt")
        assert stop.type == "message_stop"
    else:
        assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", "halt")
        assert answer.content[-1].text == "Now "


@pytest.mark.parametrize(
    ("choice", "names"), [({"type": "any"}, {"f"}), ({"type": "tool", "name": "f"}, {"f"})]
)
def test_a_forced_tool_is_used(server: Running, choice: dict[str, Any], names: set[str]) -> None:
    server.say(f"No.{THINK_END}No.{END}")
    message = create(server, tools=[TOOL], tool_choice=choice, extra_body={"temperature": 0})
    assert {block.name for block in message.content if block.type == "tool_use"} == names
    assert message.stop_reason == "tool_use"


def test_tool_choice_none_and_one_tool_at_a_time(server: Running) -> None:
    server.say(TWO_CALLS)
    none = create(server, tools=[TOOL], tool_choice={"type": "none"})
    assert [block.type for block in none.content] == ["thinking"]
    one = create(server, tools=[TOOL], tool_choice={"type": "auto", "disable_parallel_tool_use": True})
    assert [block.type for block in one.content] == ["thinking", "tool_use"]


def test_a_schema_in_output_config_is_obeyed(server: Running) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"]}
    kind = {"type": "json_schema", "schema": schema | {"additionalProperties": False}}
    server.say(f"Hm.{THINK_END}No.{END}")
    body = {"max_tokens": 200, "messages": USER, "temperature": 0, "output_config": {"format": kind}}
    answer = server.post(PATH, body | {"thinking": {"type": "adaptive"}}).json()
    assert json.loads(answer["content"][-1]["text"]) == {"a": 1}


def test_counted_tokens_are_those_of_the_prompt(server: Running) -> None:
    server.say(f"{THINK_END}x{END}")
    given = {"model": "tiny", "messages": USER, "tools": [TOOL], "system": "Be brief.", "thinking": THINKING}
    count = client(server).messages.count_tokens(**given).input_tokens
    message = client(server).messages.create(**given, max_tokens=2000)
    assert count == message.usage.input_tokens == len(server.model.script.prompts[-1])


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"max_tokens": None}, "`max_tokens`"),
        ({"max_tokens": 0}, "from 1"),
        ({"max_tokens": 9000}, "max_model_len"),
        ({"temperature": -1}, "at least 0"),
        ({"stop": ["x"]}, "stop_sequences"),
        ({"stop_sequences": [""]}, "`stop_sequences`"),
        ({"colour": 1}, "`colour`"),
        ({"container": "c"}, "built-in"),
        ({"thinking": {"type": "enabled", "budget_tokens": 100}}, "less than `max_tokens`"),
        ({"thinking": {"type": "sometimes"}}, "`thinking.type`"),
        ({"thinking": {"type": "enabled", "budget": 5}}, "`thinking.budget`"),
        ({"thinking": {"type": "adaptive", "display": "all"}}, "summarized"),
        ({"output_config": {"effort": "medium"}}, "low, high, max"),
        ({"output_config": {"format": {"type": "text"}}}, "`output_config.format`"),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {"type": "x"}}}},
            "output_config.format",
        ),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "`tools[0].type`"),
        ({"tools": [{"input_schema": {}}]}, "`tools[0].name`"),
        ({"tools": [TOOL | {"parameters": {}}]}, "`tools[0].parameters`"),
        ({"tool_choice": {"type": "any"}}, "tools"),
        ({"tool_choice": {"type": "tool", "name": "g"}, "tools": [TOOL]}, "f"),
        ({"tool_choice": {"type": "required"}}, "any"),
        ({"messages": []}, "empty"),
        ({"messages": ["x"]}, "`messages[0]`"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "`messages[0].role`"),
        ({"messages": [{"role": "user", "content": 5}]}, "`messages[0].content`"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "`messages[0].content[0].type`"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "txt": 1}]}]},
            "`messages[0].content[0].txt`",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "`messages[0].content[0].text`"),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "q"}]}]},
            "messages[0] is the result of an unknown tool",
        ),
        (
            {
                "messages": [
                    {
                        "role": "assistant",
                        "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {}}],
                    }
                ]
            },
            "Send its result",
        ),
        ({"system": [{"type": "image"}]}, "`system[0].type`"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_be_honoured_is_named(
    server: Running, stream: bool, fields: dict[str, Any], says: str
) -> None:
    found = error(server, stream=stream, **fields)
    assert found.startswith("invalid_request_error: ") and says in found, found


def test_errors_have_anthropics_types(server: Running) -> None:
    assert error(server, 404, model="claude").startswith("not_found_error")
    with pytest.raises(anthropic.NotFoundError):
        create(server, model="claude")
    for path, status in ((f"{PATH}/batches", 404), (f"{PATH}/count_tokens", 405)):
        answer = server.get(path)
        assert answer.status_code == status and answer.json()["type"] == "error"
    assert "message" in server.get(f"{PATH}x").json()["error"], "a path beside it is not Anthropic's"


@pytest.mark.parametrize("stream", [False, True])
def test_a_failure_is_an_error_of_the_client(server: Running, stream: bool) -> None:
    steps = iter(range(2))

    def fail_later() -> None:
        if next(steps, None) is None:
            server.model.before_step = lambda: None
            raise RuntimeError("broken kernel")

    server.say("Think.")
    server.model.before_step = fail_later
    with pytest.raises(anthropic.APIStatusError, match="broken kernel"):
        list(create(server, stream=stream))
