"""Structures in the engine: a model of nonsense obeys, and its batch mates don't notice."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.fake_model import FakeModel
from support.obedient import read
from support.serving import Answer, make_engine, make_request, run

from longspan.chat import Function, ReplyParser, xtml
from longspan.config import ModelConfig
from longspan.engine.readers import ChatReader
from longspan.engine.request import Request, SamplingParams
from longspan.errors import RequestError
from longspan.structure import Calls, Structure, StructuredOutputs, Vocabulary, chat_structure

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 6},
        "days": {"type": "integer"},
        "sure": {"type": "boolean"},
    },
    "required": ["city", "sure"],
    "additionalProperties": False,
}
PROMPT = [40, 41, 42, 43, 44]
ANSWER = StructuredOutputs(json=SCHEMA).answer()
# What the fake model would hardly say by itself.
CLOSES = {ord(char): 4.0 for char in '"},:'} | {260: 5.0, 261: 5.0, 258: 5.0}


def chat_request(
    id: str, vocabulary: Vocabulary, structure: Structure | None, thinking: bool, **params: Any
) -> Request:
    given = {"temperature": 1.0, "seed": 7, "max_tokens": 2000, "logit_bias": CLOSES} | params
    sampling = SamplingParams(**given)

    def make_reader() -> ChatReader:
        return ChatReader(ReplyParser(vocabulary.tokenizer, thinking=thinking), sampling)

    return Request(id, PROMPT, sampling, make_reader, structure)


def answer_structure(vocabulary: Vocabulary, thinking: bool) -> Structure | None:
    return chat_structure(vocabulary, answer=ANSWER, calls=Calls(), thinking=thinking)


def call_structure(vocabulary: Vocabulary, thinking: bool) -> Structure | None:
    calls = Calls([Function("weather", SCHEMA, False, "tools[0].function")], forced=True)
    return chat_structure(vocabulary, answer=None, calls=calls, thinking=thinking)


def big_engine(config: ModelConfig, vocabulary: Vocabulary) -> Any:
    return make_engine(FakeModel(config), vocabulary.tokenizer, num_pages=600, chunk=64)


@pytest.mark.parametrize("thinking", [True, False])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_choice_obeys_with_thinking_and_without(
    config: ModelConfig, bytes_vocabulary: Vocabulary, thinking: bool, temperature: float
) -> None:
    for make in (answer_structure, call_structure):
        structure = make(bytes_vocabulary, thinking)
        request = chat_request("a", bytes_vocabulary, structure, thinking, n=3, temperature=temperature)
        for answer in run(big_engine(config, bytes_vocabulary), request).values():
            reply = read(bytes_vocabulary, answer.token_ids, thinking=thinking)
            assert answer.reason == ("stop" if make is answer_structure else "tool_calls")
            text = reply.content if make is answer_structure else reply.tool_calls[0].arguments
            value = json.loads(text or "")
            assert {"city", "sure"} <= set(value) and len(value["city"]) <= 6


@pytest.mark.parametrize("max_tokens", [1, 2, 5, 9])
def test_a_limit_inside_thinking_leaves_no_half_answer(
    config: ModelConfig, bytes_vocabulary: Vocabulary, max_tokens: int
) -> None:
    never = {260: -100.0}  # the end of thinking
    for make in (answer_structure, call_structure):
        structure = make(bytes_vocabulary, True)
        request = chat_request(
            "a", bytes_vocabulary, structure, True, max_tokens=max_tokens, logit_bias=never
        )
        answer = run(big_engine(config, bytes_vocabulary), request)["a", 0]
        reply = read(bytes_vocabulary, answer.token_ids, thinking=True)
        assert (answer.reason, reply.content, reply.tool_calls) == ("length", None, ())
        assert len(answer.token_ids) == max_tokens


def test_thinking_is_what_it_would_be_without_a_structure(
    config: ModelConfig, bytes_vocabulary: Vocabulary
) -> None:
    ordinary = CLOSES | dict.fromkeys(range(256, 512), -100.0)
    requests = [
        chat_request(name, bytes_vocabulary, structure, True, max_tokens=40, logit_bias=ordinary)
        for name, structure in (("free", None), ("bound", answer_structure(bytes_vocabulary, True)))
    ]
    answers = run(big_engine(config, bytes_vocabulary), *requests)
    assert answers["free", 0].token_ids == answers["bound", 0].token_ids


def tokens(answers: dict[tuple[str, int], Answer], id: str) -> list[list[int]]:
    return [answer.token_ids for (name, _), answer in sorted(answers.items()) if name == id]


def test_replies_are_the_same_alone_and_together(config: ModelConfig, bytes_vocabulary: Vocabulary) -> None:
    v = bytes_vocabulary
    requests = [
        chat_request("json", v, answer_structure(v, False), False, n=2),
        chat_request("call", v, call_structure(v, True), True, n=2, seed=3),
        chat_request("greedy", v, answer_structure(v, True), True, temperature=0.0),
        make_request(
            "choice", PROMPT, structure=StructuredOutputs(choice=["no", "nobody"]).answer().structure(v)
        ),
        make_request("free", PROMPT, temperature=1.0, seed=5, max_tokens=60, frequency_penalty=0.5),
        make_request("plain", PROMPT, max_tokens=60, top_k=3, temperature=0.7, seed=1),
    ]
    together = run(big_engine(config, v), *requests)
    for request in requests:
        alone = run(big_engine(config, v), request)
        assert tokens(together, request.id) == tokens(alone, request.id)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("swap_bytes", [0, 1 << 30])
def test_a_preempted_reply_goes_on_as_if_nothing_had_happened(
    config: ModelConfig, bytes_vocabulary: Vocabulary, swap_bytes: int, asynchronous: bool
) -> None:
    v = bytes_vocabulary
    requests = [
        chat_request(f"{seed}", v, answer_structure(v, False), False, seed=seed, max_tokens=100)
        for seed in range(6)
    ]
    small = make_engine(
        FakeModel(config),
        v.tokenizer,
        num_pages=40,
        num_slots=6,
        swap_bytes=swap_bytes,
        async_scheduling=asynchronous,
        enable_prefix_caching=True,
        snapshot_interval=16,
    )
    squeezed = run(small, *requests)
    small.core.close()
    assert small.stats.num_preemptions + small.stats.num_swaps > 0
    roomy = run(big_engine(config, v), *requests)
    assert all(squeezed[key].token_ids == roomy[key].token_ids for key in roomy)


def test_the_forms_of_a_text_end_by_themselves(config: ModelConfig, bytes_vocabulary: Vocabulary) -> None:
    v = bytes_vocabulary
    forms = {
        "regex": "[0-9]{3}",
        "choice": ["yes", "no"],
        "grammar": 'root ::= "a" "b"?',
        "json": {"enum": [1, 22]},
    }
    requests = [
        make_request(
            name, PROMPT, structure=StructuredOutputs(**{name: form}).answer().structure(v), ignore_eos=False
        )
        for name, form in forms.items()
    ]
    texts = {}
    for (name, _), answer in run(big_engine(config, v), *requests).items():
        assert (answer.reason, answer.token_ids[-1]) == ("stop", v.eos_token_ids[0])
        texts[name] = v.tokenizer.decode(answer.token_ids[:-1])
    assert texts["regex"].isdigit() and len(texts["regex"]) == 3
    assert (
        texts["choice"] in forms["choice"]
        and texts["grammar"] in ("a", "ab")
        and texts["json"] in ("1", "22")
    )


def test_min_tokens_waits_for_the_end_of_the_structure_only(
    config: ModelConfig, bytes_vocabulary: Vocabulary
) -> None:
    structure = StructuredOutputs(regex="a{1,6}").answer().structure(bytes_vocabulary)
    end = bytes_vocabulary.eos_token_ids[0]
    params = {"ignore_eos": False, "logit_bias": {end: 50.0}, "max_tokens": 20}
    for wanted in (0, 1, 4, 6, 9):
        request = make_request("a", PROMPT, structure=structure, min_tokens=wanted, **params)
        answer = run(big_engine(config, bytes_vocabulary), request)["a", 0]
        assert answer.token_ids == [ord("a")] * min(max(wanted, 1), 6) + [end]


def test_a_bias_that_bans_all_that_may_come_fails_that_request_alone(
    config: ModelConfig, bytes_vocabulary: Vocabulary
) -> None:
    structure = StructuredOutputs(choice=["a", "b"]).answer().structure(bytes_vocabulary)
    banned = make_request("bad", PROMPT, structure=structure, logit_bias={97: -100.0, 98: -100.0})
    other = make_request("good", PROMPT, structure=structure, logit_bias={97: -100.0}, ignore_eos=False)
    answers = run(big_engine(config, bytes_vocabulary), banned, other)
    assert answers["bad", 0].reason == "error"
    assert answers["good", 0].token_ids == [98, bytes_vocabulary.eos_token_ids[0]]


def test_special_tokens_of_the_chat_are_those_of_a_prompt(bytes_vocabulary: Vocabulary) -> None:
    tokenizer = bytes_vocabulary.tokenizer
    assert [tokenizer.special[name] for name in xtml.CONTROL_TOKENS] == [259, 260, 261, 258]


def test_a_grammar_too_complex_for_its_reply_is_the_fault_of_its_request(
    config: ModelConfig, bytes_vocabulary: Vocabulary, caplog: pytest.LogCaptureFixture
) -> None:
    structure = StructuredOutputs(regex="a{100000000}").answer().structure(bytes_vocabulary)
    hard = make_request("hard", PROMPT, structure=structure, max_tokens=3)
    answers = run(big_engine(config, bytes_vocabulary), hard, make_request("mate", PROMPT, max_tokens=3))
    finish = answers["hard", 0].finish
    assert finish and isinstance(finish.error, RequestError)
    assert answers["mate", 0].reason == "length" and not caplog.records
