"""The server held against its own /openapi.json, by schemathesis: whatever is sent, answers are as described.

LONGSPAN_FUZZ multiplies the number of examples.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)
from support.scripted import Reciter, Running, ScriptedModel, running_server

from longspan.chat import Tokenizer

FUZZ = int(os.environ.get("LONGSPAN_FUZZ", "1"))
REPLY = (
    "thought<|close|>think<|sep|><|open|>response<|sep|>answer<|close|>response<|sep|>"
    '<|open|>tools<|sep|><|open|>call tool="f" index="1"<|sep|><|open|>argument key="a" type="number"<|sep|>1'
    "<|close|>argument<|sep|><|close|>call<|sep|><|close|>tools<|sep|>"
)
DESCRIBED = [
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    negative_data_rejection,
]
EXPECTED_5XX = {503, 504}  # a queue that is full for a while, and a deadline that was asked for


@pytest.fixture(scope="module")
def fuzzed(tokenizer: Tokenizer) -> Iterator[Running]:
    """A server of short contexts, so that no request takes long."""
    model = ScriptedModel(tokenizer, Reciter(tokenizer))
    with running_server(model, tokenizer, num_pages=32, page_size=8, max_queue=8) as server:
        server.say(REPLY)
        yield server
        assert httpx.get(f"{server.url}/health").status_code == 200
        server.wait_until_idle()


@pytest.fixture(scope="module")
def document(fuzzed: Running) -> Any:
    return schemathesis.openapi.from_url(f"{fuzzed.url}/openapi.json")


@pytest.mark.parametrize("mode", list(schemathesis.GenerationMode))
def test_any_request_is_answered_as_documented(document: Any, mode: schemathesis.GenerationMode) -> None:
    """`mode`: requests that fit the document, or that break it and must be refused."""
    for operation in [result.ok() for result in document.get_all_operations()]:
        if mode is schemathesis.GenerationMode.NEGATIVE and not list(operation.body):
            continue

        @settings(max_examples=10 * FUZZ, suppress_health_check=list(HealthCheck))
        @given(case=operation.as_strategy(generation_mode=mode))
        def answered(case: schemathesis.Case) -> None:
            response = case.call(timeout=60)
            checks = DESCRIBED + [not_a_server_error] * (response.status_code not in EXPECTED_5XX)
            case.validate_response(response, checks=checks)

        answered()
