"""Routes that look at the server or steer it: models, health, load, metrics, and SGLang's for its tools."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any, ClassVar

from fastapi import FastAPI, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST

from longspan import __version__
from longspan.serve.body import Body, Refused, illegal, parse_body
from longspan.serve.failures import failure
from longspan.serve.route import takes
from longspan.serve.service import Service


def add_state_routes(app: FastAPI, service: Service, draining: Callable[[], bool]) -> None:
    started = int(time.time())
    options = service.options

    def card(name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": started,
            "owned_by": "longspan",
            "root": options.served_model_names[0],
            "parent": None,
            "max_model_len": service.engine.max_model_len,
        }

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [card(name) for name in options.served_model_names]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        return card(service.model_name(name))

    async def health(request: Request) -> Response:
        if draining():
            return failure(request, 503, "The server is shutting down.")
        if refusal := service.engine.refusal:
            return failure(request, 503, str(refusal))
        return Response(status_code=200)

    app.get("/health")(health)
    app.head("/health", include_in_schema=False)(health)
    app.get("/ping")(health)
    app.post("/ping", include_in_schema=False)(health)

    @app.get("/load")
    async def load() -> dict[str, int]:
        stats = service.engine.stats
        return {"server_load": stats.num_running + stats.num_waiting}

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(service.metrics.render(), media_type=CONTENT_TYPE_LATEST)

    @app.get("/version")
    async def version() -> dict[str, str]:
        return {"version": __version__}

    _add_sglang_routes(app, service)


class AbortRequest(Body):
    """POST /abort_request."""

    refused: ClassVar[dict[str, Refused]] = {}
    rid: str | None = None
    abort_all: bool = False


def _add_sglang_routes(app: FastAPI, service: Service) -> None:
    name = service.options.served_model_names[0]
    path = service.options.model_path or name

    async def health_generate() -> Response:
        await service.probe()
        return Response(status_code=200)

    app.get("/health_generate")(health_generate)
    app.post("/health_generate", include_in_schema=False)(health_generate)

    async def model_info() -> dict[str, Any]:
        return {
            "model_path": path,
            "tokenizer_path": path,
            "served_model_name": name,
            "is_generation": True,
            "max_model_len": service.engine.max_model_len,
        }

    app.get("/model_info")(model_info)
    app.get("/get_model_info", include_in_schema=False)(model_info)

    async def server_info() -> dict[str, Any]:
        plan, stats = service.engine.plan, service.engine.stats
        return {
            "model_path": path,
            "tokenizer_path": path,
            "served_model_name": name,
            "version": __version__,
            "status": "ready",
            "context_length": plan.max_model_len,
            "max_total_num_tokens": plan.num_slabs * plan.pages_per_slab * plan.page_size,
            "max_running_requests": plan.max_num_seqs,
            "page_size": plan.page_size,
            "dp_size": 1,
            "tp_size": 1,
            "disaggregation_mode": "null",
            "internal_states": [dataclasses.asdict(stats)],
        }

    app.get("/server_info")(server_info)
    app.get("/get_server_info", include_in_schema=False)(server_info)

    async def flush_cache() -> Response:
        count = await service.engine.flush_cache()
        return Response(f"Flushed the prefix cache: {count} checkpoints.\n", media_type="text/plain")

    app.post("/flush_cache")(flush_cache)
    app.get("/flush_cache", include_in_schema=False)(flush_cache)

    @app.post("/abort_request", openapi_extra=takes(AbortRequest))
    async def abort_request(request: Request) -> dict[str, int]:
        body = parse_body(await request.body(), AbortRequest)
        if (body.rid is None) != body.abort_all:
            raise illegal("rid", body.rid, 'the id of a request; or leave it out and send "abort_all": true')
        return {"aborted": service.abort(body.rid)}
