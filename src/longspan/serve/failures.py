"""Every failure in the error shape of the protocol that was spoken, which the path tells.

OpenAI's is {"error": {"message", "type", "param", "code"}}; Anthropic's, under /v1/messages, is
{"type": "error", "error": {"type", "message"}, "request_id"}.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from longspan.errors import CheckpointError, DeadlineError, LongspanError, OverloadedError, RequestError
from longspan.serve.json_text import JsonResponse

logger = logging.getLogger("longspan.serve")

REQUEST_ID = "X-Request-Id"
MESSAGES_PATH = "/v1/messages"
MAX_MESSAGE = 2000  # characters
_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class UnknownModelError(RequestError):
    """The request names a model that is not served here (HTTP 404)."""


class ClientGoneError(Exception):
    """The client closed its connection; nobody is left to answer."""


class AbortedError(LongspanError):
    """The request was ended by /abort_request (HTTP 499)."""


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
    if isinstance(error, DeadlineError):
        return 504
    if isinstance(error, AbortedError):
        return 499
    return 500


def message_of(error: Exception) -> str:
    """What the caller may know of an error."""
    return str(error) if isinstance(error, LongspanError) else "The server failed; its log says why."


def error_body(error: Exception) -> dict[str, Any]:
    """OpenAI's error object for an event of a stream."""
    return error_object(status_of(error), message_of(error), getattr(error, "param", None))


def error_object(status: int, message: str, param: str | None = None) -> dict[str, Any]:
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": _shortened(message), "type": kind, "param": param, "code": status}}


def anthropic_error(status: int, message: str, request_id: str) -> dict[str, Any]:
    kind = _ANTHROPIC_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {
        "type": "error",
        "error": {"type": kind, "message": _shortened(message)},
        "request_id": request_id,
    }


def _shortened(message: str) -> str:
    """It may quote what was sent."""
    if len(message) <= MAX_MESSAGE:
        return message
    half = MAX_MESSAGE // 2
    return f"{message[:half]} ... {message[-half:]}"


def failure(
    request: Request,
    status: int,
    message: str,
    param: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> JsonResponse:
    """The answer to a request that failed."""
    request_id = request.state.request_id
    path = request.url.path
    if path == MESSAGES_PATH or path.startswith(f"{MESSAGES_PATH}/"):
        body = anthropic_error(status, message, request_id)
    else:
        body = error_object(status, message, param)
    return JsonResponse(body, status, {REQUEST_ID: request_id, **(headers or {})})


def failure_of(request: Request, error: Exception) -> JsonResponse:
    """The answer to a request that ended with `error`."""
    status = status_of(error)
    if status == 500:
        logger.error("a request failed: %s", error)
    headers = {"Retry-After": "1"} if status in (429, 503) else None
    return failure(request, status, message_of(error), getattr(error, "param", None), headers)


@contextmanager
def in_words_of(names: Mapping[str, str]) -> Iterator[None]:
    """Errors raised within speak of the fields of a protocol: `names` gives its word for each of ours.

    What is within a field goes with it: for {"a": "b"} `a[0].c` becomes `b[0].c`. The first that fits counts.
    """
    try:
        yield
    except RequestError as error:
        for ours, theirs in names.items():
            word = re.compile(rf"(?<![\w.]){re.escape(ours)}(?!\w)")
            if word.match(error.param or ""):
                said, param, remedy = (
                    word.sub(theirs, text or "") for text in (error.message, error.param, error.remedy)
                )
                raise RequestError(said, param=param, remedy=remedy) from error
        raise


def install_handlers(app: FastAPI) -> None:
    """Makes `app` answer every exception in the shape of the protocol."""

    @app.exception_handler(LongspanError)
    async def _ours(request: Request, error: LongspanError) -> JsonResponse:
        return failure_of(request, error)

    @app.exception_handler(ClientGoneError)
    @app.exception_handler(ClientDisconnect)
    async def _gone(request: Request, error: Exception) -> Response:
        return Response(status_code=499)  # nobody reads it

    @app.exception_handler(HTTPException)
    async def _http(request: Request, error: HTTPException) -> JsonResponse:
        message = str(error.detail)
        if error.status_code in (404, 405):
            message = f"{request.method} {request.url.path} does not exist here."
        return failure(request, error.status_code, message, headers=error.headers)

    @app.exception_handler(Exception)
    async def _unexpected(request: Request, error: Exception) -> JsonResponse:
        return failure_of(request, error)
