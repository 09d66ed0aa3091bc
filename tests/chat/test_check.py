"""Fields of messages that would be ignored."""

from __future__ import annotations

import re
from typing import Any

import pytest

from longspan.chat import check_messages
from longspan.errors import RequestError

CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("message", "field"),
    [
        ({"role": "user", "contnt": "a", "content": "a"}, "messages[0].contnt"),
        ({"role": "user"}, "messages[0].content"),
        (
            {"role": "user", "content": [{"type": "text", "text": "a", "txt": "b"}]},
            "messages[0].content[0].txt",
        ),
        ({"role": "assistant", "tool_calls": [CALL | {"args": 1}]}, "messages[0].tool_calls[0].args"),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "zzz": 1}}]},
            "messages[0].tool_calls[0].function.zzz",
        ),
        ({"role": "user", "content": "a", "tool_calls": [CALL]}, "messages[0].tool_calls"),
    ],
)
def test_a_field_that_would_be_ignored_is_named(message: dict[str, Any], field: str) -> None:
    with pytest.raises(RequestError) as caught:
        check_messages([message])
    assert caught.value.param == field


def test_no_messages_are_refused() -> None:
    with pytest.raises(RequestError, match=re.escape("`messages` is empty")):
        check_messages([])


def test_what_an_sdk_sends_back_passes() -> None:
    dumped = {"role": "assistant", "content": None, "refusal": None, "annotations": [], "audio": None}
    check_messages([{"role": "user", "content": "a"}, dumped | {"tool_calls": [CALL | {"index": 0}]}])
    check_messages([{"role": "system", "tools": [{"type": "function", "function": {"name": "f"}}]}])
