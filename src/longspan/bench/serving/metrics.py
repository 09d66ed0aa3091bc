"""What the records say. Seconds, of requests that were answered in full.

    ttft        first chunk - scheduled                     (ttft_sent: - sent)
    e2el        last chunk - scheduled                      (e2el_sent: - sent)
    wait        sent - scheduled: time that the client held the request back
    tpot        (last chunk - first) / (output tokens - 1)  one value a request, of two tokens or more
    itl         gaps between chunks                         one value a gap; 0 where two were read together

"Last chunk" is the last event with a choice, "first" the first with text; an answer without text has only its
end. Scheduled is when an open loop meant to send; in a closed loop it is when the user was free to. The point
lasts from its start to its last answer. Goodput counts requests whose every named metric is within its limit;
a request without the metric (tpot of one token) can't fail it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from longspan.bench.serving.run import Record

LATENCIES = ("ttft", "tpot", "itl", "e2el", "wait", "ttft_sent", "e2el_sent")
LIMITED = ("ttft", "tpot", "e2el")  # metrics with one value a request


@dataclass(frozen=True)
class Distribution:
    """Of no values: all 0, count 0."""

    count: int
    mean: float
    median: float
    std: float
    min: float
    max: float
    percentiles: Mapping[float, float]


@dataclass(frozen=True)
class Summary:
    """`planned` requests, of which those after a failed turn were never sent. Rates are per second."""

    planned: int
    completed: int
    errors: Mapping[str, int]
    duration: float
    prompt_tokens: int
    output_tokens: int
    request_rate: float
    output_rate: float
    total_rate: float
    goodput: float | None
    hit_rate: float | None  # cached over prompt tokens, as usage says
    peak_concurrency: int
    latencies: Mapping[str, Distribution]


def summarise(
    records: Sequence[Record],
    planned: int,
    percentiles: Sequence[float],
    limits: Mapping[str, float] | None = None,
) -> Summary:
    """`limits`: seconds by metric, for goodput."""
    done = [record for record in records if record.error is None]
    duration = max((record.ended for record in records), default=0.0)
    prompt = sum(record.prompt_tokens or 0 for record in done)
    output = sum(record.output_tokens for record in done)
    per_second = 1 / duration if duration else 0.0
    good = sum(_is_good(record, limits) for record in done) * per_second if limits else None
    return Summary(
        planned=planned,
        completed=len(done),
        errors=dict(Counter(record.error for record in records if record.error).most_common()),
        duration=duration,
        prompt_tokens=prompt,
        output_tokens=output,
        request_rate=len(done) * per_second,
        output_rate=output * per_second,
        total_rate=(prompt + output) * per_second,
        goodput=good,
        hit_rate=_hit_rate(done),
        peak_concurrency=peak_concurrency(records),
        latencies={
            name: distribution([value for record in done for value in latency(record, name)], percentiles)
            for name in LATENCIES
        },
    )


def latency(record: Record, name: str) -> list[float]:
    """The values that one answered request adds to a metric."""
    first = record.chunks[0] if record.chunks else record.ended
    match name:
        case "ttft":
            return [first - record.scheduled]
        case "ttft_sent":
            return [first - record.sent]
        case "e2el":
            return [record.ended - record.scheduled]
        case "e2el_sent":
            return [record.ended - record.sent]
        case "wait":
            return [record.sent - record.scheduled]
        case "tpot":
            further = record.output_tokens - 1
            return [(record.ended - first) / further] if further > 0 else []
        case "itl":
            return [later - earlier for earlier, later in pairwise(record.chunks)]
    raise ValueError(name)


def distribution(values: Sequence[float], percentiles: Sequence[float]) -> Distribution:
    """Percentiles are interpolated linearly between the two nearest values."""
    if not values:
        return Distribution(0, 0.0, 0.0, 0.0, 0.0, 0.0, dict.fromkeys(percentiles, 0.0))
    array = np.asarray(values)
    return Distribution(
        count=len(values),
        mean=float(array.mean()),
        median=float(np.median(array)),
        std=float(array.std()),
        min=float(array.min()),
        max=float(array.max()),
        percentiles={p: float(np.percentile(array, p)) for p in percentiles},
    )


def peak_concurrency(records: Sequence[Record]) -> int:
    """Most requests under way at once; one that ends when another is sent has made room for it."""
    changes = [(record.sent, 1) for record in records] + [(record.ended, -1) for record in records]
    running = peak = 0
    for _, change in sorted(changes):
        running += change
        peak = max(peak, running)
    return peak


def _is_good(record: Record, limits: Mapping[str, float]) -> bool:
    return all(value <= limit for name, limit in limits.items() for value in latency(record, name))


def _hit_rate(done: Sequence[Record]) -> float | None:
    counted = [record for record in done if record.cached_tokens is not None and record.prompt_tokens]
    if not counted:
        return None
    return sum(record.cached_tokens or 0 for record in counted) / sum(r.prompt_tokens or 0 for r in counted)
