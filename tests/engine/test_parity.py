"""Law 1 on the real decoder: however it is scheduled, a request gets the tokens and logprobs of LONE.

LONE is the request alone, in one chunk, in fresh memory. All free memory is NaN in every engine here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.random_checkpoint import write_checkpoint
from support.serving import Answer, Answers, finish, gather, make_engine, make_request, run

from longspan.engine.request import Request
from longspan.model.decoder import Decoder
from longspan.model.loader import load_model

TOLERANCE = 1e-4
CHUNK = 8

Lone = dict[str, Answer]


def prompt(seed: int, length: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 61, (length,), generator=generator).tolist()


def greedy(name: str, length: int, max_tokens: int = 8) -> Request:
    return make_request(name, prompt(length, length), max_tokens=max_tokens, logprobs=3)


REQUESTS = [greedy("short", 3), greedy("page", 16), greedy("long", 41), greedy("one", 1)]


@pytest.fixture(scope="module")
def lone(decoder: Decoder) -> Lone:
    return {request.id: run(make_engine(decoder), request)[request.id, 0] for request in REQUESTS}


def assert_parity(answers: Answers, lone: Lone, names: Iterator[str] | list[str] | None = None) -> None:
    for name in names or lone:
        assert_same(answers[name, 0], lone[name])


def assert_same(answer: Answer, expected: Answer) -> None:
    assert answer.token_ids == expected.token_ids
    for entry, other in zip(answer.logprobs, expected.logprobs, strict=True):
        assert list(entry) == list(other)
        for token_id, logprob in entry.items():
            assert logprob.logprob == pytest.approx(other[token_id].logprob, abs=TOLERANCE)


def test_lone_is_the_uncached_forward_pass(decoder: Decoder, lone: Lone) -> None:
    for request in REQUESTS:
        answer = lone[request.id]
        tokens = request.prompt_token_ids + answer.token_ids
        logprobs = torch.log_softmax(decoder.forward(tokens[:-1]), -1)[len(request.prompt_token_ids) - 1 :]
        assert logprobs.argmax(-1).tolist() == answer.token_ids
        for row, entry in zip(logprobs, answer.logprobs, strict=True):
            for token_id, logprob in entry.items():
                assert logprob.logprob == pytest.approx(float(row[token_id]), abs=TOLERANCE)


@pytest.mark.parametrize("chunk", [1, 3, 7, 9, 16, 33])
def test_chunk_size(decoder: Decoder, lone: Lone, chunk: int) -> None:
    assert_parity(run(make_engine(decoder, chunk=chunk), *REQUESTS), lone)


@pytest.mark.parametrize("length", [CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 2 * CHUNK + 1])
def test_lengths_around_the_chunk(decoder: Decoder, length: int) -> None:
    request = greedy("a", length)
    expected = run(make_engine(decoder), request)["a", 0]
    assert_same(run(make_engine(decoder, chunk=CHUNK), request)["a", 0], expected)


@pytest.mark.parametrize("page_size", [1, 5, 64])
def test_page_size(decoder: Decoder, lone: Lone, page_size: int) -> None:
    engine = make_engine(decoder, page_size=page_size, num_pages=-(-256 // page_size))
    assert_parity(run(engine, *REQUESTS), lone)


@pytest.mark.parametrize("num_slots", [1, 2])
def test_running_sequences(decoder: Decoder, lone: Lone, num_slots: int) -> None:
    assert_parity(run(make_engine(decoder, num_slots=num_slots), *REQUESTS), lone)


def test_batch_mates_that_come_and_go(decoder: Decoder, lone: Lone) -> None:
    engine = make_engine(decoder, chunk=10)
    answers: Answers = {}
    for i, request in enumerate(REQUESTS):
        engine.add(request)
        engine.add(make_request(f"mate {i}", prompt(90 + i, 7 + 6 * i), max_tokens=3 + i))
        for _ in range(3):
            gather(engine.step(), answers)
        engine.abort(f"mate {i - 1}")
    assert_parity(finish(engine, answers), lone)


def test_preemption_by_a_small_pool(decoder: Decoder, lone: Lone) -> None:
    engine = make_engine(decoder, num_pages=16, num_slots=4, chunk=12)
    answers = run(engine, *REQUESTS)
    assert engine.stats.num_preemptions > 0
    assert_parity(answers, lone)


@pytest.mark.parametrize("family", ["kimi-linear", "k3"])
def test_the_rest_of_the_family(tmp_path: Path, family: str) -> None:
    model = load_model(write_checkpoint(tmp_path, family), dtype="float32")
    lone = {request.id: run(make_engine(model), request)[request.id, 0] for request in REQUESTS}
    engine = make_engine(model, num_pages=16, num_slots=4, chunk=5)
    answers = run(engine, *REQUESTS)
    assert engine.stats.num_preemptions > 0
    assert_parity(answers, lone)


def test_order_of_arrival(decoder: Decoder, lone: Lone) -> None:
    assert_parity(run(make_engine(decoder, chunk=9), *reversed(REQUESTS)), lone)


def test_a_slot_and_pages_that_others_have_used(decoder: Decoder, lone: Lone) -> None:
    engine = make_engine(decoder, num_slots=1, num_pages=16)
    for i in range(3):
        run(engine, make_request(f"tenant {i}", prompt(50 + i, 40)))
    for request in REQUESTS:
        assert_parity(run(engine, request), lone, [request.id])


def test_a_long_reply_crosses_pages_and_the_indexers_top_k(decoder: Decoder) -> None:
    request = greedy("a", 5, max_tokens=60)
    expected = run(make_engine(decoder), request)["a", 0]
    assert_same(run(make_engine(decoder, chunk=2, page_size=3), request)["a", 0], expected)


def test_seeded_requests_ignore_their_neighbours(decoder: Decoder) -> None:
    requests = [
        make_request("one", prompt(1, 6), temperature=1.0, seed=1, n=2, top_p=0.9),
        make_request("two", prompt(2, 12), temperature=1.0, seed=2, top_k=20),
    ]
    free = make_request("free", prompt(3, 9), temperature=1.0)
    alone = [run(make_engine(decoder), request) for request in requests]
    together = run(make_engine(decoder, chunk=7, num_pages=14), *requests, free)
    reordered = run(make_engine(decoder, chunk=11), free, *reversed(requests))
    for expected in alone:
        for key, answer in expected.items():
            assert together[key].token_ids == reordered[key].token_ids == answer.token_ids
    assert alone[0]["one", 0].token_ids != alone[0]["one", 1].token_ids


@pytest.mark.parametrize("chunk", [1, 6, 13, 200])
def test_prompt_logprobs(decoder: Decoder, chunk: int) -> None:
    request = make_request("a", prompt(4, 37), max_tokens=1, prompt_logprobs=2)
    mate = make_request("mate", prompt(5, 20))
    found = run(make_engine(decoder, chunk=chunk), mate, request)["a", 0].prompt_logprobs
    expected = torch.log_softmax(decoder.forward(request.prompt_token_ids), -1)
    assert found is not None
    assert found[0] is None
    assert len(found) == 37
    for position, (entry, token_id) in enumerate(zip(found, request.prompt_token_ids, strict=True)):
        if entry is None:
            continue
        assert next(iter(entry)) == token_id
        assert {t for t, e in entry.items() if e.rank <= 2} == set(
            expected[position - 1].topk(2).indices.tolist()
        )
        for other, logprob in entry.items():
            assert logprob.logprob == pytest.approx(float(expected[position - 1, other]), abs=TOLERANCE)


def test_prompt_logprobs_survive_preemption(decoder: Decoder) -> None:
    request = make_request("a", prompt(6, 20), max_tokens=12, prompt_logprobs=0)
    old = make_request("old", prompt(7, 19), max_tokens=24)
    cold = run(make_engine(decoder), request)["a", 0]
    engine = make_engine(decoder, num_pages=13, num_slots=2, chunk=64)
    answer = run(engine, old, request)["a", 0]
    assert engine.stats.num_preemptions > 0
    assert answer.token_ids == cold.token_ids
    assert answer.prompt_logprobs is not None and cold.prompt_logprobs is not None
    for entry, expected in zip(answer.prompt_logprobs[1:], cold.prompt_logprobs[1:], strict=True):
        assert entry is not None and expected is not None
        assert list(entry) == list(expected)
        for token_id in entry:
            assert entry[token_id].logprob == pytest.approx(expected[token_id].logprob, abs=TOLERANCE)


def test_a_broken_sequence_leaves_its_batch_mates_at_parity(decoder: Decoder, lone: Lone) -> None:
    engine = make_engine(decoder, chunk=20)
    bad = make_request("bad", prompt(8, 6), max_tokens=40)
    for request in [*REQUESTS[:2], bad, *REQUESTS[2:]]:
        engine.add(request)
    answers: Answers = {}
    gather(engine.step(), answers)
    gather(engine.step(), answers)
    victim = next(seq for seq in engine.core._scheduler.running if seq.request is bad)
    assert victim.memory is not None
    for view in engine.memory.views:
        if hasattr(view, "state"):
            view.state[victim.memory.slot] = torch.nan
    finish(engine, answers)
    assert answers["bad", 0].reason == "error"
    assert_parity(answers, lone)
    again = replace(REQUESTS[2], id="again")
    assert_same(run(engine, again)["again", 0], lone["long"])
