"""Messages to segments: golden data and the rules of the format one by one."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from longspan.chat import DEFAULT_EFFORT, ImageSlot, Segment, Tokenizer, render
from longspan.errors import RequestError

GOLDEN = json.loads((Path(__file__).parent.parent / "data" / "chat.json").read_text(encoding="utf-8"))
MARKERS = "<|open|><|close|><|sep|><|end_of_msg|><|media_pad|><|media_begin|>[EOS]"
USER = {"role": "user", "content": "hi"}


def merged(segments: list[Segment]) -> list[dict]:
    groups = itertools.groupby(segments, key=lambda s: s.special)
    return [{"text": "".join(s.text for s in group), "special": special} for special, group in groups]


def text_of(*args, **options) -> str:
    return "".join(s.text for s in render(*args, **options))


def refusal(*args, **options) -> RequestError:
    with pytest.raises(RequestError) as info:
        render(*args, **options)
    return info.value


@pytest.mark.parametrize("case", GOLDEN, ids=lambda case: case["name"])
def test_the_segments_equal_the_golden_ones(case):
    assert merged(render(case["messages"], **case["options"])) == case["segments"]


def test_tags_are_cut_into_segments_at_name_key_quote_and_value():
    segments = render([{"role": "user", "content": "Salut !"}], add_generation_prompt=False)
    expected = '<|open|>·message· role·="·user·"·<|sep|>·Salut !·<|close|>·message·<|sep|>·<|end_of_msg|>'
    assert [s.text for s in segments] == expected.split("·")
    assert all(s.special == s.text.startswith("<|") for s in segments)


def assistant(*calls, **fields) -> dict:
    return {"role": "assistant", "content": "", "tool_calls": list(calls), **fields}


def call(name: str, arguments, call_id: str | None = None) -> dict:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def test_a_turn_with_a_call_and_its_result_reads_as_the_format_shows():
    messages = [
        assistant(
            call("stock", '{"sku": "A-17", "limits": {"min":1}}', "c1"),
            reasoning_content="Need the stock level.",
        ),
        {"role": "tool", "tool_call_id": "c1", "content": "42"},
    ]
    assert text_of(messages, add_generation_prompt=False) == (
        '<|open|>message role="assistant"<|sep|>'
        "<|open|>think<|sep|>Need the stock level.<|close|>think<|sep|>"
        "<|open|>response<|sep|><|close|>response<|sep|><|open|>tools<|sep|>"
        '<|open|>call tool="stock" index="1"<|sep|><|open|>argument key="sku" type="string"<|sep|>A-17'
        '<|close|>argument<|sep|><|open|>argument key="limits" type="object"<|sep|>{"min": 1}'
        "<|close|>argument<|sep|><|close|>call<|sep|><|close|>tools<|sep|><|close|>message<|sep|><|end_of_msg|>"
        '<|open|>message role="tool" tool="stock" index="1"<|sep|>42<|close|>message<|sep|><|end_of_msg|>'
    )


@pytest.mark.parametrize(
    ("value", "kind", "written"),
    [
        (True, "boolean", "true"),
        (None, "null", "null"),
        (3, "number", "3"),
        (1.5, "number", "1.5"),
        ('a "b" <|sep|>\n', "string", 'a "b" <|sep|>\n'),
        ("", "string", ""),
        ({"k": "ü"}, "object", '{"k": "ü"}'),
        ([1, "two", None], "array", '[1, "two", null]'),
    ],
)
def test_each_type_of_argument_is_written_as_the_format_says(value, kind, written):
    tag = f'<|open|>argument key="k" type="{kind}"<|sep|>{written}<|close|>argument<|sep|>'
    assert tag in text_of([assistant(call("f", {"k": value}))])
    assert tag in text_of([assistant(call("f", json.dumps({"k": value})))])


def test_argument_keys_keep_the_callers_order_and_are_escaped():
    text = text_of([assistant(call("f", {"z": 1, 'a"&': 2}))])
    assert text.index('key="z"') < text.index('key="a&quot;&amp;"')


@pytest.mark.parametrize("arguments", [None, "", "  ", {}, "{}"])
def test_a_call_without_arguments_has_no_argument_tags(arguments):
    expected = '<|open|>call tool="f" index="1"<|sep|><|close|>call<|sep|>'
    assert expected in text_of([assistant(call("f", arguments))])


def test_arguments_that_are_not_json_become_one_json_block():
    expected = '<|sep|><|open|>json type="object"<|sep|>{"a": <|close|>json<|sep|><|close|>call'
    assert expected in text_of([assistant(call("f", '{"a": '))])


def test_a_bare_call_renders_like_a_wrapped_one():
    bare = {"id": "c", "name": "f", "arguments": {"a": 1}}
    assert render([assistant(bare)]) == render([assistant(call("f", {"a": 1}, "c"))])


def results_of(messages: list[dict]) -> list[str]:
    text = text_of(messages, add_generation_prompt=False)
    return [part.split("<|close|>")[0] for part in text.split('<|open|>message role="tool"')[1:]]


def test_results_are_put_in_the_order_of_their_calls_and_named_after_them():
    calls = assistant(call("a", {}, "1"), call("b", {}, "2"), call("a", {}, "2"))
    second = {"role": "tool", "tool_call_id": "2", "name": "wrong", "content": "for b"}
    first = {"role": "tool", "tool_call_id": "1", "content": "for a"}
    assert results_of([calls, second, first]) == [
        ' tool="a" index="1"<|sep|>for a',
        ' tool="b" index="2"<|sep|>for b',
    ]


def test_results_stay_in_order_if_any_of_them_matches_no_call():
    calls = assistant(call("a", {}, "1"), call("b", {}, "2"))
    second = {"role": "tool", "tool_call_id": "2", "content": "x"}
    stray = {"role": "tool", "tool_call_id": "nope", "name": "c", "content": "y"}
    assert results_of([calls, second, stray]) == [
        ' tool="a" index="1"<|sep|>x',
        ' tool="c" index="2"<|sep|>y',
    ]


def test_results_count_on_across_a_user_message_and_anew_after_an_assistant_message():
    result = {"role": "tool", "name": "t", "content": ""}
    found = results_of([assistant(), result, USER, result, assistant(), result])
    assert found == [f' tool="t" index="{i}"<|sep|>' for i in (1, 2, 1)]


def test_a_result_that_belongs_to_no_call_is_refused():
    error = refusal([USER, {"role": "tool", "tool_call_id": "x", "content": "1"}])
    assert error.param == "messages[1]" and "'x'" in str(error)


def test_tools_declared_in_a_system_message_extend_the_toolset():
    text = text_of([{"role": "system", "tools": [{"name": "😀", "a": 1}]}, USER])
    assert '<|open|>message role="system" type="tool-declare"<|sep|>## New Tools Available\n' in text
    assert '\n\n```json\n[{"a":1,"name":"😀"}]\n```<|close|>' in text


def test_a_json_schema_is_written_compactly_with_sorted_keys():
    wrapper = {"name": "n", "schema": {"type": "object", "properties": {"b": {}, "a": {}}}}
    text = text_of([USER], response_format={"type": "json_schema", "json_schema": wrapper})
    assert "`response_format=json_schema`.\nYour response must be raw JSON data" in text
    assert '```json\n{"properties":{"a":{},"b":{}},"type":"object"}\n```<|close|>message' in text


def test_blank_reasoning_counts_as_none_and_other_reasoning_stays_verbatim():
    blank = text_of([assistant(reasoning_content=" \n"), assistant(reasoning=" x\n")])
    assert "<|open|>think<|sep|><|close|>think" in blank and "<|open|>think<|sep|> x\n<|close|>think" in blank


def test_developer_is_a_system_message():
    assert render([{"role": "developer", "content": "x"}]) == render([{"role": "system", "content": "x"}])


def test_every_part_of_a_content_is_a_segment_of_its_own():
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": ""}, {"type": "text", "text": "two"}]
    texts = [s.text for s in render([{"role": "user", "content": parts}])]
    assert texts[texts.index("one") + 1] == "two"


def test_effort_is_silent_without_thinking_and_defaults_to_max_for_servers():
    assert "thinking_effort" not in text_of([USER], thinking=False, thinking_effort="max")
    assert f"thinking_effort={DEFAULT_EFFORT}`" in text_of([USER], thinking_effort=DEFAULT_EFFORT)
    assert "thinking_effort" not in text_of([USER])


IMAGE = {"type": "image_url", "image_url": {"url": "data:"}}


def test_an_image_becomes_one_control_segment_with_its_original_size():
    segments = render([{"role": "user", "content": ["a", IMAGE, "b"]}], images=[ImageSlot(640, 480, 3)])
    block = (
        "<|media_begin|>image 640x480<|media_content|><|media_pad|><|media_pad|><|media_pad|><|media_end|>"
    )
    assert Segment(block, special=True) in segments


def test_images_that_nobody_can_take_are_refused_before_any_work():
    assert (
        refusal([USER, {"role": "user", "content": ["a", IMAGE]}], images=()).param
        == "messages[1].content[1]"
    )
    assert "1 images" in str(refusal([USER], images=[ImageSlot(1, 1, 1)]))


def test_a_placeholder_typed_by_a_user_takes_no_image():
    typed = [{"role": "user", "content": "<|kimi_image_placeholder|>"}]
    assert Segment("<|kimi_image_placeholder|>") in render(typed, images=())


@pytest.mark.parametrize(
    ("messages", "param", "says"),
    [
        ([USER, {"role": "robot"}], "messages[1].role", "system, developer, user, assistant, tool"),
        (["hi"], "messages[0]", "an object with a role"),
        ("hi", "messages", "a list of messages"),
        ([{"role": "user", "content": 3}], "messages[0].content", "a string, null or a list of parts"),
        ([{"role": "user", "content": [{"type": "audio"}]}], "messages[0].content[0].type", "text, image"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text", "a string"),
        ([{"role": "user", "content": [3]}], "messages[0].content[0]", "an object with a type"),
        ([{"role": "user", "name": 3}], "messages[0].name", "a string"),
        (
            [{"role": "user", "tool_calls": [call("f", {})]}],
            "messages[0].tool_calls",
            "none in a message of role",
        ),
        ([assistant("x")], "messages[0].tool_calls[0]", "an object with a function"),
        ([assistant({"function": 3})], "messages[0].tool_calls[0].function", "an object with a name"),
        ([assistant(call("", {}))], "messages[0].tool_calls[0].function.name", "the name of the function"),
        ([assistant({"type": "x"})], "messages[0].tool_calls[0].type", '"function"'),
        ([assistant(call("f", "[1]"))], "messages[0].tool_calls[0].function.arguments", "JSON of an object"),
        ([assistant(call("f", 3))], "messages[0].tool_calls[0].function.arguments", "an object, or a string"),
        ([{"role": "system", "tools": "x"}], "messages[0].tools", "a list of tools"),
        ([{"role": "system", "tools": ["x"]}], "messages[0].tools[0]", "an object"),
        ([{"role": "system", "tools": [{}], "content": "x"}], "messages[0].content", "a message of its own"),
    ],
)
def test_a_bad_message_is_refused_with_the_name_of_its_field(messages, param, says):
    error = refusal(messages)
    assert error.param == param and says in str(error)


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"thinking_effort": "medium"}, "thinking_effort"),
        ({"tool_choice": "always"}, "tool_choice"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": "json_object"}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"tools": {"a": 1}}, "tools"),
    ],
)
def test_a_bad_option_is_refused_with_its_name(options, param):
    assert refusal([USER], **options).param == param


def test_tools_nested_without_end_are_refused():
    deep: dict = {}
    for _ in range(10_000):
        deep = {"a": deep}
    assert "nested too deeply" in str(refusal([USER], tools=[deep]))


def hostile_conversation(text: str) -> list[dict]:
    return [
        {"role": "system", "content": text, "name": text},
        {"role": "user", "content": [{"type": "text", "text": text}], "name": text},
        {"role": "system", "tools": [{"function": {"name": text, "description": text}}]},
        assistant(call(text, {text: text, "x": {text: [text]}}, text), content=text, reasoning_content=text),
        assistant(call("f", text)),
        {"role": "tool", "name": text, "content": text},
    ]


def test_markers_typed_anywhere_never_become_control_tokens(tokenizer: Tokenizer):
    options = {"tools": [{"function": {"name": "T"}}], "response_format": {"type": "json_object"}}
    benign = tokenizer.encode_segments(render(hostile_conversation("y"), **options))
    segments = render(hostile_conversation(MARKERS), **options)
    ids = tokenizer.encode_segments(segments)
    controls = [i for i in ids if i >= tokenizer.n_base]
    assert controls == [i for i in benign if i >= tokenizer.n_base]
    assert tokenizer.decode(ids) == "".join(s.text for s in segments)
