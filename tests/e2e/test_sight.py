"""Logs, traces and `longspan top` of a real server in processes of its own."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import httpx
from support.collector import Collector, collecting
from support.subprocess_server import COMMAND, server_process

TEXT = "/v1/completions"


def spans(collector: Collector) -> list[str]:
    resources = [resource for _, request in collector.got for resource in request.resource_spans]
    return [span.name for resource in resources for scope in resource.scope_spans for span in scope.spans]


def test_each_request_is_a_line_and_a_span_and_top_shows_it(random_dir: Path) -> None:
    flags = ["--log-level", "info", "--log-format", "json", "--access-log"]
    with (
        collecting() as collector,
        server_process(random_dir, *flags, "--otlp-traces-endpoint", collector.url) as server,
    ):
        ids = ["first", "second"]
        for name in ids:
            body = {"prompt": "x", "max_tokens": 3, "ignore_eos": True}
            assert server.post(TEXT, body, headers={"X-Request-Id": name}).status_code == 200
        assert httpx.get(f"{server.url}/health").status_code == 200
        top = subprocess.run(
            [*COMMAND, "top", server.url, "--once", "--json", "--interval", "0.1"],
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
        )
        shown = json.loads(top.stdout)
        assert (shown["models"], shown["totals"]["requests"]) == (["random"], {"length": 2})
        code, errors = server.stop()
    assert code == 0
    lines = [json.loads(line) for line in errors.splitlines()]
    requests = [line for line in lines if line["logger"] == "longspan.requests"]
    assert [(line["id"], line["output_tokens"], line["finish"]) for line in requests] == [
        (name, 3, ["length"]) for name in ids
    ]
    assert all(len(line["trace_id"]) == 32 for line in requests)
    access = [line["message"] for line in lines if line["logger"] == "uvicorn.access"]
    assert sum(f"POST {TEXT} " in message for message in access) == 2
    assert any("GET /health " in message for message in access)
    assert len(lines) == len(requests) + len(access), "and nothing else"
    assert spans(collector) == ["text_completion random"] * 2
