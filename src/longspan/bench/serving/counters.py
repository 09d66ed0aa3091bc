"""The server's own counters, before and after: Prometheus text of vLLM (and ours), SGLang and llama.cpp.

A cache hit rate is hits over queries, in tokens; a server without such counters has none.
"""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client.parser import text_string_to_metric_families

_PREFIXES = ("vllm:", "sglang:", "llamacpp:")
_HITS_OF_QUERIES = (
    ("vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total"),
    ("sglang:cached_tokens_total", "sglang:prompt_tokens_total"),
)


def read_counters(text: str | None) -> dict[str, float]:
    """Each counter of a known server by name, summed over labels. Empty for what is no such text."""
    sums: dict[str, float] = {}
    try:
        for family in text_string_to_metric_families(text or ""):
            if family.type == "counter" and family.name.startswith(_PREFIXES):
                for sample in family.samples:
                    if not sample.name.endswith("_created"):
                        sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
    except ValueError:
        return {}
    return sums


def grown(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """What each counter grew by; a counter that fell belongs to a server that was started anew."""
    return {
        name: value - before.get(name, 0.0) for name, value in after.items() if value >= before.get(name, 0)
    }


def hit_rate(counters: Mapping[str, float]) -> float | None:
    for hits, queries in _HITS_OF_QUERIES:
        if counters.get(queries) and hits in counters:
            return counters[hits] / counters[queries]
    return None
