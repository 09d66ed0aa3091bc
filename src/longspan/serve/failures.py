"""Every failure in OpenAI's error shape: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

import logging
from typing import Any

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from longspan.errors import CheckpointError, LongspanError, OverloadedError, RequestError
from longspan.serve.json_text import JsonResponse

logger = logging.getLogger("longspan.serve")

MAX_MESSAGE = 2000  # characters
_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}


class UnknownModelError(RequestError):
    """The request names a model that is not served here (HTTP 404)."""


class ClientGoneError(Exception):
    """The client closed its connection; nobody is left to answer."""


class QueueFullError(OverloadedError):
    """As many requests wait as the operator allows (HTTP 429); trying again later helps."""


def status_of(error: Exception) -> int:
    """HTTP status of an error: 4xx is the caller's to mend, 429 and 503 pass with time, 500 is ours."""
    if isinstance(error, UnknownModelError):
        return 404
    if isinstance(error, RequestError | CheckpointError):
        return 400  # the checkpoint can't do what is asked, such as chatting without chat tokens
    if isinstance(error, QueueFullError):
        return 429
    if isinstance(error, OverloadedError):
        return 503
    return 500


def error_body(error: Exception) -> dict[str, Any]:
    """The error object for a response body or an event of a stream."""
    message = str(error) if isinstance(error, LongspanError) else "The server failed; its log says why."
    return error_object(status_of(error), message, getattr(error, "param", None))


def error_object(status: int, message: str, param: str | None = None) -> dict[str, Any]:
    if len(message) > MAX_MESSAGE:  # it may quote what was sent
        half = MAX_MESSAGE // 2
        message = f"{message[:half]} ... {message[-half:]}"
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": status}}


def error_response(error: Exception) -> JsonResponse:
    status = status_of(error)
    if status >= 500:
        logger.error("a request failed: %s", error)
    headers = {"Retry-After": "1"} if status in (429, 503) else None
    return JsonResponse(error_body(error), status, headers)


def install_handlers(app: FastAPI) -> None:
    """Makes `app` answer every exception in OpenAI's error shape."""

    @app.exception_handler(LongspanError)
    async def _ours(request: Request, error: LongspanError) -> JsonResponse:
        return error_response(error)

    @app.exception_handler(ClientGoneError)
    @app.exception_handler(ClientDisconnect)
    async def _gone(request: Request, error: Exception) -> Response:
        return Response(status_code=499)  # nobody reads it

    @app.exception_handler(HTTPException)
    async def _http(request: Request, error: HTTPException) -> JsonResponse:
        message = str(error.detail)
        if error.status_code in (404, 405):
            message = f"{request.method} {request.url.path} does not exist here."
        return JsonResponse(error_object(error.status_code, message), error.status_code, error.headers)

    @app.exception_handler(Exception)
    async def _unexpected(request: Request, error: Exception) -> JsonResponse:
        return error_response(error)
