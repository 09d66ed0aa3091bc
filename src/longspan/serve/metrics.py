"""Prometheus metrics under vLLM's names, so that its dashboards work unchanged; ours begin with `longspan:`.

Gauges and counters of the engine are read when scraped (engine_metrics.py). Histograms and ends are fed by
the outputs that clients get. A choice counts as a request of its own, as it does in the engine. Labels are
bounded: none is a string that a client chose.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, generate_latest

from longspan.engine.output import Finish, StepOutput
from longspan.engine.request import Request
from longspan.engine.stats import EngineStats
from longspan.errors import NonFiniteError, OverloadedError
from longspan.serve.engine_metrics import EngineCollector
from longspan.serve.failures import AbortedError

END_REASONS = ("stop", "length", "abort", "error")
_COMPUTED, _CACHED, _TRANSFERRED = "local_compute", "local_cache_hit", "external_kv_transfer"

REJECTIONS = {
    400: "invalid",
    401: "unauthorized",
    404: "not_found",
    405: "not_found",
    413: "too_large",
    422: "invalid",
    429: "queue_full",
    503: "unavailable",
    504: "deadline",
}
"""Why a request was refused or given up, by HTTP status."""

# Read as decimals, so that the bounds are printed as they are written here. 0.1 ms to 2 hours:
_SECONDS = tuple(float(f"{base}e{power}") for power in range(-4, 4) for base in (1, 1.5, 2, 3, 5, 7))
_TOKENS = tuple(base * 10**power for power in range(7) for base in (1, 2, 5))
_CHOICES = (1, 2, 5, 10, 20, 50, 100)


class Metrics:
    """All metrics of one server, in a registry of its own."""

    def __init__(
        self,
        model_name: str,
        stats: Callable[[], EngineStats],
        cache_config: Mapping[str, str],
    ) -> None:
        """`cache_config`: facts about the arena, shown as labels of vllm:cache_config_info."""
        # There is one engine in a server; vLLM numbers them, and its dashboards group by that.
        self._labels = {"model_name": model_name, "engine": "0"}
        self._registry = CollectorRegistry()
        self._registry.register(EngineCollector(self._labels, stats, cache_config))
        ProcessCollector(registry=self._registry)

        counter, seconds, tokens = self._counter, self._seconds, self._tokens
        ends = counter("vllm:request_success", "Requests that came to their end.", "finished_reason")
        self._ends = {reason: ends(reason) for reason in END_REASONS}
        self._corrupted = counter("vllm:corrupted_requests", "Requests that met NaN or infinity.")()
        sources = counter("vllm:prompt_tokens_by_source", "Prompt tokens by where they came from.", "source")
        self._sources = {source: sources(source) for source in (_COMPUTED, _CACHED, _TRANSFERRED)}
        self._cached = counter("vllm:prompt_tokens_cached", "Prompt tokens that were not computed again.")()

        self._time_to_first_token = seconds("time_to_first_token_seconds", "From arrival to the first token.")
        self._inter_token = seconds("inter_token_latency_seconds", "Between two tokens of a request.")
        self._per_token = seconds(
            "request_time_per_output_token_seconds", "Mean time per token after the first."
        )
        self._e2e = seconds("e2e_request_latency_seconds", "From arrival to the end.")
        self._queue = seconds("request_queue_time_seconds", "From arrival until first scheduled.")
        self._inference = seconds("request_inference_time_seconds", "From first scheduled to the end.")
        self._prefill = seconds("request_prefill_time_seconds", "From first scheduled to the first token.")
        self._decode = seconds("request_decode_time_seconds", "From the first token to the end.")
        self._prompt_tokens = tokens("request_prompt_tokens", "Prompt tokens of a request.")
        self._computed_tokens = tokens(
            "request_prefill_kv_computed_tokens", "Prompt tokens of a request that were not cached."
        )
        self._generation_tokens = tokens("request_generation_tokens", "Tokens generated for a request.")
        self._longest = tokens("request_max_num_generation_tokens", "Tokens of the longest choice.")
        self._max_tokens = tokens("request_params_max_tokens", "Tokens asked for at most.")
        self._n = self._histogram("vllm:request_params_n", "Choices asked for.", _CHOICES)

        names = ("route", "status")
        self._http = counter("longspan:http_requests", "HTTP requests that were answered.", *names)
        rejected = counter("longspan:requests_rejected", "Requests that were not served.", "reason")
        self._rejected = {reason: rejected(reason) for reason in set(REJECTIONS.values())}

    def render(self) -> bytes:
        """The text exposition format."""
        return generate_latest(self._registry)

    def meter(self, request: Request) -> Meter:
        return Meter(self, request)

    def observe_http(self, route: str, status: int) -> None:
        """One HTTP exchange; `route` is a path of the app, not of the client."""
        self._http(route, str(status)).inc()

    def observe_rejection(self, status: int) -> None:
        """A request for work was answered with this status instead."""
        if status in REJECTIONS:
            self._rejected[REJECTIONS[status]].inc()

    def observe_first_token(self, seconds: float, num_prompt_tokens: int, num_cached: int) -> None:
        self._time_to_first_token.observe(seconds)
        self._sources[_COMPUTED].inc(num_prompt_tokens - num_cached)
        self._sources[_CACHED].inc(num_cached)
        self._cached.inc(num_cached)

    def observe_token(self, seconds_since_last: float) -> None:
        self._inter_token.observe(seconds_since_last)

    def observe_finish(self, finish: Finish, request: Request, choice: Choice) -> None:
        """A choice came to its own end: its lengths and times."""
        reason = finish.reason if finish.reason in self._ends else "stop"  # vLLM knows no "tool_calls"
        self._ends[reason].inc()
        self._prompt_tokens.observe(len(request.prompt_token_ids))
        self._generation_tokens.observe(choice.num_tokens)
        if request.params.max_tokens is not None:
            self._max_tokens.observe(request.params.max_tokens)
        times = finish.times
        self._e2e.observe(times.finished - times.arrived)
        if times.scheduled is None:
            return
        self._queue.observe(times.scheduled - times.arrived)
        self._inference.observe(times.finished - times.scheduled)
        if times.first_token is None:
            return
        self._computed_tokens.observe(len(request.prompt_token_ids) - choice.cached_tokens)
        self._prefill.observe(times.first_token - times.scheduled)
        self._decode.observe(times.finished - times.first_token)
        if choice.num_tokens > 1:
            self._per_token.observe((times.finished - times.first_token) / (choice.num_tokens - 1))

    def observe_unfinished(self, count: int, error: Exception | None) -> None:
        """So many choices were given up: with an error, or since nobody waits for them."""
        aborted = error is None or isinstance(error, OverloadedError | AbortedError)
        self._ends["abort" if aborted else "error"].inc(count)
        if isinstance(error, NonFiniteError):
            self._corrupted.inc()

    def observe_request(self, num_choices: int, longest: int) -> None:
        """All choices of a request have come to their ends."""
        self._n.observe(num_choices)
        self._longest.observe(longest)

    def _counter(self, name: str, help_text: str, *more_labels: str) -> Callable[..., Counter]:
        """A function from the values of `more_labels` to the counter that has them."""
        counter = Counter(name, help_text, [*self._labels, *more_labels], registry=self._registry)
        return lambda *values: counter.labels(*self._labels.values(), *values)

    def _seconds(self, name: str, help_text: str) -> Histogram:
        return self._histogram(f"vllm:{name}", help_text, _SECONDS)

    def _tokens(self, name: str, help_text: str) -> Histogram:
        return self._histogram(f"vllm:{name}", help_text, _TOKENS)

    def _histogram(self, name: str, help_text: str, buckets: tuple[float, ...]) -> Histogram:
        histogram = Histogram(name, help_text, list(self._labels), buckets=buckets, registry=self._registry)
        return histogram.labels(*self._labels.values())


@dataclass
class Choice:
    """What is known of one choice so far."""

    num_tokens: int = 0
    cached_tokens: int = 0
    last_token: float = 0.0
    finish: Finish | None = None


class Meter:
    """Follows the choices of one request from token to token. Must be closed."""

    def __init__(self, metrics: Metrics, request: Request) -> None:
        self.request = request
        self.choices = [Choice() for _ in range(request.params.n)]
        self.arrived = time.monotonic()
        self.first_token: float | None = None  # of any choice
        self.error: Exception | None = None
        self._metrics = metrics

    @property
    def abandoned(self) -> bool:
        """Closed before its end though nothing failed: nobody waits for it any more."""
        return self.error is None and any(choice.finish is None for choice in self.choices)

    def observe(self, step: StepOutput) -> None:
        choice = self.choices[step.index]
        if step.token_ids:
            self._take_tokens(choice, step)
        if step.finish and step.finish.error is None:
            choice.finish = step.finish
            self._metrics.observe_finish(step.finish, self.request, choice)

    def _take_tokens(self, choice: Choice, step: StepOutput) -> None:
        now = time.monotonic()
        new = len(step.token_ids)
        if choice.num_tokens == 0:
            self.first_token = self.first_token or now
            choice.cached_tokens = step.cached_tokens
            prompt = len(self.request.prompt_token_ids)
            self._metrics.observe_first_token(now - self.arrived, prompt, step.cached_tokens)
        else:
            # Tokens that came together share the time since the one before them.
            for _ in range(new):
                self._metrics.observe_token((now - choice.last_token) / new)
        choice.num_tokens += new
        choice.last_token = now

    def close(self, error: Exception | None) -> None:
        """The request is over, by an error if one is given."""
        self.error = error
        unfinished = sum(choice.finish is None for choice in self.choices)
        if unfinished:
            self._metrics.observe_unfinished(unfinished, error)
        else:
            self._metrics.observe_request(
                len(self.choices), max(choice.num_tokens for choice in self.choices)
            )
