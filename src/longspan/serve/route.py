"""What all routes that generate do alike: read the body, prepare, then answer at once or as a stream."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from fastapi import FastAPI, Request, Response

from longspan.serve.body import Body, parse_body
from longspan.serve.delivery import EventStream, unless_disconnected
from longspan.serve.json_text import JsonResponse
from longspan.serve.openapi import body_schema
from longspan.serve.service import Service

AnyBody = TypeVar("AnyBody", bound=Body)
Call = TypeVar("Call")


@dataclass(frozen=True)
class Generation(Generic[AnyBody, Call]):
    """One route. `prepare` gets the request's id; it refuses what can be refused before any work is done."""

    path: str
    body: type[AnyBody]
    prepare: Callable[[Service, AnyBody, str], Call]
    complete: Callable[[Service, Call], Awaitable[Any]]
    stream: Callable[[Service, Call], Awaitable[EventStream]]


def add_route(app: FastAPI, service: Service, route: Generation) -> None:
    # Reading, rendering and encoding a long chat takes seconds, so a thread does it: the event loop never
    # waits.

    def prepared(raw: bytes, request_id: str) -> tuple[bool, Any]:
        body = parse_body(raw, route.body)
        return body.stream, route.prepare(service, body, request_id)

    @app.post(route.path, openapi_extra=takes(route.body))
    async def generate(request: Request) -> Response:
        raw = await request.body()

        async def answer() -> Response:
            stream, call = await asyncio.to_thread(prepared, raw, request.state.request_id)
            if stream:
                return await route.stream(service, call)
            return JsonResponse(await route.complete(service, call))

        return await unless_disconnected(request.receive, answer())


def takes(kind: type[Body]) -> dict[str, Any]:
    """The body of a route for /openapi.json: it is parsed by us, so FastAPI doesn't know it."""
    content = {"application/json": {"schema": body_schema(kind)}}
    return {"requestBody": {"content": content, "required": True}}
