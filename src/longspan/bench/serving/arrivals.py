"""When conversations begin: a gamma process, as in `vllm bench serve`.

Gaps between arrivals are gamma distributed with shape `burstiness`: 1 is a Poisson process, less comes in
bursts, more is more even (the gaps' variance is their squared mean over the shape), infinity is a metronome.
The gaps are scaled to add up to n / rate, so that each point of a sweep offers the rate that it says; for
shape 1 that is a Poisson process of which it is known that n arrive in that time.
"""

from __future__ import annotations

import math

import numpy as np


def arrival_times(count: int, rate: float, burstiness: float, seed: int) -> list[float]:
    """Seconds from the start, ascending; the first is at 0. An infinite rate: all at 0.

    n arrivals have n - 1 gaps between them; one more stands for the time until the next would come.
    """
    if math.isinf(rate):
        return [0.0] * count
    noise = np.random.default_rng([seed, 0xA])
    gaps = np.ones(count) if math.isinf(burstiness) else noise.gamma(burstiness, size=count)
    times = np.cumsum(gaps * (count / rate / gaps.sum())) if gaps.sum() else np.zeros(count)
    return [0.0, *times[:-1].tolist()][:count]
