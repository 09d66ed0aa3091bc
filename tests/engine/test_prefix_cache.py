"""Law 1 with a prefix cache, the host pool and asynchronous steps: every answer is that of LONE.

All free memory is NaN. Most tests use a fake model whose every answer depends on all that memory should hold,
so that a state or a page of somebody else can't go unnoticed; the real one is at the end.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from support.fake_model import FakeModel
from support.serving import Answers, assert_all_free, gather, make_engine, make_request, run, steps

from longspan.config import ModelConfig
from longspan.engine.engine import Engine
from longspan.engine.runner import Model
from longspan.model.decoder import Decoder
from longspan.ops.batch import KdaView, StepBatch

PAGE = 4
INTERVAL = 16
VOCABULARY = 50


def prompt(seed: int, length: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (length,), generator=generator).tolist()


@dataclass
class Warm:
    """An engine with a prefix cache, each of whose answers is compared with that of an engine of its own."""

    model: Model
    engine: Engine
    asked: int = 0

    def ask(self, tokens: list[int], **params: object) -> tuple[list[int], int]:
        """The answer alone in the engine, and how many prompt tokens came from the cache."""
        (answer,) = self.ask_together(tokens, **params)
        return answer

    def ask_together(self, *prompts: list[int], **params: object) -> list[tuple[list[int], int]]:
        self.asked += 1
        requests = [make_request(f"{self.asked}-{i}", p, **params) for i, p in enumerate(prompts)]
        answers: Answers = {}
        cached = dict.fromkeys([request.id for request in requests], 0)
        for request in requests:
            self.engine.add(request)
        for outputs in steps(self.engine):
            gather(outputs, answers)
            for output in outputs:
                cached[output.request_id] += output.cached_tokens
        assert_all_free(self.engine)
        for request in requests:
            alone = run(make_engine(self.model, page_size=PAGE), request)
            for choice in range(request.params.n):
                assert answers[request.id, choice].token_ids == alone[request.id, choice].token_ids
        return [(answers[request.id, 0].token_ids, cached[request.id]) for request in requests]


def warm_engine(model: Model, **options: object) -> Warm:
    given = {"enable_prefix_caching": True, "snapshot_interval": INTERVAL, "page_size": PAGE}
    return Warm(model, make_engine(model, **(given | options)))  # type: ignore[arg-type]


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def warm(request: pytest.FixtureRequest, config: ModelConfig) -> Iterator[Warm]:
    made = warm_engine(FakeModel(config), async_scheduling=request.param)
    yield made
    made.engine.core.close()


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 18, 31, 32, 33, 34, 50])
def test_the_same_prompt_again_goes_on_from_the_end_of_its_pages(warm: Warm, length: int) -> None:
    tokens = prompt(length, length)
    cold = warm.ask(tokens)
    assert cold[1] == 0
    expected = (length - 1) // PAGE * PAGE
    assert warm.ask(tokens) == (cold[0], expected)
    assert warm.ask(tokens[:-1] or tokens)[1] <= expected


def test_a_chat_computes_new_text_and_at_most_a_page(warm: Warm) -> None:
    history = prompt(1, 30)
    for turn in range(6):
        answer, cached = warm.ask(history, max_tokens=13)
        if turn:
            assert len(history) - cached <= 5 + 2 * PAGE
        history = history + answer + prompt(100 + turn, 5)


def test_an_edited_turn_goes_on_from_the_one_before(warm: Warm) -> None:
    turns = [prompt(1, 30)]
    for turn in range(4):
        answer, _ = warm.ask(turns[-1], max_tokens=9)
        turns.append(turns[-1] + answer + prompt(50 + turn, 7))
    edited = turns[2][:-3] + prompt(99, 8)
    _, cached = warm.ask(edited)
    assert cached >= len(turns[1]) - PAGE


def test_two_users_share_a_system_prompt(warm: Warm) -> None:
    system = prompt(1, 5 * INTERVAL)
    warm.ask(system + prompt(2, 11))
    assert warm.ask(system + prompt(3, 9))[1] == 5 * INTERVAL


def test_a_branch_point_off_the_interval_is_kept_when_it_is_seen_twice(warm: Warm) -> None:
    shared = prompt(1, 3 * PAGE)
    assert warm.ask(shared + prompt(2, 6))[1] == 0
    assert warm.ask(shared + prompt(3, 6))[1] == 0
    assert warm.ask(shared + prompt(4, 6))[1] == len(shared)


def test_prompts_that_arrive_together_are_computed_once_where_they_are_alike(warm: Warm) -> None:
    shared = prompt(1, 40)
    tails = [shared + prompt(10 + i, 5 + i) for i in range(4)]
    answers = warm.ask_together(*tails)
    assert [cached for _, cached in answers] == [0, 40, 40, 40]


def test_choices_of_one_request_share_its_prompt(warm: Warm) -> None:
    tokens = prompt(1, 41)
    before = warm.engine.stats.num_step_tokens
    warm.ask(tokens, n=3, temperature=1.0, seed=5, max_tokens=4)
    assert warm.engine.stats.num_step_tokens - before == 41 + 2 * 1 + 3 * 3


def test_choices_that_outrank_others_share_their_prompt_as_well(warm: Warm) -> None:
    warm.engine.add(replace(make_request("low", prompt(2, 3), max_tokens=40), priority=1))
    warm.engine.step()
    before = warm.engine.stats.num_step_tokens
    run(warm.engine, make_request("high", prompt(1, 41), n=3, temperature=1.0, seed=5, max_tokens=1))
    assert warm.engine.stats.num_step_tokens - before <= 41 + 2 * 1 + 40


def test_packed_prompts_of_any_length_leave_right_checkpoints(warm: Warm) -> None:
    prompts = [prompt(i, length) for i, length in enumerate([INTERVAL + 3, 2 * INTERVAL + 5, INTERVAL + 1])]
    warm.ask_together(*prompts)
    for tokens in reversed(prompts):
        assert warm.ask(tokens)[1] == (len(tokens) - 1) // PAGE * PAGE


def test_a_prompt_among_decoding_ones_leaves_right_checkpoints(warm: Warm) -> None:
    engine = warm.engine
    for name in ("one", "two"):
        engine.add(make_request(name, prompt(len(name), 5), max_tokens=30))
    for _ in range(3):
        engine.step()
    engine.add(make_request("long", prompt(9, 4 * INTERVAL), max_tokens=3))
    while engine.has_work:
        engine.step()
    assert warm.ask(prompt(9, 4 * INTERVAL))[1] == 4 * INTERVAL - PAGE


def test_another_salt_shares_nothing(config: ModelConfig) -> None:
    warm = warm_engine(FakeModel(config))
    tokens = prompt(1, 30)
    cached = []
    for i, salt in enumerate(["", "a", "a", "b", ""]):
        warm.engine.add(replace(make_request(str(i), tokens), cache_salt=salt))
        while warm.engine.has_work:
            cached += [output.cached_tokens for output in warm.engine.step() if output.cached_tokens]
    assert cached == [28, 28]


def test_log_probabilities_of_a_prompt_are_computed_not_remembered(warm: Warm) -> None:
    tokens = prompt(1, 37)
    requests = [make_request(str(i), tokens, prompt_logprobs=2, max_tokens=2) for i in range(2)]
    cold, again = (run(warm.engine, request)[request.id, 0].prompt_logprobs for request in requests)
    assert cold == again and cold is not None and len(cold) == 37


def test_a_flushed_cache_has_nothing_left(warm: Warm) -> None:
    warm.ask(prompt(1, 40))
    assert warm.engine.stats.num_checkpoints > 0
    assert warm.engine.core.flush_cache() > 0
    assert warm.engine.memory.use().page_bytes_cached == warm.engine.memory.use().state_bytes_cached == 0
    assert warm.ask(prompt(1, 40))[1] == 0


def test_a_small_arena_evicts_and_never_errs(config: ModelConfig) -> None:
    warm = warm_engine(FakeModel(config), num_pages=24, num_slots=3)
    for i in range(12):
        warm.ask(prompt(i % 5, 20 + i), max_tokens=9)
    assert warm.engine.stats.num_evictions > 0


@pytest.mark.parametrize("swap_bytes", [0, 1 << 30])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_preempted_sequences_give_the_answers_of_lone(
    config: ModelConfig, swap_bytes: int, asynchronous: bool
) -> None:
    options = {"num_pages": 14, "num_slots": 4, "max_model_len": 40, "swap_bytes": swap_bytes}
    warm = warm_engine(FakeModel(config), async_scheduling=asynchronous, **options)
    prompts = [prompt(i, 3 + 4 * i) for i in range(5)]
    warm.ask_together(*prompts, max_tokens=16, temperature=1.0, seed=3)
    stats = warm.engine.stats
    assert stats.num_swaps > 0 if swap_bytes else stats.num_preemptions > 0
    warm.engine.core.close()


def test_no_nan_reaches_the_cache(config: ModelConfig) -> None:
    """Neither in a state nor, where no state shows it, in a page alone."""
    tokens = prompt(1, 40)
    for spoil_state in (True, False):
        fake = FakeModel(config)
        warm = warm_engine(fake, chunk=16)
        spoilt: list[int] = []

        def spoil(batch: StepBatch, logits: torch.Tensor) -> None:
            if spoilt or int(batch.context_lens[0]) != 16:  # noqa: B023
                return
            spoilt.append(1)  # noqa: B023
            for view in warm.engine.memory.views:  # noqa: B023
                if isinstance(view, KdaView):
                    if spoil_state:  # noqa: B023
                        view.state[batch.state_slots[0], -1] = torch.nan
                else:
                    view.latent[batch.block_tables[0, 5], 0, 1] = torch.nan

        fake.hook = spoil
        run(warm.engine, make_request("bad", tokens))
        assert spoilt
        fake.hook = None
        assert warm.ask(tokens)[1] == 16


def test_a_step_that_raises_publishes_nothing_and_loses_nothing(config: ModelConfig) -> None:
    for asynchronous in (False, True):
        fake = FakeModel(config)
        warm = warm_engine(fake, chunk=16, async_scheduling=asynchronous)

        def fail(batch: StepBatch, logits: torch.Tensor) -> None:
            if int(batch.context_lens[0]) == 16:
                raise ValueError("planned")

        fake.hook = fail
        assert run(warm.engine, make_request("bad", prompt(1, 40)))["bad", 0].reason == "error"
        fake.hook = None
        assert warm.ask(prompt(1, 40))[1] == 16
        warm.engine.core.close()


class CachingMachine(RuleBasedStateMachine):
    """Chats that grow, branch, are aborted and preempted: memory adds up, answers are those of LONE."""

    config: ModelConfig
    lone_answers: dict[tuple[int, ...], list[int]]

    @initialize(
        sizes=st.tuples(st.integers(8, 30), st.integers(1, 4), st.sampled_from([1, 3])),
        swap_bytes=st.sampled_from([0, 1 << 30]),
        chunk=st.sampled_from([1, 3, 8, 64]),
        interval=st.sampled_from([4, 8, 16]),
        asynchronous=st.booleans(),
    )
    def start(
        self, sizes: tuple[int, int, int], swap_bytes: int, chunk: int, interval: int, asynchronous: bool
    ) -> None:
        self.engine = warm_engine(
            FakeModel(self.config),
            num_pages=sizes[0],
            num_slots=sizes[1],
            pages_per_slab=sizes[2],
            max_model_len=32,  # of the longest sequence here: at least it fits
            swap_bytes=swap_bytes,
            chunk=chunk,
            snapshot_interval=interval,
            async_scheduling=asynchronous,
        ).engine
        self.prompts: list[list[int]] = []
        self.answers: Answers = {}

    @rule(first=st.integers(0, 2), length=st.integers(1, 20), priority=st.integers(0, 1), n=st.integers(1, 2))
    def new(self, first: int, length: int, priority: int, n: int) -> None:
        self.add([3 + first + i // 9 for i in range(length)], priority, n)

    @rule(which=st.integers(0, 40), keep=st.integers(1, 26), tail=st.lists(st.integers(3, 5), max_size=4))
    def go_on(self, which: int, keep: int, tail: list[int]) -> None:
        """A conversation goes on from somewhere in an old one."""
        if self.prompts:
            name = which % len(self.prompts)
            answer = self.answers.get((str(name), 0))
            told = self.prompts[name] + (answer.token_ids if answer else [])
            self.add((told[:keep] + tail)[:26], 0, 1)

    def add(self, tokens: list[int], priority: int, n: int) -> None:
        request = make_request(str(len(self.prompts)), tokens, max_tokens=6, n=n, temperature=0.5, seed=1)
        self.prompts.append(tokens)
        self.engine.add(replace(request, priority=priority))

    @rule(steps=st.integers(1, 5))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            gather(self.engine.step(), self.answers)

    @rule(which=st.integers(0, 40))
    def abort(self, which: int) -> None:
        gather(self.engine.abort(str(which)), self.answers)

    @rule()
    def flush(self) -> None:
        self.engine.core.flush_cache()

    @invariant()
    def memory_adds_up(self) -> None:
        if hasattr(self, "engine"):
            self.engine.memory.check()

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        for _ in range(2000):
            if not self.engine.has_work:
                break
            gather(self.engine.step(), self.answers)
        assert_all_free(self.engine)
        self.engine.core.close()
        for (name, index), answer in self.answers.items():
            tokens = tuple(self.prompts[int(name)])
            if (*tokens, -1 - index) not in self.lone_answers:
                request = make_request("a", list(tokens), max_tokens=6, n=2, temperature=0.5, seed=1)
                for (_, i), alone in run(make_engine(FakeModel(self.config)), request).items():
                    self.lone_answers[*tokens, -1 - i] = alone.token_ids
            expected = self.lone_answers[*tokens, -1 - index]
            assert answer.reason in ("length", "abort")
            assert answer.token_ids == expected[: len(answer.token_ids)]
            assert answer.reason == "abort" or len(answer.token_ids) == 6


def test_any_conversations_in_any_order(config: ModelConfig) -> None:
    class Machine(CachingMachine):
        lone_answers: dict[tuple[int, ...], list[int]] = {}  # noqa: RUF012

    Machine.config = config
    Machine.TestCase.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
    Machine.TestCase("runTest").runTest()


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("swap_bytes", [0, 1 << 30])
def test_the_real_model_in_a_small_arena(decoder: Decoder, swap_bytes: int, asynchronous: bool) -> None:
    options = {"num_pages": 20, "num_slots": 4, "max_model_len": 60, "swap_bytes": swap_bytes, "chunk": 12}
    warm = warm_engine(decoder, async_scheduling=asynchronous, **options)
    shared = prompt(1, 21)
    prompts = [shared + prompt(2 + i, 3 + 5 * i) for i in range(4)]
    warm.ask_together(*prompts, max_tokens=10)
    hits = [cached for _, cached in warm.ask_together(*reversed(prompts), max_tokens=10)]
    assert max(hits) > 0
    warm.engine.core.close()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_an_edit_that_fails_ends_the_engine_since_nobody_knows_who_holds_what(
    config: ModelConfig, asynchronous: bool
) -> None:
    engine = warm_engine(FakeModel(config), async_scheduling=asynchronous).engine
    engine.add(make_request("a", prompt(1, 9)))

    def fail() -> None:
        raise MemoryError("planned")

    engine.memory._edits.append(fail)
    with pytest.raises(MemoryError, match="planned"):
        for _ in range(3):
            engine.step()
