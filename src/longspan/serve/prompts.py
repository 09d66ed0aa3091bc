"""Messages and options of a body -> token ids of the prompt. Slow for long chats: run it in a thread."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from longspan.chat import Segment, Tokenizer, check_messages, forced_functions, render
from longspan.chat.xtml import close_tag, open_tag, text
from longspan.errors import RequestError
from longspan.serve.protocol import ChatRequest, TokenizeRequest
from longspan.serve.thinking import ThinkingOptions, thinking_options


@dataclass(frozen=True)
class ChatPrompt:
    """`in_reasoning`: the prompt ends inside the think channel, so the reply starts there.

    `forced`: functions of which one must be called; without any the model decides.
    """

    token_ids: list[int]
    in_reasoning: bool
    forced: list[str]


def chat_prompt(
    tokenizer: Tokenizer,
    body: ChatRequest | TokenizeRequest,
    check_text: Callable[[int], None] = lambda num_characters: None,
) -> ChatPrompt:
    """Renders and encodes a chat. Raises RequestError naming the field that is wrong.

    `check_text` is called between the two and may raise for a text that is too long.
    """
    messages = body.messages or []
    check_messages(messages)
    thinking = thinking_options(body.reasoning_effort, body.thinking, body.chat_template_kwargs)
    forced = forced_functions(body.tool_choice, body.tools, messages)
    partial = _partial_reply(messages, thinking) if body.continue_final_message else None
    segments = render(
        messages[:-1] if partial is not None else messages,
        body.tools,
        thinking=thinking.enabled,
        thinking_effort=thinking.effort,
        tool_choice=body.tool_choice if isinstance(body.tool_choice, str) else None,
        add_generation_prompt=body.add_generation_prompt or partial is not None,
        images=(),
    )
    if partial is not None:
        segments += partial.segments
    check_text(sum(len(segment.text) for segment in segments if not segment.special))
    in_reasoning = thinking.enabled and not (partial and partial.in_response)
    return ChatPrompt(tokenizer.encode_segments(segments), in_reasoning, forced)


@dataclass(frozen=True)
class _Partial:
    segments: list[Segment]
    in_response: bool


def _partial_reply(messages: list[Any], thinking: ThinkingOptions) -> _Partial:
    """What follows the generation prompt when the last message is to be continued."""
    last = messages[-1]
    where = f"messages[{len(messages) - 1}]"
    if not isinstance(last, dict) or last.get("role") != "assistant" or last.get("tool_calls"):
        raise RequestError(
            "`continue_final_message` needs a last message of role assistant without tool calls.",
            param="continue_final_message",
            remedy="Leave it out, or end `messages` with the text to continue.",
        )
    content = last.get("content") or ""
    reasoning = last.get("reasoning_content") or last.get("reasoning") or ""
    for name, value in (("content", content), ("reasoning_content", reasoning)):
        if not isinstance(value, str):
            raise RequestError(f"`{where}.{name}` is not a string.", param=f"{where}.{name}")
    if not thinking.enabled:
        if reasoning:
            what = "There is reasoning to continue, but thinking is off."
            raise RequestError(
                what, param=f"{where}.reasoning_content", remedy="Turn thinking on or leave it out."
            )
        return _Partial(text(content), in_response=True)
    if not content:
        return _Partial(text(reasoning), in_response=False)
    opened = [*text(reasoning), *close_tag("think"), *open_tag("response"), *text(content)]
    return _Partial(opened, in_response=True)
