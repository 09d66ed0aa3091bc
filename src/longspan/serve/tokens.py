"""/tokenize, /detokenize and /v1/messages/count_tokens: prompts without replies."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from fastapi import FastAPI, Request, Response

from longspan.errors import RequestError
from longspan.serve.body import Body, parse_body
from longspan.serve.failures import MESSAGES_PATH
from longspan.serve.json_text import JsonResponse
from longspan.serve.messages import count_tokens
from longspan.serve.messages_body import CountTokensRequest
from longspan.serve.prompts import chat_prompt
from longspan.serve.protocol import DetokenizeRequest, TokenizeRequest
from longspan.serve.route import takes
from longspan.serve.service import Service

AnyBody = TypeVar("AnyBody", bound=Body)


def add_token_routes(app: FastAPI, service: Service) -> None:
    def add(path: str, kind: type[AnyBody], answer: Callable[[Service, AnyBody], dict[str, Any]]) -> None:
        @app.post(path, openapi_extra=takes(kind))
        async def read(request: Request) -> Response:
            raw = await request.body()
            # Encoding a long text takes seconds: a thread does it, and makes the JSON, too.
            return await asyncio.to_thread(lambda: JsonResponse(answer(service, parse_body(raw, kind))))

    add("/tokenize", TokenizeRequest, _tokenize)
    add("/detokenize", DetokenizeRequest, _detokenize)
    add(f"{MESSAGES_PATH}/count_tokens", CountTokensRequest, _count)


def _tokenize(service: Service, body: TokenizeRequest) -> dict[str, Any]:
    service.model_name(body.model)
    tokens = _token_ids(service, body)
    strings = [service.tokenizer.decode([token]) for token in tokens] if body.return_token_strs else None
    return {
        "count": len(tokens),
        "max_model_len": service.engine.max_model_len,
        "tokens": tokens,
        "token_strs": strings,
    }


def _token_ids(service: Service, body: TokenizeRequest) -> list[int]:
    if body.messages is not None and body.prompt is None:
        return chat_prompt(service.tokenizer, body.chat()).token_ids
    if body.prompt is not None and body.messages is None:
        return service.tokenizer.encode(body.prompt)
    raise RequestError("Exactly one of `prompt` and `messages` is expected.", param="prompt")


def _detokenize(service: Service, body: DetokenizeRequest) -> dict[str, Any]:
    service.model_name(body.model)
    longest = service.engine.max_model_len
    if len(body.tokens) > longest:
        # A token may stand for a hundred characters, so a small body could ask for a huge answer.
        what = f"`tokens` has {len(body.tokens)} ids, and max_model_len is {longest}."
        raise RequestError(what, param="tokens", remedy="Send them in several requests.")
    return {"prompt": service.tokenizer.decode(body.tokens)}


def _count(service: Service, body: CountTokensRequest) -> dict[str, Any]:
    return {"input_tokens": count_tokens(service, body)}
