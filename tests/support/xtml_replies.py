"""Replies of a model, as markup, that several tests of the server want read."""

from __future__ import annotations

THINK_END = "<|close|>think<|sep|><|open|>response<|sep|>"
END = "<|close|>response<|sep|><|close|>message<|sep|><|end_of_msg|>"


def call(index: int, *arguments: tuple[str, str, str], name: str = "f") -> str:
    """A complete call; `arguments` are (key, type, value)."""
    body = "".join(
        f'<|open|>argument key="{key}" type="{kind}"<|sep|>{value}<|close|>argument<|sep|>'
        for key, kind, value in arguments
    )
    return f'<|open|>call tool="{name}" index="{index}"<|sep|>{body}<|close|>call<|sep|>'


def with_calls(*calls: str, content: str = "Sure.") -> str:
    tools = f"<|open|>tools<|sep|>{''.join(calls)}<|close|>tools<|sep|>"
    return f"Hm.{THINK_END}{content}<|close|>response<|sep|>{tools}<|close|>message<|sep|><|end_of_msg|>"


CALL = with_calls(call(1, ("k", "string", "v")))
TWO_CALLS = with_calls(call(1, ("k", "string", 'A "17" <|')), call(2, ("k", "string", "한국어")), content="")
CUT_CALL = CALL[: CALL.index("v<|close|>argument") + 1]
