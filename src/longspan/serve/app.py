"""The HTTP application: routes, and what stands before them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST

from longspan import __version__
from longspan.serve.chat import CHATS
from longspan.serve.completions import COMPLETIONS
from longspan.serve.failures import failure, install_handlers
from longspan.serve.gate import Gate
from longspan.serve.messages import MESSAGES
from longspan.serve.page import add_page_routes
from longspan.serve.responses import RESPONSES
from longspan.serve.route import add_route
from longspan.serve.service import Service
from longspan.serve.sight import Sight
from longspan.serve.tokens import add_token_routes
from longspan.serve.tracing import Tracing


def create_app(
    service: Service, draining: Callable[[], bool] = lambda: False, tracing: Tracing | None = None
) -> FastAPI:
    """All routes over one engine. `draining()`: the server was told to stop, so new work is refused."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await service.engine.start()
        yield
        await service.engine.shutdown()
        if tracing is not None:
            await asyncio.to_thread(tracing.close)

    app = FastAPI(title="Longspan", version=__version__, lifespan=lifespan)
    install_handlers(app)
    options = service.options
    app.add_middleware(
        Gate, api_key=options.api_key, max_body_bytes=options.max_body_bytes, draining=draining
    )
    app.add_middleware(Sight, metrics=service.metrics, tracing=tracing)  # the last is the outermost
    _add_generation_routes(app, service)
    add_token_routes(app, service)
    _add_state_routes(app, service, draining)
    add_page_routes(app)
    return app


def _add_generation_routes(app: FastAPI, service: Service) -> None:
    for route in (CHATS, COMPLETIONS, RESPONSES, MESSAGES):
        add_route(app, service, route)


def _add_state_routes(app: FastAPI, service: Service, draining: Callable[[], bool]) -> None:
    started = int(time.time())

    def card(name: str) -> dict[str, Any]:
        root = service.options.served_model_names[0]
        length = service.engine.max_model_len
        return {"id": name, "object": "model", "created": started, "owned_by": "longspan", "root": root,
                "max_model_len": length}  # fmt: skip

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [card(name) for name in service.options.served_model_names]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        return card(service.model_name(name))

    @app.get("/health")
    @app.head("/health", include_in_schema=False)
    async def health(request: Request) -> Response:
        if draining():
            return failure(request, 503, "The server is shutting down.")
        if refusal := service.engine.refusal:
            return failure(request, 503, str(refusal))
        return Response(status_code=200)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(service.metrics.render(), media_type=CONTENT_TYPE_LATEST)

    @app.get("/version")
    async def version() -> dict[str, str]:
        return {"version": __version__}
