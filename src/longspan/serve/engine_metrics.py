"""What the engine knows of itself, read when scraped, so that nothing is ever stale.

vLLM's names where vLLM has one, `longspan:` where it has none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from longspan.engine.stats import STEP_TOKENS, EngineStats

_Value = Callable[[EngineStats], float]

_GAUGES: tuple[tuple[str, str, _Value], ...] = (
    ("vllm:num_requests_running", "Requests that hold memory.", lambda s: s.num_running),
    ("vllm:num_requests_waiting", "Requests that wait for memory.", lambda s: s.num_waiting),
    ("vllm:kv_cache_usage_perc", "Share of the arena that running requests hold, 1 = all.",
     lambda s: s.cache_usage),
    ("longspan:num_requests_swapped", "Waiting requests whose state is in the host pool.",
     lambda s: s.num_swapped),
    ("longspan:arena_total_bytes", "Size of the arena for pages and KDA states.",
     lambda s: s.memory.total_bytes),
    ("longspan:swap_bytes", "Of the host pool, held by preempted requests.", lambda s: s.memory.swap_bytes),
    ("longspan:swap_total_bytes", "Size of the host pool.", lambda s: s.memory.swap_total_bytes),
    ("longspan:checkpoints", "KDA snapshots in the prefix cache.", lambda s: s.num_checkpoints),
)  # fmt: skip

_COUNTERS: tuple[tuple[str, str, _Value], ...] = (
    ("vllm:num_preemptions", "Requests that lost their memory.", lambda s: s.num_preemptions),
    ("vllm:prompt_tokens", "Prompt tokens processed, those from the prefix cache included.",
     lambda s: s.prompt_tokens),
    ("vllm:generation_tokens", "Tokens generated.", lambda s: s.generation_tokens),
    ("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", lambda s: s.prefix_queries),
    ("vllm:prefix_cache_hits", "Prompt tokens taken from the prefix cache.", lambda s: s.prefix_hits),
    ("longspan:swaps", "Preempted requests whose state went to the host pool.", lambda s: s.num_swaps),
    ("longspan:evictions", "Entries that the prefix cache gave up for others.", lambda s: s.num_evictions),
    ("longspan:steps", "Steps of the engine.", lambda s: s.num_steps),
    ("longspan:step_seconds", "Time in steps while there was work.", lambda s: s.step_seconds),
    ("longspan:model_seconds", "Of the time in steps, that in model and sampler.", lambda s: s.model_seconds),
)  # fmt: skip


class EngineCollector(Collector):
    def __init__(
        self, labels: Mapping[str, str], stats: Callable[[], EngineStats], cache_config: Mapping[str, str]
    ) -> None:
        """`labels` go on every sample. `cache_config`: facts that do not change while it runs."""
        self._names, self._values = list(labels), list(labels.values())
        self._stats = stats
        self._cache_config = dict(cache_config)

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        for name, help_text, value in _GAUGES:
            gauge = GaugeMetricFamily(name, help_text, labels=self._names)
            gauge.add_metric(self._values, value(stats))
            yield gauge
        for name, help_text, value in _COUNTERS:
            counter = CounterMetricFamily(name, help_text, labels=self._names)
            counter.add_metric(self._values, value(stats))
            yield counter
        yield self._waiting_by_reason(stats)
        yield self._arena(stats)
        yield self._step_tokens(stats)
        info = InfoMetricFamily("vllm:cache_config", "Of the arena.", labels=self._names)
        info.add_metric(self._values, self._cache_config)
        yield info

    def _waiting_by_reason(self, stats: EngineStats) -> Metric:
        """Nothing but memory and places is waited for."""
        gauge = GaugeMetricFamily(
            "vllm:num_requests_waiting_by_reason", "What is waited for.", labels=[*self._names, "reason"]
        )
        gauge.add_metric([*self._values, "capacity"], stats.num_waiting)
        gauge.add_metric([*self._values, "deferred"], 0)
        return gauge

    def _arena(self, stats: EngineStats) -> Metric:
        gauge = GaugeMetricFamily(
            "longspan:arena_bytes", "Who holds the arena; the rest is free.",
            labels=[*self._names, "kind", "owner"],
        )  # fmt: skip
        memory = stats.memory
        for kind, owner, size in (
            ("page", "running", memory.page_bytes_running),
            ("page", "cached", memory.page_bytes_cached),
            ("state", "running", memory.state_bytes_running),
            ("state", "cached", memory.state_bytes_cached),
        ):
            gauge.add_metric([*self._values, kind, owner], size)
        return gauge

    def _step_tokens(self, stats: EngineStats) -> Metric:
        histogram = HistogramMetricFamily(
            "vllm:iteration_tokens_total", "Tokens computed by a step.", labels=self._names
        )
        buckets, total = [], 0
        for bound, count in zip([*STEP_TOKENS, "+Inf"], stats.step_tokens, strict=True):
            total += count
            buckets.append((str(float(bound)) if bound != "+Inf" else "+Inf", total))
        histogram.add_metric(self._values, buckets, stats.num_step_tokens)
        return histogram
