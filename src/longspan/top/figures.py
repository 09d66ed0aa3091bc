"""Rates, shares and percentiles between two snapshots.

`as_json` is what `longspan top --json` prints: one object, without the members that the server has no metrics
for. Fields are only ever added:

- url, models, seconds: where from, what it serves, the length of the window that rates are of
- running, waiting, swapped: requests now
- prompt_tokens_per_second, generation_tokens_per_second, requests_per_second, steps_per_second,
  preemptions_per_second, swaps_per_second, evictions_per_second
- latency: {ttft, itl, queue, e2e: {p50, p90, p99}}, seconds; absent where nothing came in the window
- cache_usage, prefix_hit_rate (of the tokens looked up in the window), model_share (of the time in steps),
  tokens_per_step
- arena: {total, page_running, page_cached, state_running, state_cached, free}, host_pool: {total, used}: in
  bytes
- totals: {requests: {REASON: count}, rejected: {REASON: count}, prompt_tokens, generation_tokens,
  preemptions, swaps, evictions}: since the server started
"""

from __future__ import annotations

import dataclasses
from collections import deque
from dataclasses import dataclass
from itertools import pairwise
from math import inf
from typing import Any

from longspan.top.scrape import Snapshot

GENERATED, PROMPT = "vllm:generation_tokens_total", "vllm:prompt_tokens_total"
_ENDS, _REJECTED = "vllm:request_success_total", "longspan:requests_rejected_total"
_COUNTERS = {
    "prompt_tokens": PROMPT,
    "generation_tokens": GENERATED,
    "requests": _ENDS,
    "steps": "vllm:iteration_tokens_total_count",
    "preemptions": "vllm:num_preemptions_total",
    "swaps": "longspan:swaps_total",
    "evictions": "longspan:evictions_total",
}
_LATENCIES = {
    "ttft": "vllm:time_to_first_token_seconds",
    "itl": "vllm:inter_token_latency_seconds",
    "queue": "vllm:request_queue_time_seconds",
    "e2e": "vllm:e2e_request_latency_seconds",
}
_PERCENTS = (50, 90, 99)


@dataclass(frozen=True)
class Figures:
    """None, or an empty dict: the server does not say. Bytes, seconds, shares of 1."""

    models: list[str]
    seconds: float
    running: float | None
    waiting: float | None
    swapped: float | None
    rates: dict[str, float]  # by the names of _COUNTERS, a second
    latency: dict[str, dict[str, float]]
    cache_usage: float | None
    prefix_hit_rate: float | None
    model_share: float | None
    tokens_per_step: float | None
    arena: dict[str, float]
    host_pool: dict[str, float]
    totals: dict[str, Any]

    def as_json(self, url: str) -> dict[str, Any]:
        values: dict[str, Any] = {"url": url} | dataclasses.asdict(self)
        values |= {f"{name}_per_second": rate for name, rate in values.pop("rates").items()}
        return {name: value for name, value in values.items() if value is not None and value != {}}


class History:
    """The snapshots of a window."""

    def __init__(self, window: float) -> None:
        """`window`: seconds that rates and percentiles are taken over."""
        self._window = window
        self._snapshots: deque[Snapshot] = deque()

    def add(self, snapshot: Snapshot) -> None:
        """A counter that fell means another server: what came before is forgotten."""
        if self._snapshots and _restarted(self._snapshots[-1], snapshot):
            self._snapshots.clear()
        self._snapshots.append(snapshot)
        while len(self._snapshots) > 2 and snapshot.taken - self._snapshots[1].taken >= self._window:
            self._snapshots.popleft()

    def figures(self) -> Figures:
        """Of the window so far. There must be a snapshot."""
        return compare(self._snapshots[0], self._snapshots[-1])

    def rates(self, name: str) -> list[float]:
        """A counter's growth a second between each two snapshots."""
        return [_rate(old, new, name) or 0.0 for old, new in pairwise(self._snapshots)]


def compare(old: Snapshot, new: Snapshot) -> Figures:
    """`old` may be `new` itself: then there are no rates."""
    rates = {name: _rate(old, new, counter) for name, counter in _COUNTERS.items()}
    latency = {name: _percentiles(old, new, histogram) for name, histogram in _LATENCIES.items()}
    return Figures(
        models=sorted(new.by_label("vllm:num_requests_running", "model_name")),
        seconds=new.taken - old.taken,
        running=new.value("vllm:num_requests_running"),
        waiting=new.value("vllm:num_requests_waiting"),
        swapped=new.value("longspan:num_requests_swapped"),
        rates={name: rate for name, rate in rates.items() if rate is not None},
        latency={name: found for name, found in latency.items() if found},
        cache_usage=new.value("vllm:kv_cache_usage_perc"),
        prefix_hit_rate=_ratio(old, new, "vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total"),
        model_share=_ratio(old, new, "longspan:model_seconds_total", "longspan:step_seconds_total"),
        tokens_per_step=_ratio(old, new, "vllm:iteration_tokens_total_sum", _COUNTERS["steps"]),
        arena=_arena(new),
        host_pool=_host_pool(new),
        totals=_totals(new),
    )


def quantile(share: float, old: dict[float, float], new: dict[float, float]) -> float | None:
    """Of what a histogram took in between two readings: linear within a bucket, as Prometheus does.

    None if it took in nothing. Beyond the last finite bound it is that bound: more is not known.
    """
    counts = [(bound, new[bound] - old.get(bound, 0.0)) for bound in sorted(new)]
    if not counts or counts[-1][1] <= 0:
        return None
    rank = share * counts[-1][1]
    below, lower = 0.0, 0.0
    for bound, count in counts:
        if count >= rank and count > below:
            return lower if bound == inf else lower + (bound - lower) * (rank - below) / (count - below)
        below, lower = max(below, count), bound if bound != inf else lower
    return lower


def _percentiles(old: Snapshot, new: Snapshot, name: str) -> dict[str, float]:
    before, after = old.buckets(name), new.buckets(name)
    found = {f"p{percent}": quantile(percent / 100, before, after) for percent in _PERCENTS}
    return {name: value for name, value in found.items() if value is not None}


def _growth(old: Snapshot, new: Snapshot, name: str) -> float | None:
    after = new.value(name)
    return None if after is None else after - (old.value(name) or 0.0)


def _rate(old: Snapshot, new: Snapshot, name: str) -> float | None:
    growth, seconds = _growth(old, new, name), new.taken - old.taken
    return None if growth is None or seconds <= 0 else growth / seconds


def _ratio(old: Snapshot, new: Snapshot, part: str, whole: str) -> float | None:
    parts, wholes = _growth(old, new, part), _growth(old, new, whole)
    return parts / wholes if parts is not None and wholes else None


def _restarted(old: Snapshot, new: Snapshot) -> bool:
    growths = [_growth(old, new, name) for name in _COUNTERS.values()]
    return any(growth is not None and growth < 0 for growth in growths)


def _arena(snapshot: Snapshot) -> dict[str, float]:
    total = snapshot.value("longspan:arena_total_bytes")
    if not total:
        return {}
    name = "longspan:arena_bytes"
    parts = {
        f"{kind}_{owner}": snapshot.value(name, kind=kind, owner=owner) or 0.0
        for kind in ("page", "state")
        for owner in ("running", "cached")
    }
    return {"total": total} | parts | {"free": total - sum(parts.values())}


def _host_pool(snapshot: Snapshot) -> dict[str, float]:
    total = snapshot.value("longspan:swap_total_bytes")
    return {"total": total, "used": snapshot.value("longspan:swap_bytes") or 0.0} if total else {}


def _totals(snapshot: Snapshot) -> dict[str, Any]:
    values: dict[str, Any] = {
        name: snapshot.value(counter) for name, counter in _COUNTERS.items() if name != "steps"
    }
    values["requests"] = _nonzero(snapshot.by_label(_ENDS, "finished_reason"))
    values["rejected"] = _nonzero(snapshot.by_label(_REJECTED, "reason"))
    return {name: value for name, value in values.items() if value is not None}


def _nonzero(counts: dict[str, float]) -> dict[str, float]:
    return {name: count for name, count in counts.items() if count}
