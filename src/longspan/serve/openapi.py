"""/openapi.json as it is: what each route takes, `null` and refused fields included, and what it answers.

Bodies are parsed and answers are made by us, so FastAPI knows neither. Answers are described field by field:
tests hold the document against the server.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from longspan.serve.body import Body
from longspan.serve.failures import MESSAGES_PATH

Schema = dict[str, Any]

_NULL: Schema = {"type": "null"}
_STRING: Schema = {"type": "string"}
_INTEGER: Schema = {"type": "integer"}
_COUNT: Schema = {"type": "integer", "minimum": 0}
_LOGPROB: Schema = {"type": "number", "maximum": 0}
_ANY_OBJECT: Schema = {"type": "object"}


def describe(app: FastAPI) -> None:
    """Makes `app` serve the whole document. Routes may be added before or after."""

    def document() -> Schema:
        if app.openapi_schema is None:
            made = get_openapi(title=app.title, version=app.version, routes=app.routes)
            for path, operations in made["paths"].items():
                for operation in operations.values():
                    error = _ANTHROPIC_ERROR if path.startswith(MESSAGES_PATH) else _ERROR
                    known = _ANSWERS[path] if path in _ANSWERS else operation["responses"]
                    operation["responses"] = known | {"default": error}
                    operation["responses"].pop("422", None)
            app.openapi_schema = made
        return app.openapi_schema

    app.openapi = document


def body_schema(kind: type[Body]) -> Schema:
    """What `parse_body` accepts: null stands for "not given"; unknown fields may be null only."""
    schema = kind.model_json_schema()
    definitions = schema.pop("$defs", {})
    schema = _with_nulls(_inlined(schema, definitions))
    schema["properties"] |= {
        name: {"enum": [*refused.harmless, None], "description": refused.remedy}
        for name, refused in kind.refused.items()
    }
    return schema


def _inlined(schema: Any, definitions: Schema) -> Any:
    """References resolved: they count from the root of a document, and this becomes a part of one."""
    if isinstance(schema, list):
        return [_inlined(item, definitions) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        return _with_nulls(_inlined(deepcopy(definitions[schema["$ref"].rpartition("/")[2]]), definitions))
    return {name: _inlined(value, definitions) for name, value in schema.items()}


def _with_nulls(schema: Schema) -> Schema:
    """An object of known fields, of which those that are not required may be null."""
    required = schema.get("required", [])
    fields = {
        name: field if name in required else _nullable(field) for name, field in schema["properties"].items()
    }
    return schema | {"properties": fields, "additionalProperties": _NULL}


def _nullable(schema: Schema) -> Schema:
    if _NULL in schema.get("anyOf", ()):
        return schema
    kept = {name: schema[name] for name in ("title", "description", "default") if name in schema}
    return kept | {"anyOf": [{k: v for k, v in schema.items() if k not in kept}, _NULL]}


def _object(fields: Schema, **optional: Schema) -> Schema:
    """An object with these fields, perhaps the optional ones, and no others."""
    return {
        "type": "object",
        "properties": fields | optional,
        "required": list(fields),
        "additionalProperties": False,
    }


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def _map(values: Schema) -> Schema:
    return {"type": "object", "additionalProperties": values}


def _const(value: str) -> Schema:
    return {"const": value}


_DESCRIBED = {"description": "The answer"}


def _json(schema: Schema, stream: bool = False) -> Schema:
    content: Schema = {"application/json": {"schema": schema}}
    if stream:
        content["text/event-stream"] = {"schema": {}}  # events have none of their own
    return {"200": _DESCRIBED | {"content": content}}


def _error(schema: Schema) -> Schema:
    what = "What was wrong, and what to do"
    return {"description": what, "content": {"application/json": {"schema": schema}}}


_STATUS: Schema = {"type": "integer", "minimum": 400, "maximum": 599}
_ERROR = _error(
    _object(
        {
            "error": _object(
                {"message": _STRING, "type": _STRING, "param": _nullable(_STRING), "code": _STATUS}
            )
        }
    )
)
_ANTHROPIC_ERROR = _error(
    _object(
        {
            "type": _const("error"),
            "error": _object({"type": _STRING, "message": _STRING}),
            "request_id": _STRING,
        }
    )
)
_USAGE = _object(
    {
        "prompt_tokens": _COUNT,
        "completion_tokens": _COUNT,
        "total_tokens": _COUNT,
        "prompt_tokens_details": _object({"cached_tokens": _COUNT}),
        "completion_tokens_details": _object({"reasoning_tokens": _COUNT}),
    }
)
_HEAD = {"id": _STRING, "created": _INTEGER, "model": _STRING}
_ENDS = {
    "finish_reason": {"enum": ["stop", "length", "tool_calls"]},
    "stop_reason": {"anyOf": [_STRING, _INTEGER, _NULL]},
}
_PROMPT_LOGPROBS = _list(
    _nullable(
        _map(
            _object(
                {"logprob": _LOGPROB, "rank": {"type": "integer", "minimum": 1}, "decoded_token": _STRING}
            )
        )
    )
)
_TOKEN = {"token": _STRING, "logprob": _LOGPROB, "bytes": _list({"type": "integer", "maximum": 255})}
_CHAT_LOGPROBS = _object({"content": _list(_object(_TOKEN | {"top_logprobs": _list(_object(_TOKEN))}))})
_TOOL_CALL = _object(
    {
        "id": _STRING,
        "type": _const("function"),
        "function": _object({"name": _STRING, "arguments": _STRING}),
    }
)
_MESSAGE = _object(
    {"role": _const("assistant"), "content": _nullable(_STRING)},
    reasoning_content=_STRING,
    tool_calls=_list(_TOOL_CALL),
)
_CHAT = _object(
    _HEAD
    | {
        "object": _const("chat.completion"),
        "choices": _list(
            _object(
                _ENDS
                | {
                    "index": _COUNT,
                    "message": _MESSAGE,
                    "logprobs": _nullable(
                        _object(
                            {"content": _list(_object(_TOKEN | {"top_logprobs": _list(_object(_TOKEN))}))}
                        )
                    ),
                }
            )
        ),
        "usage": _USAGE,
    },
    prompt_logprobs=_PROMPT_LOGPROBS,
)
_COMPLETION = _object(
    _HEAD
    | {
        "object": _const("text_completion"),
        "choices": _list(
            _object(
                _ENDS
                | {
                    "index": _COUNT,
                    "text": _STRING,
                    "logprobs": _nullable(
                        _object(
                            {
                                "tokens": _list(_STRING),
                                "token_logprobs": _list(_nullable(_LOGPROB)),
                                "top_logprobs": _list(_nullable(_map(_LOGPROB))),
                                "text_offset": _list(_COUNT),
                            }
                        )
                    ),
                },
                prompt_logprobs=_PROMPT_LOGPROBS,
            )
        ),
        "usage": _USAGE,
    }
)
_BLOCK: Schema = {
    "anyOf": [
        _object({"type": _const("thinking"), "thinking": _STRING, "signature": _STRING}),
        _object({"type": _const("text"), "text": _STRING}),
        _object({"type": _const("tool_use"), "id": _STRING, "name": _STRING, "input": _ANY_OBJECT}),
    ]
}
_ANTHROPIC_USAGE = _object(
    {
        "input_tokens": _COUNT,
        "cache_creation_input_tokens": _COUNT,
        "cache_read_input_tokens": _COUNT,
        "output_tokens": _COUNT,
        "output_tokens_details": _object({"thinking_tokens": _COUNT}),
    }
)
_ANTHROPIC_MESSAGE = _object(
    {
        "id": _STRING,
        "type": _const("message"),
        "role": _const("assistant"),
        "model": _STRING,
        "content": _list(_BLOCK),
        "stop_reason": {"enum": ["end_turn", "max_tokens", "tool_use", "stop_sequence"]},
        "stop_sequence": _nullable(_STRING),
        "usage": _ANTHROPIC_USAGE,
    }
)
_CARD = _object(
    {
        "id": _STRING,
        "object": _const("model"),
        "created": _INTEGER,
        "owned_by": _const("longspan"),
        "root": _STRING,
        "parent": _NULL,
        "max_model_len": _COUNT,
    }
)
_TOKENS = _object(
    {
        "count": _COUNT,
        "max_model_len": _COUNT,
        "tokens": _list(_COUNT),
        "token_strs": _nullable(_list(_STRING)),
    }
)
_ENTRIES = _list(
    {
        "type": "array",
        "items": {"type": ["number", "string", "null"]},  # [log-probability, id, text]
        "minItems": 3,
        "maxItems": 3,
    }
)
_GENERATED = _object(
    {
        "text": _STRING,
        "output_ids": _list(_COUNT),
        "meta_info": _object(
            {
                "id": _STRING,
                "finish_reason": _object(
                    {"type": {"enum": ["stop", "length", "abort"]}},
                    length=_COUNT,
                    matched={"anyOf": [_STRING, _INTEGER, _NULL]},
                    message=_STRING,
                ),
                "prompt_tokens": _COUNT,
                "completion_tokens": _COUNT,
                "cached_tokens": _COUNT,
                "e2e_latency": {"type": "number", "minimum": 0},
            },
            input_token_logprobs=_ENTRIES,
            output_token_logprobs=_ENTRIES,
            input_top_logprobs=_list(_nullable(_ENTRIES)),
            output_top_logprobs=_list(_nullable(_ENTRIES)),
        ),
    },
    index=_COUNT,
)
_SERVES: Schema = {"200": {"description": "It serves"}}
_PLAIN: Schema = {"200": _DESCRIBED | {"content": {"text/plain": {"schema": _STRING}}}}
_ANSWERS: dict[str, Schema] = {
    "/v1/chat/completions": _json(_CHAT, stream=True),
    "/v1/completions": _json(_COMPLETION, stream=True),
    "/v1/responses": _json(_ANY_OBJECT, stream=True),
    MESSAGES_PATH: _json(_ANTHROPIC_MESSAGE, stream=True),
    f"{MESSAGES_PATH}/count_tokens": _json(_object({"input_tokens": _COUNT})),
    "/v1/models": _json(_object({"object": _const("list"), "data": _list(_CARD)})),
    "/v1/models/{name}": _json(_CARD),
    "/tokenize": _json(_TOKENS),
    "/detokenize": _json(_object({"prompt": _STRING})),
    "/version": _json(_object({"version": _STRING})),
    "/generate": _json({"anyOf": [_GENERATED, _list(_GENERATED)]}, stream=True),
    "/abort_request": _json(_object({"aborted": _COUNT})),
    "/load": _json(_object({"server_load": _COUNT})),
    "/model_info": _json(_ANY_OBJECT),
    "/server_info": _json(_ANY_OBJECT),
    "/health": _SERVES,
    "/ping": _SERVES,
    "/health_generate": _SERVES,
    "/flush_cache": _PLAIN,
    "/metrics": _PLAIN,
}
