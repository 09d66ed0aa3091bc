"""Scheduling against a fake model whose every answer depends on all that memory should hold."""

from __future__ import annotations

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from support.fake_model import FakeModel
from support.serving import Answers, finish, gather, make_engine, make_request, run

from longspan.config import ModelConfig
from longspan.engine.request import Request
from longspan.engine.scheduler import PROMPT_LOGPROB_ROWS

PROMPTS = [[5, 6, 7], [8] * 9, list(range(20, 37)), [1]]


def lone(config: ModelConfig, request: Request) -> list[list[int]]:
    answers = run(make_engine(FakeModel(config)), request)
    return [answers[request.id, index].token_ids for index in range(request.params.n)]


@pytest.mark.parametrize("chunk", [1, 2, 3, 5, 8, 16])
def test_no_chunk_size_changes_an_answer(config: ModelConfig, chunk: int) -> None:
    requests = [make_request(str(i), prompt) for i, prompt in enumerate(PROMPTS)]
    answers = run(make_engine(FakeModel(config), chunk=chunk), *requests)
    for request in requests:
        assert [answers[request.id, 0].token_ids] == lone(config, request)


@pytest.mark.parametrize("length", [7, 8, 9, 15, 16, 17, 24, 25])
def test_prompts_around_multiples_of_the_chunk_are_whole(config: ModelConfig, length: int) -> None:
    request = make_request("a", [3 + i % 40 for i in range(length)])
    engine = make_engine(FakeModel(config), chunk=8)
    assert [run(engine, request)["a", 0].token_ids] == lone(config, request)


@pytest.mark.parametrize("page_size", [1, 2, 3, 7, 16, 64])
def test_no_page_size_changes_an_answer(config: ModelConfig, page_size: int) -> None:
    request = make_request("a", PROMPTS[2])
    engine = make_engine(FakeModel(config), page_size=page_size)
    assert [run(engine, request)["a", 0].token_ids] == lone(config, request)


@pytest.mark.parametrize("num_slots", [1, 2, 3])
def test_no_limit_on_running_sequences_changes_an_answer(config: ModelConfig, num_slots: int) -> None:
    requests = [make_request(str(i), prompt) for i, prompt in enumerate(PROMPTS)]
    fake = FakeModel(config)
    answers = run(make_engine(fake, num_slots=num_slots), *requests)
    assert max(batch.num_seqs for batch in fake.batches) == num_slots
    for request in requests:
        assert [answers[request.id, 0].token_ids] == lone(config, request)


def test_a_small_pool_forces_preemption_and_changes_nothing(config: ModelConfig) -> None:
    requests = [make_request(str(i), prompt, max_tokens=12) for i, prompt in enumerate(PROMPTS)]
    engine = make_engine(FakeModel(config), num_pages=8)
    answers = run(engine, *requests)
    assert engine.stats.num_preemptions > 0
    for request in requests:
        assert [answers[request.id, 0].token_ids] == lone(config, request)


def test_preemption_takes_the_newest_and_puts_it_first_in_line(config: ModelConfig) -> None:
    engine = make_engine(FakeModel(config), num_pages=4)
    requests = [make_request(name, [9] * 7, max_tokens=9) for name in ("old", "new", "later")]
    for request in requests:
        engine.add(request)
    answers: Answers = {}
    ended = []
    while engine.has_work:
        outputs = engine.step()
        gather(outputs, answers)
        ended += [output.request_id for output in outputs if output.finish]
    assert engine.stats.num_preemptions > 0
    assert ended == ["old", "new", "later"]


def test_preemption_does_not_change_what_is_sampled(config: ModelConfig) -> None:
    requests = [
        make_request(str(i), prompt, max_tokens=12, temperature=1.0, seed=i, n=2)
        for i, prompt in enumerate(PROMPTS)
    ]
    engine = make_engine(FakeModel(config), num_pages=10)
    answers = run(engine, *requests)
    assert engine.stats.num_preemptions > 0
    for request in requests:
        assert [answers[request.id, index].token_ids for index in range(2)] == lone(config, request)


def test_one_sequence_may_fill_the_whole_memory(config: ModelConfig) -> None:
    request = make_request("a", [4] * 5, max_tokens=None)
    engine = make_engine(FakeModel(config), num_pages=4)
    answer = run(engine, request)["a", 0]
    assert (len(answer.token_ids), answer.reason) == (11, "length")
    assert engine.stats.num_preemptions == 0


def test_decoding_goes_before_prompts(config: ModelConfig) -> None:
    fake = FakeModel(config)
    engine = make_engine(fake, chunk=6)
    engine.add(make_request("decoding", [1, 2], max_tokens=20))
    engine.step()
    engine.add(make_request("prompt", [3] * 12))
    engine.step()
    assert fake.batches[-1].lengths.tolist() == [1, 5]


def test_prompts_are_cut_at_the_same_places_whatever_is_in_the_step(config: ModelConfig) -> None:
    fake = FakeModel(config)
    engine = make_engine(fake, num_pages=200, chunk=150)
    for name in "ab":
        engine.add(make_request(name, [1, 2], max_tokens=20))
    engine.step()
    engine.add(make_request("prompt", [3] * 200))
    engine.step()
    assert fake.batches[-1].lengths.tolist() == [1, 1, 128]
    engine.step()
    assert fake.batches[-1].lengths.tolist() == [1, 1, 72]


def test_requests_are_served_in_order_of_arrival(config: ModelConfig) -> None:
    engine = make_engine(FakeModel(config), num_slots=1)
    ended = []
    for name in ("a", "b", "c"):
        engine.add(make_request(name, [2, 3], max_tokens=2))
    while engine.has_work:
        ended += [output.request_id for output in engine.step() if output.finish]
    assert ended == ["a", "b", "c"]


def test_a_step_never_exceeds_its_budget(config: ModelConfig) -> None:
    fake = FakeModel(config)
    run(make_engine(fake, chunk=5), *[make_request(str(i), prompt) for i, prompt in enumerate(PROMPTS)])
    assert max(batch.num_tokens for batch in fake.batches) == 5


def test_prompt_logprobs_never_hold_more_than_a_few_rows_of_the_vocabulary(config: ModelConfig) -> None:
    fake = FakeModel(config)
    requests = [
        make_request(name, [i % 50 for i in range(300)], prompt_logprobs=0, max_tokens=2) for name in "ab"
    ]
    answers = run(make_engine(fake, num_pages=200), *requests)
    assert max(len(batch.logit_rows) for batch in fake.batches) <= PROMPT_LOGPROB_ROWS + len(requests)
    for request in requests:
        assert len(answers[request.id, 0].prompt_logprobs or []) == 300


def test_a_reused_slot_starts_from_nothing(config: ModelConfig) -> None:
    engine = make_engine(FakeModel(config), num_slots=1)
    first = run(engine, make_request("a", PROMPTS[2]))["a", 0]
    run(engine, make_request("b", PROMPTS[1]))
    assert run(engine, make_request("c", PROMPTS[2]))["c", 0].token_ids == first.token_ids


class EngineMachine(RuleBasedStateMachine):
    """Requests come, run, are aborted, fail; memory always adds up and answers never change."""

    config: ModelConfig
    lone_answers: dict[tuple[int, int], list[int]]

    @initialize(
        num_pages=st.integers(5, 14), num_slots=st.integers(1, 4), chunk=st.sampled_from([1, 2, 4, 7, 64])
    )
    def start(self, num_pages: int, num_slots: int, chunk: int) -> None:
        self.engine = make_engine(
            FakeModel(self.config, self.hook), num_pages=num_pages, num_slots=num_slots, chunk=chunk
        )
        self.requests: dict[str, tuple[int, int]] = {}
        self.answers: Answers = {}
        self.gone: set[str] = set()
        self.raising = False

    def hook(self, *_: object) -> None:
        if self.raising:
            raise ValueError("planned")

    @rule(length=st.integers(1, 14), first=st.integers(0, 50), n=st.integers(1, 2))
    def add(self, length: int, first: int, n: int) -> None:
        name = str(len(self.requests))
        self.requests[name] = (length, first)
        self.engine.add(self.request(name, length, first, n))

    @staticmethod
    def request(name: str, length: int, first: int, n: int) -> Request:
        prompt = [first + i for i in range(length)]
        return make_request(name, prompt, n=n, max_tokens=6, temperature=1.0, seed=first)

    @rule(steps=st.integers(1, 4))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            gather(self.engine.step(), self.answers)

    @rule(which=st.integers(0, 30))
    def abort(self, which: int) -> None:
        if str(which) in self.requests:
            outputs = self.engine.abort(str(which))
            gather(outputs, self.answers)
            assert all(output.finish and output.finish.reason == "abort" for output in outputs)
            assert not self.engine.abort(str(which))
            self.gone.add(str(which))

    @rule()
    def fail_one_step(self) -> None:
        self.raising = True
        outputs = self.engine.step()
        self.raising = False
        gather(outputs, self.answers)
        assert all(output.finish and output.finish.reason == "error" for output in outputs)

    @invariant()
    def memory_adds_up(self) -> None:
        if hasattr(self, "engine"):
            self.engine.memory.check()

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        finish(self.engine, self.answers)
        for (name, index), answer in self.answers.items():
            length, first = self.requests[name]
            expected = self.lone_answer(length, first)[index]
            assert answer.token_ids == expected[: len(answer.token_ids)]
            if answer.reason == "length":
                assert answer.token_ids == expected

    def lone_answer(self, length: int, first: int) -> list[list[int]]:
        key = (length, first)
        if key not in self.lone_answers:
            self.lone_answers[key] = lone(self.config, self.request("lone", length, first, 2))
        return self.lone_answers[key]


@pytest.fixture
def machine(config: ModelConfig) -> type[EngineMachine]:
    return type("Machine", (EngineMachine,), {"config": config, "lone_answers": {}})


def test_memory_adds_up_and_answers_stay_whatever_happens(machine: type[EngineMachine]) -> None:
    case = machine.TestCase
    case.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
    case().runTest()


def test_the_fake_model_notices_a_wrong_memory(config: ModelConfig) -> None:
    fake = FakeModel(config)
    engine = make_engine(fake)
    request = make_request("a", PROMPTS[2])
    engine.add(request)
    engine.step()
    for view in engine.memory.views:
        if hasattr(view, "latent"):
            view.latent.fill_(torch.pi)
    assert finish(engine)["a", 0].token_ids != lone(config, request)[0][1:]


@pytest.mark.parametrize("swap_bytes", [0, 1 << 30])
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize(
    ("page_size", "interval", "num_slots"), [(1, 1, 1), (4, 4, 1), (4, 8, 2), (4, 16, 1)]
)
def test_a_sequence_may_be_as_long_as_all_memory_whatever_the_cache_keeps_of_it(
    config: ModelConfig, page_size: int, interval: int, num_slots: int, asynchronous: bool, swap_bytes: int
) -> None:
    """States above it are given up for its pages, and at the end the one it stands on as well."""
    length = 8 * page_size
    engine = make_engine(
        FakeModel(config),
        num_pages=8,
        page_size=page_size,
        num_slots=num_slots,
        enable_prefix_caching=True,
        snapshot_interval=interval,
        async_scheduling=asynchronous,
        swap_bytes=swap_bytes,
    )
    for prompt_length in (1, length // 2, length - 2, length - 1):
        tokens = [3 + i for i in range(prompt_length)]
        request = make_request(str(prompt_length), tokens, max_tokens=length - prompt_length)
        engine.add(request)
        answers: Answers = {}
        for _ in range(10 * length):
            gather(engine.step(), answers)
        assert not engine.has_work
        alone = run(make_engine(FakeModel(config)), request)
        assert answers[request.id, 0].token_ids == alone[request.id, 0].token_ids
    engine.core.close()


@pytest.mark.parametrize("chunk", [80, 100, 128, 200, 512])
@pytest.mark.parametrize("prompt_logprobs", [None, 0])
def test_prompts_are_cut_at_the_same_places_whoever_is_beside_them(
    config: ModelConfig, chunk: int, prompt_logprobs: int | None
) -> None:
    """So that a chunked operator gives the same bits, even where numbers are rounded."""
    fake = FakeModel(config)
    engine = make_engine(fake, num_pages=1000, num_slots=6, chunk=chunk)
    lengths = [100, 61, 300, 129, 64, 63, 65, 700, 512]
    for length in lengths:
        request = make_request(
            str(length), [3 + i % 40 for i in range(length)], prompt_logprobs=prompt_logprobs
        )
        engine.add(request)
    finish(engine)
    cuts = [
        start + count
        for batch in fake.batches
        for start, count in zip(batch.context_lens.tolist(), batch.lengths.tolist(), strict=True)
        if count > 1
    ]
    assert all(cut % 64 == 0 or cut in lengths for cut in cuts)
    assert sum(cut in lengths for cut in cuts) >= len(lengths)


def test_who_waits_for_a_prompt_like_its_own_is_looked_at_only_as_far_as_it_could_run(
    config: ModelConfig,
) -> None:
    engine = make_engine(FakeModel(config), num_pages=600, num_slots=3, chunk=64, enable_prefix_caching=True)
    shared = [3 + i % 40 for i in range(400)]
    for i in range(20):
        engine.add(make_request(str(i), [*shared, 3 + i], max_tokens=2))
    engine.step()
    assert sum(bool(seq._digests) for seq in engine.core._scheduler.waiting) <= 3
    finish(engine)


@pytest.mark.parametrize("chunk", [64, 100, 512])
@pytest.mark.parametrize("prompt_logprobs", [None, 0])
def test_a_long_prompt_goes_on_however_many_short_ones_come(
    config: ModelConfig, chunk: int, prompt_logprobs: int | None
) -> None:
    engine = make_engine(FakeModel(config), num_pages=1000, num_slots=4, chunk=chunk)
    wanted = {"max_tokens": 1, "prompt_logprobs": prompt_logprobs}
    engine.add(make_request("long", [3 + i % 40 for i in range(700)], **wanted))
    for step in range(60):
        while engine.stats.num_running + engine.stats.num_waiting < 4:
            tokens = [3 + i % 40 for i in range(129)]  # as many as a step has rows for
            engine.add(
                make_request(
                    f"{step}-{engine.stats.num_running}-{engine.stats.num_waiting}", tokens, **wanted
                )
            )
        if any(output.request_id == "long" and output.finish for output in engine.step()):
            break
    else:
        pytest.fail("the long prompt was never computed")
    finish(engine)
