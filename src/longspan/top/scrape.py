"""One answer of /metrics as a `Snapshot`; what may go wrong on the way."""

from __future__ import annotations

import http.client
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from prometheus_client.parser import text_string_to_metric_families

from longspan.errors import LongspanError

_TIMEOUT = 5.0  # seconds
_MAX_BYTES = 64 * 2**20
_OURS = "vllm:num_requests_running"  # every server that can be shown has it


@dataclass(frozen=True)
class Snapshot:
    """All samples of one moment: name -> (labels, value) of each. `taken` is on `time.monotonic`'s clock."""

    samples: dict[str, list[tuple[dict[str, str], float]]]
    taken: float = field(default_factory=time.monotonic)

    def value(self, name: str, **labels: str) -> float | None:
        """The sum over all series of this name with these labels; None if there are none."""
        found = [value for own, value in self.samples.get(name, ()) if labels.items() <= own.items()]
        return sum(found) if found else None

    def by_label(self, name: str, label: str) -> dict[str, float]:
        """The sum for each value of a label; empty if there are no such series."""
        sums: dict[str, float] = {}
        for labels, value in self.samples.get(name, ()):
            if label in labels:
                sums[labels[label]] = sums.get(labels[label], 0.0) + value
        return sums

    def buckets(self, name: str) -> dict[float, float]:
        """Of a histogram: upper bound -> how many were at most that; empty if there is no such histogram."""
        return {float(bound): count for bound, count in self.by_label(f"{name}_bucket", "le").items()}


def parse(text: str) -> Snapshot:
    """Raises LongspanError for what are no metrics that can be shown."""
    samples: dict[str, list[tuple[dict[str, str], float]]] = {}
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                samples.setdefault(sample.name, []).append((sample.labels, sample.value))
    except (ValueError, IndexError, KeyError):
        samples = {}
    if _OURS not in samples:
        raise LongspanError(
            "The answer has no metrics of Longspan or vLLM.", remedy=f"One of theirs is {_OURS}."
        )
    return Snapshot(samples)


class Source:
    """A server's /metrics."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        """`url` may leave out http:// and may end with /v1 or /metrics. Raises LongspanError."""
        self.url = _base(url)
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._request = urllib.request.Request(f"{self.url}/metrics", headers=headers)

    def read(self) -> Snapshot:
        """Raises LongspanError if nothing answers, or with something else."""
        try:
            with urllib.request.urlopen(self._request, timeout=_TIMEOUT) as response:
                raw = response.read(_MAX_BYTES)
        except urllib.error.HTTPError as error:
            raise _refused(self.url, error) from error
        except (OSError, http.client.HTTPException, ValueError) as error:
            reason: Any = getattr(error, "reason", None) or error
            raise LongspanError(
                f"Nothing answers at {self.url}: {reason}.",
                remedy="Start a server with `longspan serve`, or give the address of one.",
            ) from error
        return parse(raw.decode(errors="replace"))


def _refused(url: str, error: urllib.error.HTTPError) -> LongspanError:
    if error.code in (401, 403):
        return LongspanError(f"{url} wants a key (HTTP {error.code}).", remedy="Give it with --api-key.")
    if error.code == 404:
        return LongspanError(f"{url} has no /metrics.", remedy="Its flags or its version may be why.")
    return LongspanError(f"{url}/metrics answers with HTTP {error.code} {error.reason}.")


def _base(url: str) -> str:
    full = url if "://" in url else f"http://{url}"
    try:
        parts = urlsplit(full)
        legal = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        legal = False
    if not legal or not full.isprintable() or " " in full:
        raise LongspanError(f"{url!r} is no address.", remedy="Give one like http://127.0.0.1:8000.")
    for ending in ("/", "/metrics", "/v1", "/"):
        full = full.removesuffix(ending)
    return full
