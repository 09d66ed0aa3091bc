"""Prometheus metrics under vLLM's names, so that its dashboards work unchanged.

Gauges and counters are read from the engine when scraped. Histograms and ends are fed by its outputs.
A choice counts as a request of its own, as it does in the engine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from longspan.engine.output import Finish, StepOutput
from longspan.engine.stats import EngineStats

_SECONDS = tuple(0.001 * 2**power for power in range(21))  # 1 ms to 17 minutes
_TOKENS = tuple(base * 10**power for power in range(7) for base in (1, 2, 5))


class Metrics:
    """All metrics of one server, in a registry of its own."""

    def __init__(self, model_name: str, stats: Callable[[], EngineStats]) -> None:
        self._model_name = model_name
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCollector(model_name, stats))
        self._ends = Counter(
            "vllm:request_success",
            "Requests that came to their end, by reason.",
            ["model_name", "finished_reason"],
            registry=self._registry,
        )
        seconds, tokens = self._seconds, self._tokens
        self._time_to_first_token = seconds("time_to_first_token_seconds", "From arrival to the first token.")
        self._inter_token = seconds("inter_token_latency_seconds", "Between two tokens of a request.")
        self._per_token = seconds(
            "request_time_per_output_token_seconds", "Mean time per token after the first."
        )
        self._e2e = seconds("e2e_request_latency_seconds", "From arrival to the end.")
        self._queue = seconds("request_queue_time_seconds", "From arrival until first scheduled.")
        self._prefill = seconds("request_prefill_time_seconds", "From first scheduled to the first token.")
        self._decode = seconds("request_decode_time_seconds", "From the first token to the end.")
        self._prompt_tokens = tokens("request_prompt_tokens", "Prompt tokens of a request.")
        self._generation_tokens = tokens("request_generation_tokens", "Tokens generated for a request.")

    def render(self) -> bytes:
        """The text exposition format."""
        return generate_latest(self._registry)

    def meter(self, num_prompt_tokens: int) -> Meter:
        return Meter(self, num_prompt_tokens)

    def observe_token(self, seconds_since_last: float) -> None:
        self._inter_token.observe(seconds_since_last)

    def observe_end(self, finish: Finish, num_prompt_tokens: int, num_tokens: int) -> None:
        self._ends.labels(self._model_name, finish.reason).inc()
        self._prompt_tokens.observe(num_prompt_tokens)
        self._generation_tokens.observe(num_tokens)
        times = finish.times
        self._e2e.observe(times.finished - times.arrived)
        if times.scheduled is not None:
            self._queue.observe(times.scheduled - times.arrived)
        if times.scheduled is not None and times.first_token is not None:
            self._time_to_first_token.observe(times.first_token - times.arrived)
            self._prefill.observe(times.first_token - times.scheduled)
            self._decode.observe(times.finished - times.first_token)
            if num_tokens > 1:
                self._per_token.observe((times.finished - times.first_token) / (num_tokens - 1))

    def _seconds(self, name: str, help_text: str) -> Histogram:
        return self._histogram(name, help_text, _SECONDS)

    def _tokens(self, name: str, help_text: str) -> Histogram:
        return self._histogram(name, help_text, _TOKENS)

    def _histogram(self, name: str, help_text: str, buckets: tuple[float, ...]) -> Histogram:
        name = f"vllm:{name}"
        histogram = Histogram(name, help_text, ["model_name"], buckets=buckets, registry=self._registry)
        return histogram.labels(self._model_name)


class Meter:
    """Follows one choice from token to token."""

    def __init__(self, metrics: Metrics, num_prompt_tokens: int) -> None:
        self._metrics = metrics
        self._num_prompt_tokens = num_prompt_tokens
        self._num_tokens = 0
        self._last = 0.0

    def observe(self, step: StepOutput) -> None:
        if step.token_ids:
            now = time.monotonic()
            if self._num_tokens:
                self._metrics.observe_token(now - self._last)
            self._last = now
            self._num_tokens += len(step.token_ids)
        if step.finish:
            self._metrics.observe_end(step.finish, self._num_prompt_tokens, self._num_tokens)


class _EngineCollector(Collector):
    """Reads the engine when scraped, so nothing is ever stale."""

    def __init__(self, model_name: str, stats: Callable[[], EngineStats]) -> None:
        self._model_name = model_name
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        gauge, counter = GaugeMetricFamily, CounterMetricFamily
        yield self._metric(gauge, "num_requests_running", "Requests that hold memory.", stats.num_running)
        yield self._metric(gauge, "num_requests_waiting", "Requests that wait for memory.", stats.num_waiting)
        yield self._metric(
            gauge, "kv_cache_usage_perc", "Share of the pages in use, 1 = all.", stats.cache_usage
        )
        yield self._metric(
            counter, "num_preemptions", "Requests that lost their memory.", stats.num_preemptions
        )
        yield self._metric(counter, "prompt_tokens", "Prompt tokens processed.", stats.prompt_tokens)
        yield self._metric(counter, "generation_tokens", "Tokens generated.", stats.generation_tokens)

    def _metric(
        self,
        family: type[GaugeMetricFamily] | type[CounterMetricFamily],
        name: str,
        help_text: str,
        value: float,
    ) -> Metric:
        metric = family(f"vllm:{name}", help_text, labels=["model_name"])
        metric.add_metric([self._model_name], value)
        return metric
