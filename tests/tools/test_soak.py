"""The soak itself: it sees what is wrong, and sees nothing where all is right."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import pytest
from soak.answers import Answer, Choice, Failure
from soak.client import _dechunked
from soak.load import Ledger, Load, Outage
from soak.misuse import misuses
from soak.protocols import CHAT, GENERATE, MESSAGES, PROTOCOLS, RESPONSES, TEXT
from soak.workload import Case
from support.fake_model import FakeModel
from support.scripted import ROOT, Running, running_server

from longspan.chat import Tokenizer
from longspan.config import load_config

CASES = [
    Case("short", TEXT, {"prompt": "x", "max_tokens": 30, "temperature": 0}),
    Case(
        "chat",
        CHAT,
        {"messages": [{"role": "user", "content": "x"}], "temperature": 0, "max_completion_tokens": 20},
    ),
    Case("responses", RESPONSES, {"input": "x", "max_output_tokens": 20, "temperature": 0}),
    Case(
        "messages",
        MESSAGES,
        {"messages": [{"role": "user", "content": "x"}], "max_tokens": 20, "temperature": 0},
    ),
    Case("generate", GENERATE, {"text": "x", "sampling_params": {"temperature": 0, "max_new_tokens": 9}}),
]
USAGE = {
    "prompt_tokens": 3,
    "completion_tokens": 2,
    "total_tokens": 5,
    "prompt_tokens_details": {"cached_tokens": 0},
    "completion_tokens_details": {"reasoning_tokens": 0},
}


def load_of(server: Running, wrong: str | None, seconds: float = 1.0) -> Ledger:
    """The ledger after a load whose pool has an answer altered, of the kind `wrong`."""
    pool = [(case, PROTOCOLS[case.path].whole(server.post(case.path, case.body).json())) for case in CASES]
    for i, (case, answer) in enumerate(pool):
        if case.kind == wrong:
            choice = replace(answer.choices[0], text=answer.choices[0].text + "!")
            pool[i] = case, replace(answer, choices={0: choice})
    ledger = Ledger()
    load = Load(server.url, pool, misuses(2**20), ledger, seed=1, num_clients=3, burst=30)
    asyncio.run(load.run(seconds))
    asyncio.run(load.check_all())
    return ledger


@pytest.mark.parametrize("wrong", [None, "chat"])
def test_an_answer_that_is_not_the_known_one_is_a_violation(wrong: str | None) -> None:
    tokenizer = Tokenizer.from_dir(ROOT / "models/k31-tiny")
    config = replace(load_config(ROOT / "tests/data/k31-text"), vocab_size=tokenizer.vocab_size)
    model = FakeModel(config)
    with running_server(model, tokenizer, num_slots=4, max_queue=8, max_body_bytes=2**20) as server:
        ledger = load_of(server, wrong)
    assert ledger.total("right") > 0
    kinds = {violation.split(":")[0].split(",")[0] for violation in ledger.violations}
    assert (wrong is None) == (not kinds), ledger.violations
    assert wrong is None or ledger.counts[f"afterwards, {wrong}", "WRONG"] == 1


@pytest.mark.parametrize(
    ("usage", "finish", "problem"),
    [
        ((3, 2, 1, 5, 0), "stop", None),
        ((3, 2, 1, 6, 0), "stop", "add up"),
        ((3, 2, 1, 5, 4), "stop", "impossible"),
        ((3, 2, 3, 5, 0), "stop", "impossible"),
        ((3, 2, 1, 5, 0), None, "no finish_reason"),
    ],
)
def test_impossible_answers_are_seen(
    usage: tuple[int, int, int, int, int], finish: str | None, problem: str | None
) -> None:
    answer = Answer(choices={0: Choice(finish_reason=finish)})
    answer.set_usage(*usage)
    found = answer.problem()
    assert found is None if problem is None else found and problem in found


def test_a_stream_without_its_end_is_no_answer() -> None:
    item = {"index": 0, "text": "a", "logprobs": None, "finish_reason": "stop", "stop_reason": None}
    event = f"data: {json.dumps({'choices': [item], 'usage': USAGE})}\n\n"
    openai = PROTOCOLS[TEXT]
    done = openai.read_stream(event + "data: [DONE]\n\n")
    assert isinstance(done, Answer) and done.choices[0].text == "a"
    cut = openai.read_stream(event)
    assert isinstance(cut, Failure) and cut.status == 0
    error = {"error": {"code": 503, "message": "gone"}}
    assert openai.read_stream(event + f"data: {json.dumps(error)}\n\n") == Failure(503, "gone")
    with pytest.raises(ValueError, match="after the end"):
        openai.streamed([{"choices": [item]}, {"choices": [item]}])


def test_chunks_are_joined() -> None:
    assert _dechunked(b"3\r\nabc\r\n10\r\n0123456789abcdef\r\n0\r\n\r\n") == b"abc0123456789abcdef"


@pytest.mark.parametrize(
    ("start", "end", "touched"), [(0, 1, False), (0, 3, True), (4, 5, True), (7, 8, False)]
)
def test_an_outage_excuses_what_was_under_way_in_it(start: float, end: float, touched: bool) -> None:
    assert Outage(2, 6).touches(start, end) == touched
    assert Outage(2).touches(start, end) == (end >= 2)
