"""A prompt that is continued as plain text, for the routes that know no chats."""

from __future__ import annotations

from typing import Any

from longspan.engine.readers import TextReader
from longspan.engine.request import Request, SamplingParams
from longspan.serve.service import Service
from longspan.serve.structure import structure_of_text


def text_request(
    service: Service,
    request_id: str,
    token_ids: list[int],
    sampling: dict[str, Any],
    *,
    default_max_tokens: int,
    response_format: dict[str, Any] | None = None,
    **scheduling: Any,
) -> Request:
    """`sampling`: arguments of `SamplingParams`. Raises RequestError. Slow for large schemas."""
    room = service.engine.max_model_len - len(token_ids)
    # What nobody asked for can't be too much.
    given: dict[str, Any] = {"max_tokens": max(1, min(default_max_tokens, room))} | sampling
    params = SamplingParams(**given)
    return Request(
        id=request_id,
        prompt_token_ids=token_ids,
        params=params,
        make_reader=lambda: TextReader(service.tokenizer, params),
        structure=structure_of_text(service.vocabulary, params, response_format),
        **scheduling,
    )


def to_token_ids(service: Service, prompt: str | list[int]) -> list[int]:
    """Raises RequestError for a text that can't fit, before it is encoded. Slow for long texts."""
    if not isinstance(prompt, str):
        return prompt
    service.check_text(len(prompt))
    return service.tokenizer.encode(prompt)
