"""How choices end, what a failure touches, and what an engine says about itself."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from support.fake_model import FakeModel
from support.serving import finish, gather, make_engine, make_request, run
from torch import Tensor

from longspan.chat import Tokenizer
from longspan.config import ModelConfig
from longspan.engine.readers import TextReader
from longspan.engine.request import SamplingParams
from longspan.engine.sampler import token_logprobs
from longspan.errors import NonFiniteError, RequestError
from longspan.ops.batch import KdaView, StepBatch
from longspan.structure import Vocabulary

PROMPT = [40, 41, 42, 43, 44]


@pytest.fixture
def reply(config: ModelConfig) -> list[int]:
    """What the fake model says to PROMPT when nothing stops it."""
    return run(make_engine(FakeModel(config)), make_request("a", PROMPT, max_tokens=12))["a", 0].token_ids


def ending_at(config: ModelConfig, token_id: int) -> FakeModel:
    return FakeModel(replace(config, eos_token_ids=(token_id,)))


def test_a_reply_ends_at_max_tokens(fake: FakeModel) -> None:
    answer = run(make_engine(fake), make_request("a", PROMPT, max_tokens=3))["a", 0]
    assert (len(answer.token_ids), answer.reason) == (3, "length")


def test_a_reply_ends_when_the_context_is_full(fake: FakeModel) -> None:
    answer = run(make_engine(fake, max_model_len=11), make_request("a", PROMPT, max_tokens=None))["a", 0]
    assert (len(answer.token_ids), answer.reason) == (6, "length")


def test_a_reply_ends_with_the_models_end_token(config: ModelConfig, reply: list[int]) -> None:
    model = ending_at(config, reply[3])
    answer = run(make_engine(model), make_request("a", PROMPT, ignore_eos=False))["a", 0]
    assert answer.token_ids == reply[: reply.index(reply[3]) + 1]
    assert answer.finish is not None
    assert (answer.finish.reason, answer.finish.stop_reason) == ("stop", None)


def test_ignore_eos_goes_on_to_the_limit(config: ModelConfig, reply: list[int]) -> None:
    model = ending_at(config, reply[3])
    answer = run(make_engine(model), make_request("a", PROMPT, ignore_eos=True))["a", 0]
    assert (answer.token_ids, answer.reason) == (reply[:8], "length")


def test_a_stop_token_ends_a_reply_and_is_named(fake: FakeModel, reply: list[int]) -> None:
    answer = run(make_engine(fake), make_request("a", PROMPT, stop_token_ids=[reply[2]]))["a", 0]
    assert answer.finish is not None
    assert answer.token_ids[-1] == reply[2]
    assert (answer.finish.reason, answer.finish.stop_reason) == ("stop", reply[2])


def test_the_last_token_may_be_the_stop_token(fake: FakeModel, reply: list[int]) -> None:
    request = make_request("a", PROMPT, stop_token_ids=[reply[2]], max_tokens=reply.index(reply[2]) + 1)
    assert run(make_engine(fake), request)["a", 0].reason == "stop"


def test_nothing_ends_a_reply_before_min_tokens(config: ModelConfig, reply: list[int]) -> None:
    model = ending_at(config, reply[1])
    stop = reply[2]
    request = make_request("a", PROMPT, min_tokens=6, max_tokens=12, stop_token_ids=[stop], ignore_eos=False)
    token_ids = run(make_engine(model), request)["a", 0].token_ids
    assert not {reply[1], stop} & set(token_ids[:6])
    assert token_ids[0] == reply[0]


def test_a_banned_token_never_appears(fake: FakeModel, reply: list[int]) -> None:
    banned = dict.fromkeys(set(reply), -100.0)
    hot = make_request("hot", PROMPT, logit_bias=banned, temperature=50.0, max_tokens=20)
    cold = make_request("cold", PROMPT, logit_bias=banned, max_tokens=20)
    for answer in run(make_engine(fake), hot, cold).values():
        assert not set(reply) & set(answer.token_ids)


def test_banning_everything_fails_that_request_alone(config: ModelConfig, fake: FakeModel) -> None:
    nothing = dict.fromkeys(range(config.vocab_size), -100.0)
    for temperature in (0.0, 1.0):
        bad = make_request("bad", PROMPT, logit_bias=nothing, temperature=temperature)
        answers = run(make_engine(fake), bad, make_request("good", PROMPT))
        assert answers["bad", 0].finish is not None
        assert isinstance(answers["bad", 0].finish.error, RequestError)
        assert answers["good", 0].reason == "length"


def test_a_bias_towards_a_token_makes_it_the_answer(fake: FakeModel) -> None:
    assert (
        run(make_engine(fake), make_request("a", PROMPT, logit_bias={77: 100.0}))["a", 0].token_ids
        == [77] * 8
    )


class Anything:
    """A structure, and the constraint of each reply: all is allowed until a test takes something away."""

    last: int | None = None

    def start(self, vocabulary: Vocabulary) -> Anything:
        return type(self)()

    def allowed(self) -> list[int]:
        return list(range(512))

    def mask(self) -> Tensor:
        bits = torch.zeros(512, dtype=torch.int64)
        bits[self.allowed()] = 1
        return (bits.view(16, 32) << torch.arange(32)).sum(-1).to(torch.int32)

    def accept(self, token_id: int) -> None:
        self.last = token_id


def test_a_constraint_chooses_among_what_it_allows(fake: FakeModel, tokenizer: Tokenizer) -> None:
    class OnlyAfter(Anything):
        def allowed(self) -> list[int]:
            return super().allowed() if self.last is None else [(self.last + i) % 500 for i in (1, 2, 3)]

    request = make_request("a", PROMPT, structure=OnlyAfter(), n=2, temperature=1.0, max_tokens=15)
    for answer in run(make_engine(fake, tokenizer), request).values():
        assert len(answer.token_ids) == 15
        for before, after in pairwise(answer.token_ids):
            assert (after - before) % 500 in (1, 2, 3)


def test_a_constraint_that_leaves_only_the_end_overrules_min_tokens(
    config: ModelConfig, fake: FakeModel, tokenizer: Tokenizer
) -> None:
    class End(Anything):
        def allowed(self) -> list[int]:
            return list(config.eos_token_ids)

    request = make_request("a", PROMPT, structure=End(), min_tokens=4, ignore_eos=False)
    answer = run(make_engine(fake, tokenizer), request)["a", 0]
    assert (answer.token_ids, answer.reason) == (list(config.eos_token_ids), "stop")


@pytest.mark.parametrize("banned", [{}, {7: -100.0}])
def test_min_tokens_holds_as_long_as_a_constraint_leaves_anything_else(
    config: ModelConfig, fake: FakeModel, tokenizer: Tokenizer, banned: dict[int, float]
) -> None:
    class EndOr7(Anything):
        def allowed(self) -> list[int]:
            return [7, *config.eos_token_ids]

    request = make_request(
        "a",
        PROMPT,
        structure=EndOr7(),
        min_tokens=4,
        ignore_eos=False,
        logit_bias=banned | {config.eos_token_ids[0]: 90.0},
    )
    answer = run(make_engine(fake, tokenizer), request)["a", 0]
    assert answer.token_ids == ([] if banned else [7] * 4) + list(config.eos_token_ids)


def test_penalties_and_biases_choose_within_a_constraint(fake: FakeModel, tokenizer: Tokenizer) -> None:
    class Three(Anything):
        def allowed(self) -> list[int]:
            return [7, 8, 9]

    request = make_request(
        "a", PROMPT, structure=Three(), logit_bias={3: 100.0, 8: 90.0}, frequency_penalty=2.0, max_tokens=90
    )
    token_ids = run(make_engine(fake, tokenizer, num_pages=64), request)["a", 0].token_ids
    assert set(token_ids) == {7, 8, 9} and token_ids[:20] == [8] * 20


def test_a_constraint_that_allows_nothing_or_raises_fails_its_own_request(
    fake: FakeModel, tokenizer: Tokenizer
) -> None:
    class Nothing(Anything):
        def allowed(self) -> list[int]:
            return []

    class Broken(Anything):
        def allowed(self) -> list[int]:
            raise KeyError("lost")

    answers = run(
        make_engine(fake, tokenizer),
        make_request("nothing", PROMPT, structure=Nothing()),
        make_request("broken", PROMPT, structure=Broken()),
        make_request("good", PROMPT),
    )
    assert [answers[name, 0].reason for name in ("nothing", "broken", "good")] == ["error", "error", "length"]


def test_a_structure_without_a_tokenizer_is_refused(fake: FakeModel) -> None:
    with pytest.raises(RequestError, match="no tokenizer"):
        make_engine(fake).add(make_request("a", PROMPT, structure=Anything()))


def test_choices_of_one_request_differ_and_each_ends_by_itself(fake: FakeModel) -> None:
    answers = run(make_engine(fake), make_request("a", PROMPT, n=3, temperature=1.0, seed=5))
    assert sorted(answers) == [("a", 0), ("a", 1), ("a", 2)]
    assert len({tuple(answer.token_ids) for answer in answers.values()}) == 3


def test_the_first_choice_does_not_depend_on_n(fake: FakeModel) -> None:
    one = run(make_engine(fake), make_request("a", PROMPT, temperature=1.0, seed=5))
    many = run(make_engine(fake), make_request("a", PROMPT, temperature=1.0, seed=5, n=4))
    assert one["a", 0].token_ids == many["a", 0].token_ids


def test_requests_without_a_seed_differ_unless_the_engine_has_one(config: ModelConfig) -> None:
    def sampled(seed: int | None) -> list[list[int]]:
        requests = [make_request(name, PROMPT, temperature=1.0) for name in ("a", "b")]
        answers = run(make_engine(FakeModel(config), seed=seed), *requests)
        return [answers["a", 0].token_ids, answers["b", 0].token_ids]

    first, second = sampled(None), sampled(None)
    assert len({tuple(ids) for ids in first + second}) == 4
    assert sampled(7) == sampled(7)


def test_text_is_cut_at_the_stop_string_and_tokens_are_not(config: ModelConfig, tokenizer) -> None:
    words = list(b"one two three")
    model = FakeModel(config, says(words, len(PROMPT)))
    params = SamplingParams(stop=["wo t"])
    request = make_request("a", PROMPT, lambda: TextReader(tokenizer, params), stop=["wo t"], max_tokens=13)
    answer = run(make_engine(model), request)["a", 0]
    assert "".join(delta.text for delta in answer.deltas) == "one t"
    assert bytes(answer.token_ids) == b"one two t"
    assert answer.finish is not None
    assert (answer.finish.reason, answer.finish.stop_reason) == ("stop", "wo t")


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_tokens_text_is_shown_only_if_asked_for(config: ModelConfig, tokenizer, include: bool) -> None:
    model = FakeModel(config, says(list(b"abcdef"), len(PROMPT)))
    params = SamplingParams(include_stop_str_in_output=include)
    request = make_request(
        "a",
        PROMPT,
        lambda: TextReader(tokenizer, params),
        stop_token_ids=[ord("c")],
        include_stop_str_in_output=include,
    )
    answer = run(make_engine(model), request)["a", 0]
    assert "".join(delta.text for delta in answer.deltas) == ("abc" if include else "ab")


def says(tokens: list[int], prompt_length: int):
    """A hook that makes the model say these, whatever it would rather say."""

    def hook(batch: StepBatch, logits: Tensor) -> None:
        for i, row in enumerate(batch.logit_rows.tolist()):
            at = int(batch.row_positions[row]) + 1 - prompt_length
            if 0 <= at < len(tokens):
                logits[i, tokens[at]] = 50.0

    return hook


def poison_row_of(prompt_length: int, value: float):
    """A hook that spoils the logits of every sequence whose prompt had this length, from its 3rd token on."""

    def hook(batch: StepBatch, logits: Tensor) -> None:
        for i, row in enumerate(batch.logit_rows.tolist()):
            if int(batch.row_positions[row]) == prompt_length + 1:
                logits[i, 5] = value

    return hook


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_non_finite_logits_end_one_request_and_no_other(config: ModelConfig, value: float) -> None:
    requests = [make_request(str(length), list(range(60, 60 + length))) for length in (3, 30, 6, 9)]
    expected = run(make_engine(FakeModel(config)), *requests)
    engine = make_engine(FakeModel(config, poison_row_of(30, value)))
    answers = run(engine, *requests)
    assert answers["30", 0].finish is not None
    assert isinstance(answers["30", 0].finish.error, NonFiniteError)
    assert len(answers["30", 0].token_ids) == 2
    for name in ("3", "6", "9"):
        assert answers[name, 0].token_ids == expected[name, 0].token_ids
    later = make_request("later", list(range(60, 69)))
    assert run(engine, later)["later", 0].token_ids == expected["9", 0].token_ids


def test_no_nan_stays_in_memory_after_a_failure(fake: FakeModel) -> None:
    engine = make_engine(fake, poison=False)
    tensors = [
        (tensor, isinstance(view, KdaView))
        for view in engine.memory.views
        for tensor in vars(view).values()
        if isinstance(tensor, Tensor)
    ]
    for tensor, _ in tensors:
        tensor.zero_()
    engine.add(make_request("a", PROMPT))
    engine.step()
    (batch,) = fake.batches
    for tensor, is_state in tensors:
        tensor[batch.state_slots if is_state else batch.block_tables[0]] = torch.nan
    assert finish(engine)["a", 0].reason == "error"
    assert all(tensor.isfinite().all() for tensor, _ in tensors)


def test_a_step_that_raises_fails_whom_it_served_and_the_engine_goes_on(config: ModelConfig) -> None:
    fake = FakeModel(config)
    engine = make_engine(fake, num_slots=2)
    expected = run(make_engine(FakeModel(config)), make_request("waiting", PROMPT))

    def fail(*_: object) -> None:
        raise ValueError("out of luck")

    for name in ("a", "b", "waiting"):
        engine.add(make_request(name, PROMPT))
    engine.step()
    fake.hook = fail
    answers = gather(engine.step(), {})
    fake.hook = None
    assert {key[0] for key in answers} == {"a", "b"}
    assert all("out of luck" in str(answer.finish and answer.finish.error) for answer in answers.values())
    finish(engine, answers)
    assert answers["waiting", 0].token_ids == expected["waiting", 0].token_ids


def test_prompt_logprobs_that_raise_fail_their_own_request(
    config: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = [make_request(name, PROMPT, prompt_logprobs=n) for name, n in (("good", 1), ("bad", 2))]
    requests.append(make_request("other", PROMPT, logprobs=1))
    expected = run(make_engine(FakeModel(config)), *requests)

    def picky(logits: Tensor, token_ids: list[int], top_n: int) -> list:
        if top_n == 2:
            raise ValueError("out of luck")
        return token_logprobs(logits, token_ids, top_n)

    monkeypatch.setattr("longspan.engine.runner.token_logprobs", picky)
    answers = run(make_engine(FakeModel(config)), *requests)
    assert "out of luck" in str(answers["bad", 0].finish and answers["bad", 0].finish.error)
    for name in ("good", "other"):
        assert answers[name, 0].token_ids == expected[name, 0].token_ids
        assert answers[name, 0].prompt_logprobs == expected[name, 0].prompt_logprobs


def test_sampling_that_raises_on_one_request_fails_no_other(
    config: ModelConfig, tokenizer: Tokenizer
) -> None:
    """A mask of another size breaks the arithmetic of the whole batch."""

    class TooShort(Anything):
        def mask(self) -> Tensor:
            return super().mask()[:-1]

    requests = [make_request(name, PROMPT, temperature=1.0, seed=3) for name in ("a", "b")]
    expected = run(make_engine(FakeModel(config)), *requests)
    bad = make_request("bad", PROMPT, structure=TooShort())
    answers = run(make_engine(FakeModel(config), tokenizer), requests[0], bad, requests[1])
    assert answers["bad", 0].reason == "error"
    for name in ("a", "b"):
        assert answers[name, 0].token_ids == expected[name, 0].token_ids


def test_a_reader_that_raises_fails_its_own_request(fake: FakeModel) -> None:
    class Broken:
        done = False
        stop_string = None

        def push(self, token_id: int) -> list:
            raise KeyError("lost")

        def finish(self, reason):
            raise KeyError("lost")

    engine = make_engine(fake)
    answers = run(engine, make_request("bad", PROMPT, Broken), make_request("good", PROMPT))
    assert answers["bad", 0].reason == "error"
    assert answers["good", 0].reason == "length"
    engine.add(make_request("bad", PROMPT, Broken))
    assert [output.finish.reason for output in engine.abort("bad") if output.finish] == ["abort"]


def test_a_bad_request_is_refused_and_the_next_is_served(config: ModelConfig, fake: FakeModel) -> None:
    engine = make_engine(fake, max_model_len=20)
    for bad in (
        make_request("a", []),
        make_request("a", [1] * 20),
        make_request("a", [1] * 21),
        make_request("a", [config.vocab_size]),
        make_request("a", PROMPT, logit_bias={config.vocab_size: 1.0}),
        make_request("a", PROMPT, max_tokens=16),
    ):
        with pytest.raises(RequestError):
            engine.add(bad)
    assert not engine.has_work
    assert run(engine, make_request("a", PROMPT))["a", 0].reason == "length"


def test_an_id_may_be_used_again_only_after_its_end(fake: FakeModel) -> None:
    engine = make_engine(fake)
    engine.add(make_request("a", PROMPT))
    with pytest.raises(RequestError, match="'a' is being served"):
        engine.add(make_request("a", PROMPT))
    finish(engine)
    assert run(engine, make_request("a", PROMPT))["a", 0].reason == "length"


def test_an_abort_gives_everything_back_at_once_and_works_once(fake: FakeModel) -> None:
    engine = make_engine(fake)
    engine.add(make_request("a", PROMPT, n=2))
    engine.add(make_request("b", PROMPT))
    engine.step()
    outputs = engine.abort("a")
    assert [output.finish.reason for output in outputs if output.finish] == ["abort", "abort"]
    assert engine.memory.use().state_bytes_running == engine.memory.slab_bytes
    assert engine.abort("a") == []
    assert engine.abort("never seen") == []
    assert finish(engine)["b", 0].reason == "length"
    assert engine.abort("b") == []


def test_an_abort_of_one_that_waits_leaves_the_queue_intact(fake: FakeModel) -> None:
    engine = make_engine(fake, num_slots=1)
    for name in ("a", "b", "c"):
        engine.add(make_request(name, PROMPT))
    engine.step()
    engine.abort("b")
    answers = finish(engine)
    assert {key[0] for key in answers} == {"a", "c"}


def test_stats_count_what_was_done_once(config: ModelConfig) -> None:
    engine = make_engine(FakeModel(config), num_pages=8, num_slots=3)
    for name in ("a", "b", "c"):
        engine.add(make_request(name, PROMPT, max_tokens=12))
    engine.step()
    assert (engine.stats.num_running, engine.stats.num_waiting) == (3, 0)
    assert engine.stats.cache_usage == (6 + 3) / (8 + 3)  # pages and states, in slabs of one page
    finish(engine)
    stats = engine.stats
    assert stats.num_preemptions > 0
    assert (stats.num_running, stats.num_waiting, stats.cache_usage) == (0, 0, 0)
    assert (stats.prompt_tokens, stats.generation_tokens) == (3 * 5, 3 * 12)


def test_times_of_a_choice_are_in_order(fake: FakeModel) -> None:
    times = run(make_engine(fake), make_request("a", PROMPT))["a", 0].finish.times  # type: ignore[union-attr]
    assert times.scheduled is not None and times.first_token is not None
    assert times.arrived <= times.scheduled <= times.first_token <= times.finished


def test_logprobs_start_with_the_chosen_token_and_rank_the_best(config: ModelConfig) -> None:
    request = make_request("a", PROMPT, temperature=5.0, seed=3, logprobs=4, logit_bias={9: -100.0})
    answer = run(make_engine(FakeModel(config)), request)["a", 0]
    assert len(answer.logprobs) == len(answer.token_ids)
    for token_id, entry in zip(answer.token_ids, answer.logprobs, strict=True):
        assert next(iter(entry)) == token_id
        top = [logprob for logprob in entry.values() if logprob.rank <= 4]
        assert sorted(logprob.rank for logprob in top) == [1, 2, 3, 4]
        assert len(entry) == (4 if entry[token_id].rank <= 4 else 5)
        by_rank = sorted(entry.values(), key=lambda logprob: logprob.rank)
        assert [e.logprob for e in by_rank] == sorted((e.logprob for e in by_rank), reverse=True)


def test_no_logprobs_unless_asked_for(fake: FakeModel) -> None:
    answer = run(make_engine(fake), make_request("a", PROMPT))["a", 0]
    assert (answer.logprobs, answer.prompt_logprobs) == ([], None)
