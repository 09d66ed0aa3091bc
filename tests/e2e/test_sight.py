"""Logs, traces and `longspan top` of a real server in processes of its own."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import httpx
from support.collector import Collector, collecting
from support.subprocess_server import COMMAND, server_process

TEXT = "/v1/completions"
IDS = ["first", "second"]


def spans(collector: Collector) -> list[str]:
    resources = [resource for _, request in collector.got for resource in request.resource_spans]
    return [span.name for resource in resources for scope in resource.scope_spans for span in scope.spans]


def test_each_request_is_a_line_and_a_span_and_top_shows_it(random_dir: Path) -> None:
    flags = ["--log-level", "info", "--log-format", "json", "--access-log"]
    with (
        collecting() as collector,
        server_process(random_dir, *flags, "--otlp-traces-endpoint", collector.url) as server,
    ):
        cached = []
        for name in IDS:
            body = {"prompt": [5] * 300, "max_tokens": 3, "ignore_eos": True}
            answer = server.post(TEXT, body, headers={"X-Request-Id": name})
            cached.append(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])
        assert cached[0] == 0 < cached[1]
        assert httpx.get(f"{server.url}/health").status_code == 200
        _check_top(server.url)
        for metric in ("prompt_tokens_cached_total", "prefix_cache_hits_total"):
            assert server.metric(metric) == cached[1]
        assert server.metric("prefix_cache_queries_total") == 600
        assert server.metric("iteration_tokens_total_sum") == 600 - cached[1] + 2 * (3 - 1)
        code, errors = server.stop()
    assert code == 0
    lines = [json.loads(line) for line in errors.splitlines()]
    requests = [line for line in lines if line["logger"] == "longspan.requests"]
    assert [(line["id"], line["output_tokens"], line["finish"]) for line in requests] == [
        (name, 3, ["length"]) for name in IDS
    ]
    assert [line["cached_tokens"] for line in requests] == cached
    assert all(len(line["trace_id"]) == 32 for line in requests)
    access = [line["message"] for line in lines if line["logger"] == "uvicorn.access"]
    assert sum(f"POST {TEXT} " in message for message in access) == 2
    assert any("GET /health " in message for message in access)
    assert len(lines) == len(requests) + len(access), "and nothing else"
    assert spans(collector) == ["text_completion random"] * 2


def _check_top(url: str) -> None:
    command = [*COMMAND, "top", url, "--once", "--json", "--interval", "0.1"]
    top = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    shown = json.loads(top.stdout)
    assert (shown["models"], shown["totals"]["requests"]) == (["random"], {"length": 2})
    arena = shown["arena"]
    assert arena["page_running"] == arena["state_running"] == 0 < arena["page_cached"]
    assert 0 < arena["state_cached"] < arena["total"]
    parts = sum(size for kind, size in arena.items() if kind != "total")
    assert parts == arena["total"]
