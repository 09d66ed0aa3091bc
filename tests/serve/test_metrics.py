"""Every counter against requests whose numbers are known: whole, streamed, refused, failed, left."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample
from support.scripted import Hold, Reciter, Running, ScriptedModel, running_server

from longspan.chat import Tokenizer
from longspan.engine.output import Finish, FinishReason, StepOutput, Times
from longspan.engine.readers import TokenReader
from longspan.engine.request import Request, SamplingParams
from longspan.engine.stats import STEP_TOKENS, EngineStats, MemoryUse
from longspan.errors import LongspanError, NonFiniteError, OverloadedError
from longspan.serve.failures import AbortedError
from longspan.serve.metrics import Metrics

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
USER = {"messages": [{"role": "user", "content": "x"}]}
ENDLESS = {"prompt": "x", "max_tokens": 4000, "ignore_eos": True}

# What the dashboards that vLLM publishes, and routers made for it, ask for.
VLLM_NAMES = (
    "num_requests_running", "num_requests_waiting", "num_requests_waiting_by_reason", "kv_cache_usage_perc",
    "cache_config_info", "prefix_cache_queries_total", "prefix_cache_hits_total", "num_preemptions_total",
    "prompt_tokens_total", "prompt_tokens_cached_total", "prompt_tokens_by_source_total",
    "generation_tokens_total", "request_success_total", "corrupted_requests_total",
    "iteration_tokens_total_bucket", "iteration_tokens_total_sum", "iteration_tokens_total_count",
    "time_to_first_token_seconds_bucket", "inter_token_latency_seconds_bucket",
    "request_time_per_output_token_seconds_bucket", "e2e_request_latency_seconds_bucket",
    "request_queue_time_seconds_bucket", "request_inference_time_seconds_bucket",
    "request_prefill_time_seconds_bucket", "request_decode_time_seconds_bucket",
    "request_prompt_tokens_bucket", "request_generation_tokens_bucket",
    "request_max_num_generation_tokens_bucket", "request_prefill_kv_computed_tokens_bucket",
    "request_params_n_bucket", "request_params_max_tokens_bucket",
)  # fmt: skip


@pytest.fixture
def own_server(tokenizer: Tokenizer, request: pytest.FixtureRequest) -> Iterator[Running]:
    """A server of the test's own, with the options it is parametrised with."""
    model = ScriptedModel(tokenizer, Reciter(tokenizer))
    with running_server(model, tokenizer, **getattr(request, "param", {})) as server:
        yield server


def samples(text: str) -> list[Sample]:
    return [sample for family in text_string_to_metric_families(text) for sample in family.samples]


class Reading:
    """The metrics of one moment."""

    def __init__(self, source: Running | Metrics) -> None:
        text = source.get("/metrics").text if isinstance(source, Running) else source.render().decode()
        self.samples = samples(text)

    def __call__(self, name: str, **labels: str) -> float:
        """The sum over all series of this name that have these labels; some must."""
        found = [
            sample.value
            for sample in self.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        ]
        assert found, (name, labels)
        return sum(found)

    def ends(self) -> dict[str, float]:
        """Requests by how they ended, without the zeros."""
        name = "vllm:request_success_total"
        counts = {s.labels["finished_reason"]: s.value for s in self.samples if s.name == name}
        assert counts.keys() == {"stop", "length", "abort", "error"}
        return {reason: count for reason, count in counts.items() if count}

    def http(self) -> dict[tuple[str, str], float]:
        """HTTP requests by route and status, without those for these metrics."""
        name = "longspan:http_requests_total"
        found = [s for s in self.samples if s.name == name and s.labels["route"] != "/metrics"]
        return {(s.labels["route"], s.labels["status"]): s.value for s in found}


def when(server: Running, condition: Callable[[Reading], bool]) -> Reading:
    """The first reading for which the condition holds: what a client has got is counted a moment later."""
    for _ in range(1000):
        if condition(reading := Reading(server)):
            return reading
        time.sleep(0.005)
    raise AssertionError("it never came to that")


def test_all_that_dashboards_for_vllm_ask_for_is_there(own_server: Running) -> None:
    assert {f"vllm:{name}" for name in VLLM_NAMES} <= {sample.name for sample in Reading(own_server).samples}
    for sample in Reading(own_server).samples:
        if sample.name.startswith(("vllm:", "longspan:")):
            assert (sample.labels["model_name"], sample.labels["engine"]) == ("tiny", "0")


def test_what_was_served_is_counted(own_server: Running) -> None:
    length = own_server.say("Fine words.") + 1
    before = Reading(own_server)
    assert before("vllm:num_requests_running") == before("vllm:generation_tokens_total") == 0
    own_server.post(TEXT, {"prompt": [1, 2, 3], "n": 2, "max_tokens": 50})
    own_server.post(TEXT, {"prompt": [1, 2, 3], "max_tokens": 2, "stream": True})
    own_server.wait_until_idle()
    after = when(own_server, lambda now: now("vllm:request_params_n_count") == 2)
    assert after("vllm:generation_tokens_total") == 2 * length + 2
    assert after("vllm:prompt_tokens_total") == 9
    assert after("vllm:prompt_tokens_by_source_total") == 9
    assert after.ends() == {"stop": 2, "length": 1}
    assert after("vllm:num_requests_running") == after("vllm:num_requests_waiting") == 0
    for name in (
        "time_to_first_token_seconds",
        "e2e_request_latency_seconds",
        "request_queue_time_seconds",
        "request_inference_time_seconds",
        "request_prefill_time_seconds",
        "request_decode_time_seconds",
        "request_time_per_output_token_seconds",
        "request_prompt_tokens",
        "request_prefill_kv_computed_tokens",
    ):
        assert after(f"vllm:{name}_count") == 3, name
    assert after("vllm:inter_token_latency_seconds_count") == 2 * (length - 1) + 1
    assert after("vllm:request_generation_tokens_sum") == 2 * length + 2
    assert after("vllm:request_prompt_tokens_sum") == 9
    assert after("vllm:request_params_n_sum") == 3
    assert after("vllm:request_params_max_tokens_sum") == 2 * 50 + 2
    assert after("vllm:request_max_num_generation_tokens_sum") == length + 2
    assert after("vllm:num_preemptions_total") == 0
    assert after.http() == {(TEXT, "200"): 2}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, USER),
        ("/v1/responses", {"input": "x"}),
        ("/v1/messages", USER | {"model": "tiny", "max_tokens": 50}),
    ],
)
def test_every_way_to_ask_is_counted_alike(
    own_server: Running, path: str, body: dict[str, Any], stream: bool
) -> None:
    length = own_server.say("Fine.") + 1
    assert own_server.post(path, body | {"stream": stream}).status_code == 200
    own_server.wait_until_idle()
    after = when(own_server, lambda now: bool(now.ends()))
    assert after.ends() == {"stop": 1}
    assert after("vllm:generation_tokens_total") == after("vllm:request_generation_tokens_sum") == length
    assert after("vllm:request_params_max_tokens_count") == ("max_tokens" in body), "none was asked for"
    assert after.http() == {(path, "200"): 1}


def test_what_runs_and_waits_is_shown(own_server: Running) -> None:
    hold = Hold(own_server.model, after=1)  # the engine tells of itself between steps
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(own_server.post, TEXT, ENDLESS | {"n": 6, "max_tokens": 2})
        assert hold.reached.wait(30)
        now = when(own_server, lambda now: now("vllm:num_requests_running") == 4)
        assert now("vllm:num_requests_waiting") == 2
        assert now("vllm:num_requests_waiting_by_reason", reason="capacity") == 2
        assert 0 < now("vllm:kv_cache_usage_perc") < 1
        hold.release()
        assert answer.result().status_code == 200
    after = when(own_server, lambda now: now("vllm:num_requests_running") == 0)
    assert after("vllm:kv_cache_usage_perc") == 0


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_is_an_abort_of_each_choice_and_counted_once(
    own_server: Running, stream: bool
) -> None:
    own_server.say("word ", repeat=3000)
    for _ in range(5):
        hold = Hold(own_server.model)
        own_server.post_and_leave(TEXT, ENDLESS | {"n": 2, "stream": stream}, hold.reached)
        hold.release()
        own_server.wait_until_idle()
    after = when(own_server, lambda now: now.ends().get("abort", 0) == 10)
    assert after.ends() == {"abort": 10}
    assert after("vllm:e2e_request_latency_seconds_count") == 0, "they came to no end of their own"
    assert after("vllm:request_params_n_count") == 0


@pytest.mark.parametrize("stream", [False, True])
def test_a_failing_step_is_an_error_of_each_choice(own_server: Running, stream: bool) -> None:
    own_server.say("word ", repeat=100)
    steps = iter(range(3))

    def break_down() -> None:
        if next(steps, None) is None:
            own_server.model.before_step = lambda: None
            raise RuntimeError("broken kernel")

    own_server.model.before_step = break_down
    answer = own_server.post(TEXT, {"prompt": "x", "n": 3, "stream": stream, "max_tokens": 50})
    assert "broken kernel" in answer.text
    after = when(own_server, lambda now: bool(now.ends()))
    assert after.ends() == {"error": 3}
    assert after.http() == {(TEXT, "200" if stream else "500"): 1}
    assert after("longspan:requests_rejected_total") == 0, "it was served, if badly"


@pytest.mark.parametrize(
    "own_server", [{"api_key": "k", "max_body_bytes": 500, "num_slots": 1, "max_queue": 0}], indirect=True
)
def test_refusals_are_counted_by_reason_and_reach_no_engine(own_server: Running) -> None:
    key = {"Authorization": "Bearer k"}
    own_server.post(TEXT, {"prompt": "x"})
    own_server.post(TEXT, {"prompt": "x", "temprature": 1}, headers=key)
    own_server.post(TEXT, {"prompt": ""}, headers=key)
    own_server.post(TEXT, {"prompt": "x" * 1000}, headers=key)
    own_server.post(TEXT, {"prompt": "x", "model": "gpt-9"}, headers=key)
    own_server.post("/v9/nothing", {}, headers=key)
    hold = Hold(own_server.model)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(own_server.post, TEXT, {"prompt": "x", "max_tokens": 1}, headers=key)
        assert hold.reached.wait(30)
        assert own_server.post(TEXT, {"prompt": "x"}, headers=key).status_code == 429
        hold.release()
        running.result()
    after = when(own_server, lambda now: bool(now.ends()))
    name = "longspan:requests_rejected_total"
    rejected = {s.labels["reason"]: s.value for s in after.samples if s.name == name}
    assert rejected == {
        "unauthorized": 1,
        "invalid": 2,
        "too_large": 1,
        "not_found": 2,
        "queue_full": 1,
        "unavailable": 0,
        "deadline": 0,
    }
    assert sum(after.ends().values()) == 1


def test_no_client_can_make_a_label(own_server: Running) -> None:
    before = {(s.name, *sorted(s.labels.items())) for s in Reading(own_server).samples}
    for path in ("/a", "/v1/models/secret", "/v1/chat/completions/x", "/%00", "/" + "x" * 2000):
        own_server.get(path)
        own_server.post(path, {"model": path, "user": path}, headers={"X-Request-Id": "mine"})
    after = {(s.name, *sorted(s.labels.items())) for s in Reading(own_server).samples}
    new = [dict(labels) for name, *labels in after - before if name == "longspan:http_requests_total"]
    assert {labels["route"] for labels in new} == {"other", "/v1/models/{name:path}", "/metrics"}
    assert all(name.startswith("longspan:http_requests") for name, *_ in after - before)


def test_what_the_engine_says_of_itself_is_shown_number_by_number() -> None:
    counts = tuple(range(1, len(STEP_TOKENS) + 2))
    stats = EngineStats(
        num_running=1,
        num_waiting=2,
        num_swapped=3,
        cache_usage=0.25,
        memory=MemoryUse(1000, 10, 20, 30, 40, 50, 60),
        num_checkpoints=4,
        num_preemptions=5,
        num_swaps=6,
        num_evictions=7,
        prompt_tokens=8,
        generation_tokens=9,
        prefix_queries=100,
        prefix_hits=64,
        num_steps=11,
        step_tokens=counts,
        num_step_tokens=12,
        step_seconds=1.5,
        model_seconds=1.25,
    )
    now = Reading(Metrics("tiny", lambda: stats, {"block_size": "16"}))
    expected = {
        "vllm:num_requests_running": 1,
        "vllm:num_requests_waiting": 2,
        "longspan:num_requests_swapped": 3,
        "vllm:kv_cache_usage_perc": 0.25,
        "longspan:arena_total_bytes": 1000,
        "longspan:swap_bytes": 50,
        "longspan:swap_total_bytes": 60,
        "longspan:checkpoints": 4,
        "vllm:num_preemptions_total": 5,
        "longspan:swaps_total": 6,
        "longspan:evictions_total": 7,
        "vllm:prompt_tokens_total": 8,
        "vllm:generation_tokens_total": 9,
        "vllm:prefix_cache_queries_total": 100,
        "vllm:prefix_cache_hits_total": 64,
        "longspan:steps_total": 11,
        "longspan:step_seconds_total": 1.5,
        "longspan:model_seconds_total": 1.25,
        "vllm:iteration_tokens_total_sum": 12,
        "vllm:iteration_tokens_total_count": sum(counts),
    }
    assert {name: now(name) for name in expected} == expected
    arena = {
        ("page", "running"): 10,
        ("page", "cached"): 20,
        ("state", "running"): 30,
        ("state", "cached"): 40,
    }
    for (kind, owner), size in arena.items():
        assert now("longspan:arena_bytes", kind=kind, owner=owner) == size
    for i, bound in enumerate(STEP_TOKENS):
        assert now("vllm:iteration_tokens_total_bucket", le=f"{bound}.0") == sum(counts[: i + 1])
    assert now("vllm:cache_config_info", block_size="16") == 1


def make_metrics() -> Metrics:
    return Metrics("tiny", EngineStats, {})


def make_request(prompt: int = 3, **params: Any) -> Request:
    return Request("r", [1] * prompt, SamplingParams(**params), TokenReader)


def finish(reason: FinishReason) -> Finish:
    return Finish(reason, Times(1.0, 2.0, 4.0, 8.0))


def test_tokens_from_the_prefix_cache_are_not_counted_as_computed() -> None:
    metrics = make_metrics()
    meter = metrics.meter(make_request(prompt=100, n=2))
    meter.observe(StepOutput("r", 0, [], [7], cached_tokens=64))
    meter.observe(StepOutput("r", 1, [], [7], cached_tokens=96))
    for index in (0, 1):
        meter.observe(StepOutput("r", index, [], [8], finish=finish("stop")))
    meter.close(None)
    now = Reading(metrics)
    assert now("vllm:prompt_tokens_by_source_total", source="local_compute") == 36 + 4
    assert now("vllm:prompt_tokens_by_source_total", source="local_cache_hit") == 64 + 96
    assert now("vllm:prompt_tokens_cached_total") == 64 + 96
    assert now("vllm:request_prefill_kv_computed_tokens_sum") == 36 + 4


def test_times_go_where_they_belong() -> None:
    metrics = make_metrics()
    meter = metrics.meter(make_request())
    for token in range(4):
        meter.observe(StepOutput("r", 0, [], [token]))
    meter.observe(StepOutput("r", 0, [], [9], finish=finish("stop")))
    meter.close(None)
    now = Reading(metrics)
    sums = {
        "request_queue_time_seconds": 1,
        "request_prefill_time_seconds": 2,
        "request_decode_time_seconds": 4,
        "request_inference_time_seconds": 6,
        "e2e_request_latency_seconds": 7,
        "request_time_per_output_token_seconds": 1,
    }
    assert {name: now(f"vllm:{name}_sum") for name in sums} == sums


def test_a_reply_that_ends_with_calls_is_a_stop_as_in_vllm() -> None:
    metrics = make_metrics()
    meter = metrics.meter(make_request())
    meter.observe(StepOutput("r", 0, [], [1], finish=finish("tool_calls")))
    meter.close(None)
    assert Reading(metrics).ends() == {"stop": 1}


@pytest.mark.parametrize(
    ("error", "ends", "corrupted"),
    [
        (None, {"stop": 1, "abort": 2}, 0),
        (OverloadedError("shutting down"), {"stop": 1, "abort": 2}, 0),
        (AbortedError("by /abort_request"), {"stop": 1, "abort": 2}, 0),
        (NonFiniteError("NaN"), {"stop": 1, "error": 2}, 1),
        (LongspanError("broken"), {"stop": 1, "error": 2}, 0),
    ],
)
def test_choices_without_an_end_are_aborted_or_failed(
    error: Exception | None, ends: dict[str, int], corrupted: int
) -> None:
    metrics = make_metrics()
    meter = metrics.meter(make_request(n=3))
    meter.observe(StepOutput("r", 1, [], [1], finish=finish("stop")))
    if error is not None:  # the end of the choice that failed may come, then the error itself
        meter.observe(StepOutput("r", 0, [], [], finish=replace(finish("error"), error=error)))
    meter.close(error)
    now = Reading(metrics)
    assert now.ends() == ends
    assert now("vllm:corrupted_requests_total") == corrupted
    assert meter.abandoned == (error is None)


Steps = list[tuple[int, int]]


@settings(max_examples=40)
@given(
    prompt=st.integers(1, 50),
    n=st.integers(1, 4),
    steps=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=40),
    ended=st.sets(st.integers(0, 3)),
)
def test_whatever_comes_all_is_counted_once(prompt: int, n: int, steps: Steps, ended: set[int]) -> None:
    """`steps`: (choice, new tokens) in order; the choices in `ended` then come to their ends."""
    metrics = make_metrics()
    meter = metrics.meter(make_request(prompt, n=n))
    tokens = [0] * n
    later = 0  # tokens that came after a choice's first output
    for index, new in steps:
        if index < n:
            later += new if tokens[index] else 0
            tokens[index] += new
            meter.observe(StepOutput("r", index, [], [5] * new))
    ended = {index for index in ended if index < n}
    for index in ended:
        meter.observe(StepOutput("r", index, [], [], finish=finish("length")))
    meter.close(None)
    now, started = Reading(metrics), sum(count > 0 for count in tokens)
    assert now("vllm:inter_token_latency_seconds_count") == later
    assert now("vllm:time_to_first_token_seconds_count") == started
    assert now("vllm:prompt_tokens_by_source_total") == prompt * started
    assert now("vllm:request_generation_tokens_sum") == sum(tokens[index] for index in ended)
    counts = {"length": len(ended), "abort": n - len(ended)}
    assert now.ends() == {reason: count for reason, count in counts.items() if count}
    assert now("vllm:request_params_n_count") == (len(ended) == n)
