"""Memory, files, threads, metrics and health of a server, looked at from a thread while others work."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import httpx

from soak.server import Server, Usage

METRICS = {
    "running": "vllm:num_requests_running",
    "waiting": "vllm:num_requests_waiting",
    "cache usage": "vllm:kv_cache_usage_perc",
    "swapped": "longspan:num_requests_swapped",
    "host pool": "longspan:swap_bytes",
}
_RUNNING = 'owner="running"'  # of the arena's bytes, pages and states
COUNTERS = {
    "preemptions": "vllm:num_preemptions_total",
    "prompt tokens": "vllm:prompt_tokens_total",
    "generated tokens": "vllm:generation_tokens_total",
    "prefix cache hits (tokens)": "vllm:prefix_cache_hits_total",
    "prefix cache queries (tokens)": "vllm:prefix_cache_queries_total",
    "evictions": "longspan:evictions_total",
    "swaps": "longspan:swaps_total",
}


@dataclass(frozen=True)
class Sample:
    """A moment. Metrics are missing while the server does not answer."""

    seconds: float
    usage: Usage
    metrics: dict[str, float]


@dataclass
class Monitor:
    """Samples until the block ends."""

    server: Server
    period: float = 2.0
    samples: list[Sample] = field(default_factory=list)
    health_seconds: list[float] = field(default_factory=list)
    unhealthy: int = 0  # health checks that were answered by anything but 200, or not at all

    def __enter__(self) -> Monitor:
        self._start = time.monotonic()
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=work) for work in (self._sample, self._probe)]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _sample(self) -> None:
        while True:
            metrics: dict[str, float] = {}
            with suppress(httpx.HTTPError):
                metrics = self.server.metrics()
            seconds = time.monotonic() - self._start
            self.samples.append(Sample(seconds, self.server.usage(), metrics))
            if self._stop.wait(self.period):
                return

    def _probe(self) -> None:
        with httpx.Client(base_url=self.server.url, timeout=60) as client:
            while not self._stop.wait(0.2):
                start = time.monotonic()
                try:
                    healthy = client.get("/health").status_code == 200
                except httpx.HTTPError:
                    healthy = False
                self.health_seconds.append(time.monotonic() - start)
                self.unhealthy += not healthy

    def rss_growth(self) -> int:
        """Bytes by which the memory in the last tenth exceeds that just after the middle."""
        rss = [sample.usage.rss_bytes for sample in self.samples]
        tenth = max(len(rss) // 10, 1)
        middle = len(rss) // 2
        return int(statistics.median(rss[-tenth:]) - statistics.median(rss[middle : middle + tenth]))


def wait_until_idle(server: Server, seconds: float = 60) -> list[str]:
    """What is still held after so long; nothing if all is back."""
    held: list[str] = []
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        metrics = server.metrics()
        held = [f"{what} is {metrics[name]}" for what, name in METRICS.items() if metrics.get(name)]
        held += [f"{name} is {value}" for name, value in metrics.items() if value and _RUNNING in name]
        if not held:
            return []
        time.sleep(0.1)
    return held


def settled(server: Server, seconds: float = 20) -> Usage:
    """What the server holds once its open files have not changed for two seconds, or after so long."""
    end = time.monotonic() + seconds
    usage, since = server.usage(), time.monotonic()
    while time.monotonic() < min(since + 2, end):
        time.sleep(0.1)
        now = server.usage()
        if now.files != usage.files:
            since = time.monotonic()
        usage = now
    return usage


def percentile(values: Sequence[float], share: float) -> float:
    """0 of nothing."""
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)] if ordered else 0.0
