"""Replies through vLLM's parsers, whole and in pieces: what `longspan.chat` reads in the same text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import xgrammar
from hypothesis import given
from hypothesis import strategies as st
from support.xtml_replies import CALL, CUT_CALL, END, THINK_END, TWO_CALLS, call, with_calls
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.exceptions import VLLMValidationError
from vllm.parser import Parser, ParserManager

from longspan.chat import Reply, ReplyParser, ToolCall
from longspan.chat.xtml import CONTROL_TOKENS
from longspan.errors import CheckpointError
from longspan.plugin_vllm import register
from longspan.plugin_vllm.tokenizer import LongspanTokenizer, Markup

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
USER = {"role": "user", "content": "hi"}
THINKING = "<|open|>think<|sep|>"
ANSWERING = "<|open|>response<|sep|>"

THOUGHTFUL = [
    f"Greet back.{THINK_END} Hi 안녕 👩‍👧!{END}",
    f"{THINK_END}{END}",
    f"{THINK_END}\n{END}",
    f"Hm.<|close|>think<|sep|>\n <|open|>response<|sep|>Hi{END}",
    f"Hm.<|close|>think<|sep|>stray<|open|>response<|sep|>Hi{END}",
    f"Hm.<|open|>response<|sep|>Hi{END}",
    f"Hm.<|close|>think<|open|>response<|sep|>Hi{END}",
    f"Hm.{call(1, ('k', 'string', 'v'))}",
    "Hm.<|close|>message<|sep|>after",
    "Hm.<|end_of_msg|>",
    "Hm <|open|>unknown<|sep|> text <|close|>unknown<|sep|> goes on",
    "cut in the thin",
    "cut in a marker <|clo",
    "cut in a tag <|close|>thi",
    "cut behind a tag <|close|>think<|sep|>",
    "no marker <| at all <|",
    "",
    CALL,
    TWO_CALLS,
    CUT_CALL,
    with_calls(
        call(1, ("k", "number", "1.0"), ("o", "object", '{"b":1,  "a":[2]}'), ("s", "string", 'q"\n'))
    ),
    with_calls(
        '<|open|>call tool="f" index="1"<|sep|><|open|>json type="object"<|sep|>{"a": 1}<|close|>json<|sep|>'
    ),
    with_calls(call(1, ("k", "string", "v")), content="") + "trailing",
]
ANSWERS = [f"Hi!{END}", "Hi", "", f"{END}", "  \n", THINK_END, with_calls(call(1, ("k", "array", "[1]")))[3:]]
CASES = [(text, True) for text in THOUGHTFUL] + [(text, False) for text in ANSWERS]


@pytest.fixture(scope="module")
def tokenizer() -> LongspanTokenizer:
    register()
    return LongspanTokenizer.from_pretrained(Path(__file__).parents[2] / "models/k31-tiny")


def parser_of(tokenizer: LongspanTokenizer, body: ChatCompletionRequest) -> Parser:
    kind = ParserManager.get_parser("longspan", "longspan", enable_auto_tools=True, tokenizer=tokenizer)
    assert kind is not None
    options = body.build_chat_params(None, "auto").chat_template_kwargs
    return kind(tokenizer, body.tools, chat_template_kwargs=options)


def request(thinking: bool = True, **fields: Any) -> ChatCompletionRequest:
    fields = {"messages": [USER], "tools": [TOOL], "chat_template_kwargs": {"thinking": thinking}} | fields
    return ChatCompletionRequest(model="m", **fields)


def ids_of(tokenizer: LongspanTokenizer, markup: str) -> list[int]:
    return tokenizer.encode(Markup(markup))


def reply_of(tokenizer: LongspanTokenizer, text: str, thinking: bool) -> Reply:
    """What our own server makes of it, apart from the ids of calls."""
    parser = ReplyParser(tokenizer.base, thinking=thinking)
    parser.push_text(text)
    parser.finish()
    return without_ids(parser.reply)


def without_ids(reply: Reply) -> Reply:
    calls = tuple(ToolCall("", call.name, call.arguments, complete=True) for call in reply.tool_calls)
    return Reply(reply.reasoning, reply.content, calls)


def whole(tokenizer: LongspanTokenizer, text: str, body: ChatCompletionRequest) -> Reply:
    reasoning, content, calls = parser_of(tokenizer, body).parse(text, body, enable_auto_tools=True)
    assert all(call.id for call in calls or ())
    return Reply(
        reasoning or None,
        content or None,
        tuple(ToolCall("", call.name, call.arguments, complete=True) for call in calls or ()),
    )


def streamed(tokenizer: LongspanTokenizer, parts: Sequence[str], body: ChatCompletionRequest) -> Reply:
    parser = parser_of(tokenizer, body)
    thinking = body.chat_template_kwargs["thinking"]
    prompt = ids_of(tokenizer, THINKING if thinking else ANSWERING)
    reasoning, content = "", ""
    calls: dict[int, ToolCall] = {}
    for i, part in enumerate(parts):
        ids = ids_of(tokenizer, part)
        delta = parser.parse_delta(part, ids, body, prompt, finished=i == len(parts) - 1)
        if delta is None:
            continue
        reasoning += delta.reasoning or ""
        content += delta.content or ""
        for piece in delta.tool_calls:
            if piece.index not in calls:
                assert piece.id and piece.function.name, "a call begins with its id and name"
                calls[piece.index] = ToolCall("", piece.function.name, "", complete=True)
            seen = calls[piece.index]
            arguments = seen.arguments + (piece.function.arguments or "")
            calls[piece.index] = ToolCall("", seen.name, arguments, complete=True)
    return Reply(reasoning or None, content or None, tuple(calls.values()))


@pytest.mark.parametrize(("text", "thinking"), CASES)
def test_a_whole_reply_is_read_as_by_our_own_server(tokenizer, text, thinking):
    assert whole(tokenizer, text, request(thinking)) == reply_of(tokenizer, text, thinking)


@pytest.mark.parametrize(("text", "thinking"), CASES)
def test_a_reply_in_pieces_is_the_whole_one_for_every_split(tokenizer, text, thinking):
    expected = reply_of(tokenizer, text, thinking)
    for i in range(len(text) + 1):
        assert streamed(tokenizer, [text[:i], text[i:]], request(thinking)) == expected
    assert streamed(tokenizer, [*text, ""], request(thinking)) == expected


PIECES = [
    *CONTROL_TOKENS,
    "think",
    "response",
    "tools",
    "message",
    " ",
    "x",
    'call tool="f"',
    'argument key="k"',
]


@given(pieces=st.lists(st.sampled_from(PIECES), max_size=14))
def test_any_sequence_of_markers_and_text_is_read_alike(tokenizer, pieces):
    expected = reply_of(tokenizer, "".join(pieces), thinking=True)
    assert whole(tokenizer, "".join(pieces), request()) == expected
    assert streamed(tokenizer, [*pieces, ""], request()) == expected


def test_calls_are_left_out_where_the_request_allows_none(tokenizer):
    for body in (request(tool_choice="none"), request(tools=None)):
        expected = Reply("Hm.", "Sure.", ())
        assert whole(tokenizer, CALL, body) == expected
        assert streamed(tokenizer, [*CALL, ""], body) == expected


def test_an_answer_that_is_continued_holds_no_reasoning(tokenizer):
    last = {"role": "assistant", "content": "So", "reasoning": "Hm."}
    body = request(messages=[USER, last], continue_final_message=True, add_generation_prompt=False)
    assert whole(tokenizer, f" be it.{END}", body) == Reply(None, " be it.", ())


@pytest.mark.parametrize(
    ("prompt", "ended"),
    [
        (THINKING, False),
        (ANSWERING, True),
        (f'{THINKING}Hm.{THINK_END}Hi{END}<|open|>message role="assistant"<|sep|>{THINKING}', False),
        (f"{THINKING}Hm.<|close|>think<|sep|>", True),
        (f"{THINKING}Hm.<|open|>tools<|sep|>", True),
        (f"{THINKING}Hm.<|open|>other<|sep|>", False),
        (f"{THINKING}Hm.<|close|>think", False),
        ("", True),
        ("text alone", True),
    ],
)
def test_the_newest_tag_says_whether_thinking_is_over(tokenizer, prompt, ended):
    parser = parser_of(tokenizer, request()).reasoning_parser
    ids = ids_of(tokenizer, prompt)
    assert parser.is_reasoning_end(ids) is ended
    assert parser.is_reasoning_end_streaming(ids, ids[-1:]) is (ended and prompt.endswith("<|sep|>"))


def test_tokens_of_reasoning_are_counted_up_to_the_first_control_token(tokenizer):
    ids = ids_of(tokenizer, f"Hm.{THINK_END}Hi")
    for thinking, expected in ((True, len(tokenizer.encode("Hm."))), (False, 0)):
        parser, body = parser_of(tokenizer, request(thinking)), request(thinking)
        parser.parse("", body)
        assert parser.count_reasoning_tokens(ids) == expected


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


def constrained(tokenizer: LongspanTokenizer, body: ChatCompletionRequest) -> xgrammar.GrammarMatcher:
    body = parser_of(tokenizer, body).adjust_request(body)
    info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=len(tokenizer))
    compiler = xgrammar.GrammarCompiler(info)
    assert body.structured_outputs is not None
    return xgrammar.GrammarMatcher(compiler.compile_structural_tag(body.structured_outputs.structural_tag))


def accepts(tokenizer: LongspanTokenizer, body: ChatCompletionRequest, text: str) -> bool:
    matcher = constrained(tokenizer, body)
    ids = ids_of(tokenizer, text.removesuffix("<|end_of_msg|>"))
    return all(matcher.accept_token(i) for i in ids) and matcher.accept_token(tokenizer.eos_token_id)


@pytest.mark.parametrize(
    ("fields", "good", "bad"),
    [
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}},
            '{"a": 1}',
            "{}",
        ),
        ({"response_format": {"type": "json_object"}}, '{"b": []}', "[]"),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "no", "never"),
        ({"structured_outputs": {"regex": "[0-9]{3}"}}, "123", "12"),
    ],
)
def test_a_constraint_holds_for_the_body_of_the_response_alone(tokenizer, fields, good, bad):
    thinks, answers = request(tools=None, **fields), request(False, tools=None, **fields)
    silent = request(tools=None, include_reasoning=False, **fields)
    for text, body in (
        (f"{ANSWERING}{{}}{END}", thinks),
        (f"{{}}{END}", answers),
        (f"{ANSWERING}{{}}{END}", silent),
    ):
        assert accepts(tokenizer, body.model_copy(deep=True), text.replace("{}", good))
        assert not accepts(tokenizer, body.model_copy(deep=True), text.replace("{}", bad))
    assert not accepts(tokenizer, silent, f"{good}{END}")


def test_a_constrained_answer_may_be_followed_by_calls(tokenizer):
    body = request(structured_outputs={"choice": ["Sure."]})
    assert accepts(tokenizer, body, CALL.partition("<|close|>think<|sep|>")[2])


def test_a_forced_call_has_to_be_made(tokenizer):
    for choice in ("required", {"type": "function", "function": {"name": "f"}}):
        reply = with_calls(call(1, ("k", "string", "v"))).partition("<|close|>think<|sep|>")[2]
        assert accepts(tokenizer, request(tool_choice=choice), reply)
        assert not accepts(tokenizer, request(tool_choice=choice), f"{ANSWERING}Hi{END}")


def test_a_forced_call_satisfies_its_schema_though_its_tool_is_not_strict(tokenizer):
    tool = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
    for key, kind, good in (("a", "number", True), ("b", "number", False), ("a", "string", False)):
        reply = with_calls(call(1, (key, kind, "1"))).partition("<|close|>think<|sep|>")[2]
        assert accepts(tokenizer, request(tools=[tool], tool_choice="required"), reply) is good


def test_blanks_of_json_come_to_an_end(tokenizer):
    for blanks, good in ((" " * 17, True), (" " * 18, False)):
        body = request(tools=None, response_format={"type": "json_object"})
        assert accepts(tokenizer, body, f'{ANSWERING}{{{blanks}"a": 1}}{END}') is good


def test_a_budget_of_thinking_ends_it_with_control_tokens(tokenizer):
    parser = parser_of(tokenizer, request()).reasoning_parser
    controls = [tokenizer.base.special_id(token) for token in ("<|open|>", "<|close|>", "<|sep|>")]
    think = tokenizer.base.encode("think")
    assert tokenizer.encode(parser.reasoning_start_str) == [controls[0], *think, controls[2]]
    assert tokenizer.encode(parser.reasoning_end_str) == [controls[1], *think, controls[2]]


def test_control_tokens_are_asked_for_as_text_without_blanks(tokenizer):
    body = parser_of(tokenizer, request()).adjust_request(request())
    assert not body.skip_special_tokens and not body.spaces_between_special_tokens
    assert body.structured_outputs is None


def test_an_answer_that_has_begun_is_not_continued_under_a_constraint(tokenizer):
    last = {"role": "assistant", "content": '{"a'}
    body = request(
        messages=[USER, last],
        continue_final_message=True,
        add_generation_prompt=False,
        response_format={"type": "json_object"},
    )
    with pytest.raises(VLLMValidationError, match="can't be continued"):
        parser_of(tokenizer, body).adjust_request(body)


def test_tokenizers_that_are_not_ours_or_cannot_chat_are_refused(tokenizer):
    with pytest.raises(TypeError, match="--tokenizer-mode longspan"):
        ParserManager.get_parser("longspan", "longspan", enable_auto_tools=True, tokenizer=object())
    other = type(tokenizer.base)({bytes([b]): b for b in range(256)}, {})
    with pytest.raises(TypeError, match=r"Kimi K3") as info:
        plain = LongspanTokenizer(other, eos_token_id=256)
        ParserManager.get_parser("longspan", "longspan", enable_auto_tools=True, tokenizer=plain)
    assert isinstance(info.value.__cause__, CheckpointError)
