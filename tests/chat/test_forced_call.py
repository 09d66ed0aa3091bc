"""Forced tool calls, with a model that says anything it may."""

from __future__ import annotations

import json
import random

import pytest

from longspan.chat import ForcedToolCall, ReplyParser, Tokenizer, render
from longspan.errors import CheckpointError, RequestError

NAMES = ["get_weather", "get_wealth", "get", 'say "hi" & <|close|>', "天気😀"]


def choices(constraint: ForcedToolCall, tokenizer: Tokenizer) -> list[int]:
    allowed = constraint.allowed()
    if allowed is not None:
        return allowed
    return sorted(set(range(tokenizer.vocab_size)) - set(constraint.forbidden()))


def generate(tokenizer: Tokenizer, names: list[str], thinking: bool, rng: random.Random) -> list[int]:
    """A reply by a model that closes what it opened with some likelihood and otherwise picks any legal id."""
    constraint = ForcedToolCall(tokenizer, names, thinking=thinking)
    closing = [tokenizer.special[token] for token in ("<|close|>", "<|sep|>")]
    ids: list[int] = []
    while constraint.allowed() is not None or constraint.forbidden():
        legal = choices(constraint, tokenizer)
        ending = [token_id for token_id in legal if token_id in closing]
        ids.append(rng.choice(ending if ending and rng.random() < 0.3 else legal))
        constraint.push(ids[-1])
    return ids


def parse(tokenizer: Tokenizer, ids: list[int], thinking: bool) -> ReplyParser:
    parser = ReplyParser(tokenizer, thinking=thinking)
    parser.push(ids)
    parser.finish()
    return parser


@pytest.mark.parametrize("thinking", [True, False])
def test_whatever_a_model_picks_the_reply_has_a_complete_call_of_a_declared_name(tokenizer, thinking):
    seen = set()
    for seed in range(100):
        reply = parse(tokenizer, generate(tokenizer, NAMES, thinking, random.Random(seed)), thinking).reply
        (call,) = reply.tool_calls
        assert call.complete and call.name in NAMES and reply.content is None
        assert isinstance(json.loads(call.arguments), dict)
        seen.add(call.name)
    assert seen == set(NAMES)


@pytest.mark.parametrize("thinking", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_the_tokens_of_a_rendered_call_are_allowed_one_by_one(tokenizer, thinking, name):
    turn = {
        "role": "assistant",
        "reasoning_content": "Look it up." if thinking else None,
        "tool_calls": [{"name": name, "arguments": {"city": "Oslo <|close|>", "days": 3}}, {"name": "get"}],
    }
    prompt = tokenizer.encode_segments(render([], thinking=thinking))
    reply = tokenizer.encode_segments(render([turn], thinking=thinking, add_generation_prompt=False))
    constraint = ForcedToolCall(tokenizer, NAMES, thinking=thinking)
    for token_id in reply[len(prompt) :]:
        assert token_id in choices(constraint, tokenizer)
        constraint.push(token_id)


def test_a_single_name_leaves_no_choice_before_the_arguments(tokenizer):
    constraint = ForcedToolCall(tokenizer, ["get_weather"], thinking=False)
    ids = []
    while len(constraint.allowed() or ()) == 1:
        ids += constraint.allowed()
        constraint.push(ids[-1])
    assert tokenizer.decode(ids) == (
        '<|close|>response<|sep|><|open|>tools<|sep|><|open|>call tool="get_weather" index="1"<|sep|>'
    )
    assert {tokenizer.decode([i]) for i in constraint.allowed()} == {"<|open|>", "<|close|>"}


def test_thinking_is_free_but_cannot_end_the_reply(tokenizer):
    constraint = ForcedToolCall(tokenizer, ["f"], thinking=True)
    assert constraint.allowed() is None
    free = choices(constraint, tokenizer)
    assert free == [*range(tokenizer.n_base), tokenizer.special["<|close|>"]]


def test_everything_is_free_after_the_first_complete_call(tokenizer):
    constraint = ForcedToolCall(tokenizer, ["f"], thinking=False)
    while (allowed := constraint.allowed()) is not None:
        constraint.push(allowed[-1])
    assert constraint.forbidden() == []
    constraint.push(tokenizer.special["<|end_of_msg|>"])


def test_a_token_that_was_not_allowed_is_an_error_of_the_caller(tokenizer):
    for thinking in (True, False):
        with pytest.raises(ValueError, match="was not allowed"):
            ForcedToolCall(tokenizer, ["f"], thinking=thinking).push(tokenizer.special["<|end_of_msg|>"])


@pytest.mark.parametrize("names", [[], ["f", ""]])
def test_a_call_of_nothing_cannot_be_forced(tokenizer, names):
    with pytest.raises(RequestError, match="name of at least one function"):
        ForcedToolCall(tokenizer, names, thinking=True)


def test_a_tokenizer_without_chat_tokens_cannot_force_a_call(ranks):
    with pytest.raises(CheckpointError, match="no special token"):
        ForcedToolCall(Tokenizer(ranks, {}), ["f"], thinking=True)
