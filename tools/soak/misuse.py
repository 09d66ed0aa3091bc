"""Requests that must be refused: what is sent, and the statuses that are right for it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from soak.protocols import CHAT, GENERATE, MESSAGES, PROTOCOLS, RESPONSES, TEXT

USER = [{"role": "user", "content": "Hello"}]


@dataclass(frozen=True)
class Misuse:
    """A request and the statuses it may get."""

    method: str
    path: str
    content: bytes
    statuses: tuple[int, ...] = (400,)


def misuses(max_body_bytes: int) -> list[Misuse]:
    """All of them. Every answer must be an error object of the route's protocol."""
    raw = [
        b"", b"{", b"{}", b"null", b"[]", b'"text"', b"\xff\xfe", b'{"prompt": "\xff"}', b'{"prompt": NaN}',
        b'{"prompt": "x", "temperature": 1e999}', b'{"prompt": ' + b"[" * 50_000, b'{"a":' * 50_000,
        b'{"prompt": "x", "max_tokens": ' + b"9" * 5000 + b"}",
    ]  # fmt: skip
    texts: list[dict[str, Any]] = [
        {"prompt": ""}, {"prompt": []}, {"prompt": [[]]}, {"prompt": [-1]}, {"prompt": [10**9]},
        {"prompt": [1.5]}, {"prompt": {"a": 1}}, {"prompt": "x" * 200_000}, {"prompt": [5] * 100_000},
        {"n": 0}, {"n": 1000}, {"n": 1.5}, {"temperature": -1}, {"temperature": "hot"}, {"top_p": 0},
        {"top_k": -2}, {"min_p": 2}, {"max_tokens": 0}, {"max_tokens": 10**8}, {"seed": 2**70},
        {"stop": ["a"] * 65}, {"stop": [""]}, {"stop": [1]}, {"logprobs": 21}, {"logit_bias": {"a": 1}},
        {"logit_bias": {"99999999": 1}}, {"logit_bias": {"1": 101}}, {"presence_penalty": 3},
        {"repetition_penalty": 0}, {"min_tokens": 17}, {"stream_options": {"include_usage": True}},
        {"best_of": 3}, {"suffix": "x"}, {"unknown": 1}, {"stream": "yes"},
    ]  # fmt: skip
    chats: list[dict[str, Any]] = [
        {"messages": []}, {"messages": "hi"}, {"messages": [{"role": "wizard", "content": "x"}]},
        {"messages": [1]}, {"messages": [{"role": "user", "content": [{"type": "audio"}]}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        {"messages": [{"role": "tool", "content": "x", "tool_call_id": "nobody"}]},
        {"tool_choice": "required"}, {"tool_choice": {"type": "function", "function": {"name": "f"}}},
        {"tools": [1]}, {"top_logprobs": 3}, {"reasoning_effort": "enormous"}, {"audio": {}},
        {"max_tokens": 3, "max_completion_tokens": 4}, {"chat_template_kwargs": {"x": 1}},
    ]  # fmt: skip
    found = [Misuse("POST", path, content) for path in (*PROTOCOLS, "/tokenize") for content in raw]
    found += [Misuse("POST", TEXT, _json({"prompt": "x"} | body)) for body in texts]
    found += [Misuse("POST", CHAT, _json({"messages": USER} | body)) for body in chats]
    found += [
        Misuse("POST", RESPONSES, _json({"input": [{"type": "audio"}]})),
        Misuse("POST", RESPONSES, _json({"input": "x", "previous_response_id": "resp_1"})),
        Misuse("POST", MESSAGES, _json({"messages": USER})),
        Misuse("POST", GENERATE, _json({"text": "x", "sampling_params": {"n": 0}})),
        Misuse("POST", GENERATE, _json({"text": "x", "input_ids": [1]})),
        Misuse("POST", "/detokenize", _json({"tokens": [-1]})),
        Misuse("POST", "/detokenize", _json({"tokens": [5] * 100_000})),
        Misuse("POST", TEXT, _json({"prompt": "x", "model": "another"}), (404,)),
        Misuse("POST", TEXT, b" " * (max_body_bytes + 1), (413,)),
        Misuse("POST", "/v1/nothing", b"{}", (404,)),
        Misuse("GET", TEXT, b"", (405,)),
        Misuse("GET", "/v1/models/another", b"", (404,)),
    ]
    return found


def _json(body: dict[str, Any]) -> bytes:
    return json.dumps(body).encode()
