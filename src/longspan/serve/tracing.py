"""OpenTelemetry: a span for each request, with the attributes of the GenAI conventions and our times.

Attributes of time are vLLM's (`gen_ai.latency.*`, seconds). A W3C `traceparent` makes the span a child of
its sender's, who also decides whether it is recorded. Spans are made when a request is over and sent in
batches by a thread of the SDK, so a slow collector keeps nobody waiting. Texts are never part of a span.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from longspan import __version__
from longspan.errors import CapacityError
from longspan.serve.record import Record

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor

_HEADERS = ("traceparent", "tracestate")
_EXPORT_SECONDS = 5  # that sending a batch may take, the last one at shutdown too
_TEXT_ROUTES = ("/v1/completions", "/generate")


class Tracing:
    """Makes spans of records and hands them to a processor."""

    def __init__(self, model: str, processor: SpanProcessor) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider

        name = os.environ.get("OTEL_SERVICE_NAME") or "longspan"
        resource = Resource.create({"service.name": name, "service.version": __version__})
        self._model = model
        self._provider = TracerProvider(resource=resource)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("longspan", __version__)

    @classmethod
    def to_endpoint(cls, model: str, url: str) -> Tracing:
        """Sends to a collector by OTLP over HTTP. Raises CapacityError for a bad URL or missing packages."""
        endpoint = _endpoint(url)
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError as error:
            raise CapacityError(
                f"--otlp-traces-endpoint needs packages that are not installed: {error}.",
                remedy="Install them: pip install 'longspan[otel]'.",
            ) from error
        logging.getLogger("opentelemetry.exporter").setLevel(logging.ERROR)  # each retry is no news
        return cls(model, BatchSpanProcessor(OTLPSpanExporter(endpoint, timeout=_EXPORT_SECONDS)))

    def trace(self, record: Record, headers: Mapping[str, str]) -> str | None:
        """One span for a request that is over. Returns its trace id, None if the caller wants no trace."""
        from opentelemetry.trace import SpanKind, Status, StatusCode
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        given = {name: headers[name] for name in _HEADERS if name in headers}
        operation = "text_completion" if record.route in _TEXT_ROUTES else "chat"
        name = f"{operation} {self._model}" if record.meters else f"{record.method} {record.route}"
        end = time.time_ns() - _nanoseconds(time.monotonic() - record.ended)
        span = self._tracer.start_span(
            name,
            context=TraceContextTextMapPropagator().extract(given),
            kind=SpanKind.SERVER,
            start_time=end - _nanoseconds(record.seconds),
        )
        if not span.is_recording():
            return None
        span.set_attributes(_http_attributes(record))
        if record.meters:
            span.set_attributes({"gen_ai.operation.name": operation} | _attributes(record, self._model))
        if record.error is not None or record.status >= 500:
            span.set_status(Status(StatusCode.ERROR))
        span.end(end_time=end)
        return f"{span.get_span_context().trace_id:032x}"

    def close(self) -> None:
        """Sends what is left."""
        self._provider.shutdown()


def _http_attributes(record: Record) -> dict[str, Any]:
    attributes: dict[str, Any] = {
        "http.request.method": record.method,
        "http.route": record.route,
        "http.response.status_code": record.status,
    }
    if record.error is not None:
        attributes["error.type"] = type(record.error).__name__
    elif record.status >= 400:
        attributes["error.type"] = str(record.status)
    return attributes


def _attributes(record: Record, model: str) -> dict[str, Any]:
    params = record.meters[0].request.params
    values: dict[str, Any] = {
        "gen_ai.provider.name": "longspan",
        "gen_ai.request.model": model,
        "gen_ai.response.model": model,
        "gen_ai.response.id": record.request_id,
        "gen_ai.request.choice.count": params.n,
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.temperature": float(params.temperature),
        "gen_ai.request.top_p": float(params.top_p),
        "gen_ai.request.top_k": params.top_k or None,
        "gen_ai.request.frequency_penalty": params.frequency_penalty or None,
        "gen_ai.request.presence_penalty": params.presence_penalty or None,
        "gen_ai.request.seed": params.seed if params.seed is None or params.seed < 2**63 else None,
        "gen_ai.response.finish_reasons": record.finish_reasons or None,
        "gen_ai.usage.input_tokens": record.prompt_tokens,
        "gen_ai.usage.output_tokens": record.output_tokens,
        "gen_ai.usage.cache_read.input_tokens": record.cached_tokens,
        "gen_ai.latency.e2e": record.seconds,
        "gen_ai.latency.time_to_first_token": record.seconds_to_first_token,
    }
    times = record.times
    if times is not None and times.scheduled is not None:
        values["gen_ai.latency.time_in_queue"] = times.scheduled - times.arrived
        values["gen_ai.latency.time_in_model_inference"] = times.finished - times.scheduled
        if times.first_token is not None:
            values["gen_ai.latency.time_in_model_prefill"] = times.first_token - times.scheduled
            values["gen_ai.latency.time_in_model_decode"] = times.finished - times.first_token
    return {name: value for name, value in values.items() if value is not None}


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)


def _endpoint(url: str) -> str:
    """The URL that spans are posted to. Raises CapacityError."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise CapacityError(
            f"--otlp-traces-endpoint is {url!r}.",
            remedy="Give the HTTP address of a collector, such as http://127.0.0.1:4318/v1/traces.",
        )
    return url if parts.path.strip("/") else f"{url.rstrip('/')}/v1/traces"
