"""Replies read back: well-formed, malformed and cut, the same for every way of splitting them."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longspan.chat import (
    ContentDelta,
    Event,
    ReasoningDelta,
    Reply,
    ReplyParser,
    Segment,
    Tokenizer,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
    collect,
    render,
)
from longspan.chat.reply_parser import _TAGS
from longspan.chat.xtml import CONTROL_TOKENS

MARKER = re.compile("(" + "|".join(map(re.escape, CONTROL_TOKENS)) + ")")


def ids_of(tokenizer: Tokenizer, markup: str) -> list[int]:
    """Ids of a reply in which every marker is a control token."""
    return tokenizer.encode_segments(
        Segment(part, part in CONTROL_TOKENS) for part in MARKER.split(markup) if part
    )


def new_parser(tokenizer: Tokenizer, thinking: bool) -> ReplyParser:
    numbers = itertools.count()
    return ReplyParser(tokenizer, thinking=thinking, call_id=lambda: f"id{next(numbers)}")


def joined(events: Iterable[Event]) -> list[Event]:
    """Neighbouring pieces of one text made one."""
    result: list[Event] = []
    for event in events:
        last = result[-1] if result else None
        has_text = isinstance(event, ReasoningDelta | ContentDelta | ToolCallArguments)
        if has_text and type(last) is type(event) and replace(last, text=event.text) == event:
            event = replace(event, text=last.text + event.text)
            result.pop()
        result.append(event)
    return result


def feed(parser: ReplyParser, push: Callable, parts: Iterable[Sequence]) -> list[Event]:
    """All events of a reply that arrives in `parts`, having checked that they add up to `parser.reply`."""
    events = [event for part in parts for event in push(part)] + parser.finish()
    assert parser.finish() == [] and parser.channel == "end"
    assert all(event.text for event in events if not isinstance(event, ToolCallStart | ToolCallEnd))
    assert collect(events) == parser.reply
    return joined(events)


def groups(sequence: Sequence, size: int) -> list[Sequence]:
    return [sequence[i : i + size] for i in range(0, len(sequence), size)]


def read(tokenizer: Tokenizer, markup: str, *, thinking: bool = True) -> Reply:
    """The reply, having checked that every split of its ids and of its text gives the same events."""
    ids = ids_of(tokenizer, markup)
    splits = [[ids[:i], ids[i:]] for i in range(len(ids))] + [groups(ids, size) for size in (1, 2, 7)]
    text_splits = [[markup[:i], markup[i:]] for i in range(len(markup))] + [groups(markup, 1)]
    parser = new_parser(tokenizer, thinking)
    expected = feed(parser, parser.push, [ids])
    for split in splits:
        other = new_parser(tokenizer, thinking)
        assert feed(other, other.push, split) == expected
    for split in text_splits:
        other = new_parser(tokenizer, thinking)
        assert feed(other, other.push_text, split) == expected
    return parser.reply


def tag(name: str, body: str) -> str:
    return f"<|open|>{name}<|sep|>{body}<|close|>{name.split()[0]}<|sep|>"


def argument(key: str, kind: str, value: str) -> str:
    return tag(f'argument key="{key}" type="{kind}"', value)


def call(name: str, *body: str) -> str:
    return tag(f'call tool="{name}" index="1"', "".join(body))


def response(body: str) -> str:
    return tag("response", body)


def tools(*body: str) -> str:
    return tag("tools", "".join(body))


END_THINK = "<|close|>think<|sep|>"
END = "<|close|>message<|sep|><|end_of_msg|>"


def arguments_of(reply: Reply) -> list:
    return [json.loads(c.arguments) for c in reply.tool_calls if c.complete]


# --- well-formed replies ------------------------------------------------------------------


def test_reasoning_and_content_are_told_apart(tokenizer):
    reply = read(tokenizer, f"Greet back.{END_THINK}{response(' Hi 안녕 👩‍👧!')}{END}")
    assert reply == Reply("Greet back.", " Hi 안녕 👩‍👧!", ())


def test_without_thinking_the_reply_starts_in_the_answer(tokenizer):
    reply = read(tokenizer, f"Hi!<|close|>response<|sep|>{END}", thinking=False)
    assert reply == Reply(None, "Hi!", ())


def test_an_empty_reply_has_nothing_in_it(tokenizer):
    assert read(tokenizer, "") == Reply(None, None, ())
    assert read(tokenizer, f"{END_THINK}{response('')}{END}") == Reply(None, None, ())


def test_calls_get_names_arguments_and_ids_of_their_own(tokenizer):
    calls = call("get_weather", argument("city", "string", 'Os"lo\n'), argument("days", "number", "3"))
    calls += call("now") + call("f", argument("o", "object", '{"a": [1]}'), argument("b", "boolean", "true"))
    reply = read(tokenizer, f"Look.{END_THINK}{response('')}{tools(calls)}{END}")
    assert [c.name for c in reply.tool_calls] == ["get_weather", "now", "f"]
    assert arguments_of(reply) == [{"city": 'Os"lo\n', "days": 3}, {}, {"o": {"a": [1]}, "b": True}]
    assert len({c.id for c in reply.tool_calls}) == 3 and reply.content is None


def test_call_ids_are_unique_across_replies(tokenizer):
    found = set()
    for _ in range(100):
        parser = ReplyParser(tokenizer, thinking=False)
        parser.push_text(call("f") + call("f"))
        found |= {c.id for c in parser.reply.tool_calls}
    assert len(found) == 200


def test_names_and_keys_are_unescaped(tokenizer):
    reply = read(
        tokenizer,
        END_THINK + tag("tools", call("a&quot;&amp;quot;", argument("&amp;lt;", "string", "&amp;"))),
    )
    assert reply.tool_calls[0].name == 'a"&quot;'
    assert arguments_of(reply) == [{"&lt;": "&amp;"}]


@pytest.mark.parametrize(
    ("kind", "value", "expected"),
    [
        ("string", "", ""),
        ("string", '{"a": 1}', '{"a": 1}'),
        ("string", '"quoted"', '"quoted"'),
        ("string", '\\ " \n \x00 ü', '\\ " \n \x00 ü'),
        ("number", "1.5", 1.5),
        ("number", "", ""),
        ("number", "twelve", "twelve"),
        ("number", "NaN", "NaN"),
        ("number", "9" * 5000, "9" * 5000),
        ("boolean", "true", True),
        ("boolean", "True", "True"),
        ("null", "null", None),
        ("object", '{"a": {"b": []}}', {"a": {"b": []}}),
        ("object", '{"a": ', '{"a": '),
        ("array", "plain text", "plain text"),
        ("array", "[" * 100_000, "[" * 100_000),
        ("unheard-of", "7", 7),
    ],
)
def test_a_value_of_any_type_and_any_text_becomes_json(tokenizer, kind, value, expected):
    parser = new_parser(tokenizer, thinking=False)
    feed(parser, parser.push, [ids_of(tokenizer, call("f", argument("k", kind, value)))])
    assert arguments_of(parser.reply) == [{"k": expected}]


def test_an_argument_without_a_type_is_a_string_and_without_a_key_has_an_empty_one(tokenizer):
    reply = read(tokenizer, call("f", tag('argument key="a"', "1"), tag("argument", "2")), thinking=False)
    assert arguments_of(reply) == [{"a": "1", "": "2"}]


def test_of_a_repeated_key_the_last_value_counts(tokenizer):
    reply = read(
        tokenizer, call("f", argument("a", "number", "1"), argument("a", "number", "2")), thinking=False
    )
    assert arguments_of(reply) == [{"a": 2}]


@pytest.mark.parametrize(("text", "expected"), [('{"a":1}', '{"a":1}'), ('{"a":', '{"a":'), ("  ", "  {}")])
def test_a_json_block_is_passed_through_as_it_is(tokenizer, text, expected):
    reply = read(tokenizer, call("f", tag('json type="object"', text)), thinking=False)
    assert reply.tool_calls[0].arguments == expected and reply.tool_calls[0].complete


def test_a_string_argument_is_streamed_while_it_is_written(tokenizer):
    parser = new_parser(tokenizer, thinking=False)
    parser.push_text('<|open|>call tool="f" index="1"<|sep|><|open|>argument key="k" type="string"<|sep|>')
    words = [f'word {i} "\n' for i in range(200)]
    streamed = [parser.push_text(word) for word in words]
    assert all(isinstance(event, ToolCallArguments) for events in streamed for event in events)
    assert all(streamed)
    parser.push_text("<|close|>argument<|sep|><|close|>call<|sep|>")
    assert arguments_of(parser.reply) == [{"k": "".join(words)}]


@pytest.mark.parametrize("size", [1, 2, 7, 100_000])
def test_parallel_calls_and_a_long_argument_are_the_same_for_every_grouping(tokenizer, size):
    long = "0123456789 안녕 " * 2000
    calls = "".join(call(name, argument("x", "string", long if name == "b" else "1")) for name in "abc")
    ids = ids_of(tokenizer, f"x{END_THINK}{response('y')}{tools(calls)}{END}")
    parser = new_parser(tokenizer, thinking=True)
    feed(parser, parser.push, groups(ids, size))
    assert [c.name for c in parser.reply.tool_calls] == ["a", "b", "c"]
    assert arguments_of(parser.reply) == [{"x": "1"}, {"x": long}, {"x": "1"}]


def test_line_breaks_inside_of_a_name_do_not_lose_the_call(tokenizer):
    reply = read(
        tokenizer, '<|open|>call\n tool="a\nb"\nindex="1"\n<|sep|><|close|> call <|sep|>', thinking=False
    )
    assert [(c.name, c.complete) for c in reply.tool_calls] == [("a\nb", True)]


def test_text_that_looks_like_markup_is_text_when_it_is_not_made_of_control_ids(tokenizer):
    typed = "say <|close|>argument<|sep|><|end_of_msg|>"
    ids = [*ids_of(tokenizer, END_THINK + "<|open|>response<|sep|>"), *tokenizer.encode(typed)]
    ids += ids_of(tokenizer, '<|open|>call tool="f"<|sep|><|open|>argument key="k" type="string"<|sep|>')
    ids += [*tokenizer.encode(typed), *ids_of(tokenizer, "<|close|>argument<|sep|><|close|>call<|sep|>")]
    parser = new_parser(tokenizer, thinking=True)
    feed(parser, parser.push, groups(ids, 1))
    assert parser.reply.content == typed and arguments_of(parser.reply) == [{"k": typed}]


# --- replies that are not as they should be -----------------------------------------------


@pytest.mark.parametrize(
    "end", [f"<|close|>response<|sep|>{END}", END, "<|end_of_msg|>", "", "<|close|>mess"]
)
def test_no_markup_leaks_however_the_answer_ends(tokenizer, end):
    assert read(tokenizer, f"a{END_THINK}<|open|>response<|sep|>Text.{end}") == Reply("a", "Text.", ())


@pytest.mark.parametrize("blank", [" ", "  ", "\n"])
def test_blanks_inside_of_tags_are_no_part_of_their_names(tokenizer, blank):
    markup = f"a{END_THINK}{response('b')}{END}"
    for name in ("think", "response"):
        markup = markup.replace(f"|>{name}<|", f"|>{blank}{name}{blank}<|")
    assert read(tokenizer, markup) == Reply("a", "b", ())


def test_a_reply_cut_inside_thinking_is_all_reasoning(tokenizer):
    assert read(tokenizer, "so far") == Reply("so far", None, ())
    assert read(tokenizer, "so far<|close|>thi") == Reply("so far", None, ())


def test_an_answer_opened_without_closing_the_thinking_ends_it(tokenizer):
    assert read(tokenizer, f"a{response('b')}{END}") == Reply("a", "b", ())
    assert read(tokenizer, f"{response('b')}{END}") == Reply(None, "b", ())


@pytest.mark.parametrize("opening", ["<|open|>tools<|sep|>", ""])
def test_tools_opened_without_closing_the_thinking_are_called(tokenizer, opening):
    reply = read(tokenizer, f"a{opening}{call('f', argument('k', 'number', '1'))}")
    assert reply.reasoning == "a" and arguments_of(reply) == [{"k": 1}]


def test_an_answer_without_its_tag_is_still_the_answer(tokenizer):
    assert read(tokenizer, f"a{END_THINK}\n\nb c{END}") == Reply("a", "\n\nb c", ())


def test_blank_content_beside_a_call_is_dropped_and_alone_is_kept(tokenizer):
    assert read(tokenizer, END_THINK + response(" \n") + tools(call("f"))).content is None
    assert read(tokenizer, END_THINK + response(" \n") + END).content == " \n"
    assert read(tokenizer, END_THINK + response(" \n b") + tools(call("f"))).content == " \n b"


def test_blanks_between_tags_are_dropped_and_text_there_is_content(tokenizer):
    blanks = tools("\n", call("f"), "\n", call("g"), "\n")
    assert read(tokenizer, f"a{END_THINK}\n{response('b')}\n{blanks}\n{END}").content == "b"
    assert read(tokenizer, END_THINK + "\n" + tools(" x", call("f"))).content == " x"
    stray = read(tokenizer, END_THINK + response("b") + " stray" + tools(call("f", " text")))
    assert stray.content == "b stray text" and stray.tool_calls[0].arguments == "{}"


@pytest.mark.parametrize("header", ["call", 'call tool=""', 'call index="1"'])
def test_a_call_without_a_name_is_no_call_and_its_text_stays_visible(tokenizer, header):
    nameless = tag(header, argument("k", "string", "v"))
    reply = read(tokenizer, END_THINK + tools(nameless, call("f")))
    assert [c.name for c in reply.tool_calls] == ["f"] and reply.content == "v"


def test_calls_cut_off_by_the_end_stay_incomplete_after_the_complete_ones(tokenizer):
    start = f"{END_THINK}<|open|>tools<|sep|>{call('f', argument('k', 'number', '1'))}"
    opened = '<|open|>call tool="g" index="2"<|sep|>'
    for rest, arguments in [
        ("", ""),
        ('<|open|>argument key="k" type="string"<|sep|>va', '{"k": "va'),
        ('<|open|>argument key="k" type="number"<|sep|>12', '{"k": 12'),
        (argument("k", "number", "12"), '{"k": 12'),
        (argument("k", "number", "12") + "<|end_of_msg|>", '{"k": 12'),
    ]:
        reply = read(tokenizer, start + opened + rest)
        assert [(c.name, c.complete) for c in reply.tool_calls] == [("f", True), ("g", False)]
        assert reply.tool_calls[1].arguments == arguments


def test_a_call_whose_header_is_cut_is_dropped(tokenizer):
    assert read(tokenizer, f'{END_THINK}<|open|>tools<|sep|><|open|>call tool="get_wea') == Reply(
        None, None, ()
    )


def test_missing_closing_tags_inside_of_tools_are_supplied_by_the_next_tag(tokenizer):
    opened = '<|open|>call tool="f" index="1"<|sep|><|open|>argument key="a" type="number"<|sep|>1'
    more = '<|open|>argument key="b" type="string"<|sep|>2'
    reply = read(tokenizer, f"{END_THINK}{opened}{more}{opened}<|close|>tools<|sep|>")
    assert arguments_of(reply) == [{"a": 1, "b": "2"}, {"a": 1}]


def test_a_tag_without_its_sep_counts_if_its_name_is_known(tokenizer):
    reply = read(
        tokenizer, f'a<|close|>think<|open|>response<|sep|>b<|open|>call tool="f"<|close|>call<|sep|>{END}'
    )
    assert (reply.reasoning, reply.content) == ("a", "b")
    assert [(c.name, c.complete) for c in reply.tool_calls] == [("f", True)]


def test_text_after_a_stray_opening_token_is_not_lost(tokenizer):
    assert read(tokenizer, "a <|open|>why not <|end_of_msg|>").reasoning == "a why not "
    assert read(tokenizer, "a <|open|>why not ").reasoning == "a why not "
    assert read(tokenizer, "a <|open|>a call").reasoning == "a a call"


@pytest.mark.parametrize("end", ["<|sep|>", "<|open|>", "<|close|>", "<|end_of_msg|>", ""])
@pytest.mark.parametrize("name", [*_TAGS, "hello"])
@pytest.mark.parametrize("token", ["<|open|>", "<|close|>"])
def test_text_that_stands_in_a_tag_is_not_lost(tokenizer, token, name, end):
    reply = read(tokenizer, f"x{token}{name} there general{end}")
    assert (reply.reasoning or "") + (reply.content or "") in (
        f"x{name} there general",
        "x there general",
    )


def test_text_in_a_tag_belongs_to_its_body(tokenizer):
    assert read(tokenizer, f"a{END_THINK}<|open|>response Hello<|end_of_msg|>") == Reply("a", " Hello", ())


def test_unknown_tags_vanish_and_their_bodies_stay(tokenizer):
    markup = "a" + tag("b", "c") + END_THINK + "<|open|>response<|sep|>d" + tag('em x="1"', "e") + "<|sep|>f"
    assert read(tokenizer, markup) == Reply("ac", "def", ())


def test_a_json_block_and_arguments_do_not_mix(tokenizer):
    reply = read(tokenizer, call("f", argument("a", "number", "1"), tag("json", '{"b": 2}')), thinking=False)
    assert arguments_of(reply) == [{"a": 1}] and reply.content == '{"b": 2}'


def test_nothing_is_read_after_the_end_of_the_message(tokenizer):
    assert read(tokenizer, f"a{END_THINK}{END}b<|open|>response<|sep|>c") == Reply("a", None, ())


def test_other_special_tokens_are_silent(tokenizer):
    parser = new_parser(tokenizer, thinking=False)
    pad = tokenizer.special["<|media_pad|>"]
    feed(parser, parser.push, [[*tokenizer.encode("a"), pad, *tokenizer.encode("b")]])
    assert parser.reply.content == "ab"


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"a\x80b", "a\ufffdb"),
        ("안녕".encode()[:4], "안\ufffd"),
        ("👩\u200d👩\u200d👧".encode(), "👩\u200d👩\u200d👧"),
        (b"\xff\xfe ok", "\ufffd\ufffd ok"),
    ],
)
@pytest.mark.parametrize("size", [1, 2, 100])
def test_characters_across_tokens_come_out_whole_and_broken_ones_are_replaced(
    tokenizer, data, expected, size
):
    for end in ([], ids_of(tokenizer, END)):
        parser = new_parser(tokenizer, thinking=False)
        feed(parser, parser.push, groups([*data, *end], size))
        assert parser.reply.content == expected


def test_half_a_marker_at_the_end_of_a_text_is_text(tokenizer):
    parser = new_parser(tokenizer, thinking=False)
    assert parser.push_text("a <|clo") == [ContentDelta("a ")]
    assert parser.finish() == [ContentDelta("<|clo")]


def test_the_channel_says_where_the_next_token_falls(tokenizer):
    parser = new_parser(tokenizer, thinking=True)
    seen = [parser.channel]
    for markup in [END_THINK, "<|open|>response<|sep|>", "<|open|>tools<|sep|>", END]:
        parser.push(ids_of(tokenizer, markup))
        seen.append(parser.channel)
    assert seen == ["think", "between", "response", "tools", "end"]


# --- any reply ----------------------------------------------------------------------------

HEADERS = [
    *(
        "think",
        "response",
        "tools",
        "message",
        "call",
        "argument",
        "json",
        "thi",
        "",
        " think ",
        'em x="1"',
        "other",
    ),
    *(
        'call tool="f" index="1"',
        'call tool="g"',
        'argument key="a" type="string"',
        'argument key="n" type="number"',
    ),
]
TEXTS = ["x", " ", "\n", "12", '{"a":1}', '"', "\\", "안", "<|", "|>", "open", "a b"]
NOISE = st.lists(st.sampled_from([*CONTROL_TOKENS, *HEADERS, *TEXTS]))
TAGS = st.builds("{}{}<|sep|>".format, st.sampled_from(CONTROL_TOKENS[:2]), st.sampled_from(HEADERS))
MARKUP = st.builds(
    lambda *parts: "".join(itertools.chain(*parts)), st.lists(TAGS | st.sampled_from(TEXTS)), NOISE
)


def random_split(data: st.DataObject, sequence: Sequence) -> list[Sequence]:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(sequence)), max_size=8)))
    return [sequence[a:b] for a, b in itertools.pairwise([0, *cuts, len(sequence)])]


@given(MARKUP, st.booleans(), st.data())
@settings(max_examples=500, deadline=None)
def test_any_markup_reads_the_same_for_any_split_by_ids_and_by_text(tokenizer, markup, thinking, data):
    by_ids, by_text, whole = (new_parser(tokenizer, thinking) for _ in range(3))
    ids = ids_of(tokenizer, markup)
    expected = feed(whole, whole.push, [ids])
    assert feed(by_ids, by_ids.push, random_split(data, ids)) == expected
    assert feed(by_text, by_text.push_text, random_split(data, markup)) == expected


@given(st.data(), st.booleans())
@settings(max_examples=300, deadline=None)
def test_any_ids_at_all_are_read_without_an_error(tokenizer, data, thinking):
    control = st.sampled_from([tokenizer.special[token] for token in CONTROL_TOKENS])
    ids = data.draw(st.lists(control | st.integers(0, tokenizer.vocab_size - 1), max_size=60))
    split, whole = new_parser(tokenizer, thinking), new_parser(tokenizer, thinking)
    assert feed(split, split.push, random_split(data, ids)) == feed(whole, whole.push, [ids])


@given(MARKUP, st.booleans())
@settings(max_examples=500, deadline=None)
def test_every_text_outside_of_tags_comes_out_exactly_once(tokenizer, markup, thinking):
    """Each body text gets a number of its own, and is looked for in all that the reply holds."""
    numbered, visible, in_header = [], [], False
    for part in MARKER.split(markup):
        if part in CONTROL_TOKENS:
            in_header = part in CONTROL_TOKENS[:2]
            numbered.append(part)
            if part == "<|end_of_msg|>":
                break
        elif in_header:
            numbered.append(part)
        else:
            visible.append(f"T{len(visible)}T")
            numbered.append(visible[-1])
    parser = new_parser(tokenizer, thinking)
    feed(parser, parser.push, [ids_of(tokenizer, "".join(numbered))])
    reply = parser.reply
    found = (reply.reasoning or "") + (reply.content or "") + "".join(c.arguments for c in reply.tool_calls)
    assert sorted(re.findall(r"T\d+T", found)) == sorted(visible)


@given(MARKUP, st.booleans())
@settings(max_examples=300, deadline=None)
def test_nothing_stands_between_the_events_of_a_call(tokenizer, markup, thinking):
    parser = new_parser(tokenizer, thinking)
    open_call = None
    for event in [*parser.push(ids_of(tokenizer, markup)), *parser.finish()]:
        if isinstance(event, ToolCallStart):
            open_call = event.index
        elif isinstance(event, ToolCallArguments | ToolCallEnd):
            assert event.index == open_call
        else:
            open_call = None


def test_text_within_a_call_comes_after_it(tokenizer):
    markup = (
        '<|open|>tools<|sep|><|open|>call tool="f"<|sep|>one'
        '<|open|>argument key="n" type="number"<|sep|>12<|close|>argument<|sep|>two'
    )
    ends = {"<|close|>call<|sep|>": True, "": False}
    for end, complete in ends.items():
        parser = new_parser(tokenizer, thinking=False)
        events = [*parser.push(ids_of(tokenizer, markup + end)), *parser.finish()]
        assert events[-1] == ContentDelta("onetwo")
        assert [call.complete for call in parser.reply.tool_calls] == [complete]


@given(MARKUP, st.booleans())
@settings(max_examples=300, deadline=None)
def test_complete_calls_always_have_json_objects_for_arguments(tokenizer, markup, thinking):
    parser = new_parser(tokenizer, thinking)
    feed(parser, parser.push_text, [markup.replace("json", "other")])
    assert all(isinstance(arguments, dict) for arguments in arguments_of(parser.reply))


# --- there and back -----------------------------------------------------------------------

VISIBLE = st.text(min_size=1).filter(str.strip)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)
CALL = st.builds(
    lambda name, arguments: {"function": {"name": name, "arguments": arguments}},
    st.text(min_size=1),
    st.dictionaries(st.text(), JSON, max_size=4) | st.just('{"broken": '),
)
TURN = st.builds(
    lambda reasoning, content, calls: {
        "role": "assistant",
        "reasoning_content": reasoning,
        "content": content,
        "tool_calls": calls,
    },
    st.none() | VISIBLE,
    st.none() | VISIBLE,
    st.lists(CALL, max_size=3),
)


@given(TURN, st.booleans())
@settings(max_examples=200, deadline=None)
def test_a_reply_sent_back_extends_the_prompt_token_for_token(tokenizer, turn, thinking):
    """The prompt, then the model's own tokens, are a prefix of the next turn's prompt."""
    question, follow_up = {"role": "user", "content": "why?"}, {"role": "user", "content": "and then?"}
    options = {"thinking": thinking, "thinking_effort": "max", "tools": [{"type": "function"}]}
    prompt = tokenizer.encode_segments(render([question], **options))
    turn_and_prompt = tokenizer.encode_segments(
        render([question, turn], add_generation_prompt=False, **options)
    )
    assert turn_and_prompt[: len(prompt)] == prompt
    parser = new_parser(tokenizer, thinking)
    feed(parser, parser.push, [turn_and_prompt[len(prompt) :]])
    following = render([question, parser.reply.to_message(), follow_up], **options)
    assert tokenizer.encode_segments(following)[: len(turn_and_prompt)] == turn_and_prompt


def test_reasoning_before_a_call_stays_in_the_prompt_after_its_result(tokenizer):
    question = {"role": "user", "content": "weather?"}
    prompt = tokenizer.encode_segments(render([question]))
    answer = ids_of(tokenizer, f"Look it up.{END_THINK}{response('')}")
    header = Segment("<|open|>", True), Segment("tools"), Segment("<|sep|>", True)
    answer += tokenizer.encode_segments(header)
    turn = {"role": "assistant", "reasoning_content": "Look it up.", "tool_calls": [{"id": "c", "name": "f"}]}
    result = {"role": "tool", "tool_call_id": "c", "content": "cold"}
    following = tokenizer.encode_segments(render([question, turn, result, question]))
    assert following[: len(prompt) + len(answer)] == prompt + answer
