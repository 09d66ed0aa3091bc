"""The HTTP application: routes, and what stands before them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from longspan import __version__
from longspan.serve.chat import CHATS
from longspan.serve.completions import COMPLETIONS
from longspan.serve.failures import REQUEST_ID, install_handlers
from longspan.serve.gate import Gate
from longspan.serve.generate import GENERATE
from longspan.serve.messages import MESSAGES
from longspan.serve.openapi import describe
from longspan.serve.page import add_page_routes
from longspan.serve.responses import RESPONSES
from longspan.serve.route import add_route
from longspan.serve.service import Service
from longspan.serve.sight import Sight
from longspan.serve.state import add_state_routes
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
    describe(app)
    install_handlers(app)
    options = service.options
    app.add_middleware(
        Gate, api_key=options.api_key, max_body_bytes=options.max_body_bytes, draining=draining
    )
    if options.allowed_origins:
        # Before the gate: a browser's preflight has no key, and it may read what the gate refuses.
        app.add_middleware(
            CORSMiddleware,
            allow_origins=options.allowed_origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=[REQUEST_ID],
        )
    app.add_middleware(Sight, metrics=service.metrics, tracing=tracing)  # the last is the outermost
    for route in (CHATS, COMPLETIONS, RESPONSES, MESSAGES, GENERATE):
        add_route(app, service, route)
    add_token_routes(app, service)
    add_state_routes(app, service, draining)
    add_page_routes(app)
    return app
