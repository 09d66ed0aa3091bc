"""Spans of requests, as an exporter and as a collector gets them."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode
from support.collector import collecting
from support.scripted import Reciter, Running, ScriptedModel, running_server

from longspan.chat import Tokenizer
from longspan.errors import CapacityError
from longspan.serve.tracing import Tracing

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def traced(tokenizer: Tokenizer, exporter: InMemorySpanExporter) -> Iterator[Running]:
    tracing = Tracing("tiny", SimpleSpanProcessor(exporter))
    model = ScriptedModel(tokenizer, Reciter(tokenizer))
    with running_server(model, tokenizer, tracing=tracing) as server:
        yield server


def spans(server: Running, exporter: InMemorySpanExporter) -> list[ReadableSpan]:
    """All of them; the server has come to its end."""
    server.server.should_exit = True
    while server.service.engine.healthy:
        time.sleep(0.005)
    return list(exporter.get_finished_spans())


def attributes(span: ReadableSpan) -> Mapping[str, Any]:
    return span.attributes or {}


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_is_a_span_with_its_numbers_and_times(
    traced: Running, exporter: InMemorySpanExporter, stream: bool
) -> None:
    length = traced.say("Fine.") + 1
    body = {"prompt": [1, 2, 3], "n": 2, "temperature": 0.5, "max_tokens": 30, "seed": 7, "stream": stream}
    answer = traced.post(TEXT, body)
    (span,) = spans(traced, exporter)
    assert span.name == "text_completion tiny" and span.kind is SpanKind.SERVER
    found = dict(attributes(span))
    times = {name: found.pop(name) for name in list(found) if name.startswith("gen_ai.latency.")}
    assert found.pop("gen_ai.response.id") == answer.headers["X-Request-Id"]
    assert found == {
        "http.request.method": "POST",
        "http.route": TEXT,
        "http.response.status_code": 200,
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "longspan",
        "gen_ai.request.model": "tiny",
        "gen_ai.response.model": "tiny",
        "gen_ai.request.choice.count": 2,
        "gen_ai.request.max_tokens": 30,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.request.seed": 7,
        "gen_ai.response.finish_reasons": ("stop", "stop"),
        "gen_ai.usage.input_tokens": 3,
        "gen_ai.usage.output_tokens": 2 * length,
        "gen_ai.usage.cache_read.input_tokens": 0,
    }
    queue, prefill, decode, inference = (
        times[f"gen_ai.latency.time_in_{part}"]
        for part in ("queue", "model_prefill", "model_decode", "model_inference")
    )
    assert prefill + decode == pytest.approx(inference)
    assert 0 <= queue + inference <= times["gen_ai.latency.e2e"]
    assert span.end_time and span.start_time
    assert span.end_time - span.start_time == pytest.approx(times["gen_ai.latency.e2e"] * 1e9, abs=1000)


def test_a_traceparent_is_honoured_and_its_wish_not_to_be_traced_too(
    traced: Running, exporter: InMemorySpanExporter
) -> None:
    traced.say("Fine.")
    for header in (f"00-{TRACE}-{PARENT}-01", f"00-{TRACE}-{PARENT}-00", "no such thing"):
        message = {"role": "user", "content": "x"}
        traced.post(CHAT, {"messages": [message]}, headers={"traceparent": header, "tracestate": "a=1"})
    child, other = spans(traced, exporter)
    assert child.name == "chat tiny" and child.parent and child.context
    assert (f"{child.context.trace_id:032x}", f"{child.parent.span_id:016x}") == (TRACE, PARENT)
    assert child.context.trace_state.get("a") == "1"
    assert other.parent is None


def test_refusals_and_failures_are_marked(traced: Running, exporter: InMemorySpanExporter) -> None:
    def fail() -> None:
        traced.model.before_step = lambda: None
        raise RuntimeError("broken kernel")

    traced.post(TEXT, {"prompt": ""})
    traced.model.before_step = fail
    traced.post(TEXT, {"prompt": "x", "stream": True})
    traced.get("/health")
    refused, failed = spans(traced, exporter)
    assert (refused.name, attributes(refused)["error.type"]) == (f"POST {TEXT}", "400")
    assert refused.status.status_code is StatusCode.UNSET, "the mistake was the caller's"
    assert attributes(failed)["error.type"] == "LongspanError"
    assert failed.status.status_code is StatusCode.ERROR


@pytest.mark.parametrize("path", ["", "/", "/v1/traces", "/elsewhere"])
def test_a_collector_gets_all_spans_before_the_server_is_gone(tokenizer: Tokenizer, path: str) -> None:
    model = ScriptedModel(tokenizer, Reciter(tokenizer))
    with collecting() as collector:
        tracing = Tracing.to_endpoint("tiny", collector.url + path)
        with running_server(model, tokenizer, tracing=tracing) as server:
            server.say("Fine.")
            server.post(TEXT, {"prompt": "x"})
            server.post(TEXT, {"prompt": "y"})
    assert {where for where, _ in collector.got} == {path.rstrip("/") or "/v1/traces"}
    resources = [resource for _, request in collector.got for resource in request.resource_spans]
    names = [
        a.value.string_value for r in resources for a in r.resource.attributes if a.key == "service.name"
    ]
    assert set(names) == {"longspan"}
    found = [span for resource in resources for scope in resource.scope_spans for span in scope.spans]
    assert [span.name for span in found] == ["text_completion tiny"] * 2


@pytest.mark.parametrize("url", ["", "127.0.0.1:4317", "grpc://x:4317", "http://"])
def test_what_is_no_http_address_is_refused(url: str) -> None:
    with pytest.raises(CapacityError, match="otlp-traces-endpoint"):
        Tracing.to_endpoint("tiny", url)


def test_missing_packages_are_told_with_the_command_that_brings_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(CapacityError, match=r"pip install 'longspan\[otel\]'"):
        Tracing.to_endpoint("tiny", "http://127.0.0.1:4318")
