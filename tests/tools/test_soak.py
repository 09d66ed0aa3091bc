"""The soak itself: it sees what is wrong, and sees nothing where all is right."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest
from soak.answers import Answer, Choice, Failure, streamed, whole
from soak.client import _dechunked, _read_stream
from soak.load import Ledger, Load, Outage
from soak.misuse import misuses
from soak.workload import CHAT, TEXT, Case
from support.scripted import ROOT, Reciter, Running, ScriptedModel, running_server

from longspan.chat import Tokenizer

CASES = [
    Case("short", TEXT, {"prompt": "x", "max_tokens": 30, "temperature": 0}),
    Case("chat", CHAT, {"messages": [{"role": "user", "content": "x"}], "temperature": 0}),
]
USAGE = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}


def load_of(server: Running, wrong: str | None, seconds: float = 1.5) -> Ledger:
    """The ledger after a load whose pool has an answer altered, of the kind `wrong`."""
    server.say("thought<|close|>think<|sep|><|open|>response<|sep|>answer<|close|>response<|sep|>")
    pool = [(case, whole(server.post(case.path, case.body).json())) for case in CASES]
    for i, (case, answer) in enumerate(pool):
        if case.kind == wrong:
            choice = replace(answer.choices[0], text=answer.choices[0].text + "!")
            pool[i] = case, replace(answer, choices={0: choice})
    ledger = Ledger()
    load = Load(
        server.url, pool, misuses(2**20), ledger, seed=1, num_clients=3, burst=30, fields={"messages"}
    )
    asyncio.run(load.run(seconds))
    asyncio.run(load.check_all())
    return ledger


@pytest.mark.parametrize("wrong", [None, "short", "chat"])
def test_an_answer_that_is_not_the_known_one_is_a_violation(wrong: str | None) -> None:
    tokenizer = Tokenizer.from_dir(ROOT / "models/k31-tiny")
    model = ScriptedModel(tokenizer, Reciter(tokenizer))
    with running_server(model, tokenizer, num_slots=4, max_queue=8, max_body_bytes=2**20) as server:
        ledger = load_of(server, wrong)
    assert ledger.total("right") > 0
    kinds = {violation.split(":")[0].split(",")[0] for violation in ledger.violations}
    assert (wrong is None) == (not kinds), ledger.violations
    assert wrong is None or ledger.counts[f"afterwards, {wrong}", "WRONG"] == 1


@pytest.mark.parametrize(
    ("usage", "finish", "problem"),
    [
        (USAGE, "stop", None),
        (USAGE | {"total_tokens": 6}, "stop", "add up"),
        (USAGE | {"prompt_tokens_details": {"cached_tokens": 4}}, "stop", "impossible"),
        (USAGE | {"completion_tokens_details": {"reasoning_tokens": 3}}, "stop", "impossible"),
        (USAGE, None, "no finish_reason"),
    ],
)
def test_impossible_answers_are_seen(usage: dict[str, Any], finish: str | None, problem: str | None) -> None:
    answer = Answer(choices={0: Choice(finish_reason=finish)})
    answer.set_usage(usage)
    found = answer.problem()
    assert found is None if problem is None else found and problem in found


def test_a_stream_without_its_end_is_no_answer() -> None:
    item = {"index": 0, "text": "a", "logprobs": None, "finish_reason": "stop", "stop_reason": None}
    event = f"data: {json.dumps({'choices': [item], 'usage': USAGE})}\n\n"
    done = _read_stream(event + "data: [DONE]\n\n")
    assert isinstance(done, Answer) and done.choices[0].text == "a"
    assert _read_stream(event) == Failure(0, f"no error object of status None: {event.strip()[6:]!r}")
    error = {"error": {"code": 503, "message": "gone"}}
    assert _read_stream(event + f"data: {json.dumps(error)}\n\n") == Failure(503, "gone")
    with pytest.raises(ValueError, match="after the end"):
        streamed([{"choices": [item]}, {"choices": [item]}])


def test_chunks_are_joined() -> None:
    assert _dechunked(b"3\r\nabc\r\n10\r\n0123456789abcdef\r\n0\r\n\r\n") == b"abc0123456789abcdef"


@pytest.mark.parametrize(
    ("start", "end", "touched"), [(0, 1, False), (0, 3, True), (4, 5, True), (7, 8, False)]
)
def test_an_outage_excuses_what_was_under_way_in_it(start: float, end: float, touched: bool) -> None:
    assert Outage(2, 6).touches(start, end) == touched
    assert Outage(2).touches(start, end) == (end >= 2)
