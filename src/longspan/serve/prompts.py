"""A chat, whatever protocol it came in -> token ids of its prompt. Slow if it is long: run it in a thread."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from longspan.chat import (
    Function,
    Segment,
    Tokenizer,
    check_messages,
    declared_functions,
    forced_functions,
    render,
)
from longspan.chat.xtml import close_tag, open_tag, text
from longspan.errors import RequestError
from longspan.serve.thinking import DEFAULT, ThinkingOptions


@dataclass(frozen=True)
class Chat:
    """What is to be answered and how, in the words of OpenAI's chats."""

    messages: list[Any]
    tools: list[Any] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool = True
    response_format: dict[str, Any] | None = None
    thinking: ThinkingOptions = DEFAULT
    add_generation_prompt: bool = True
    continue_final_message: bool = False


@dataclass(frozen=True)
class ChatPrompt:
    """`in_reasoning`: the prompt ends inside the think channel, so the reply starts there.

    `functions` are all that are declared, `forced` those of which one must be called; without any the model
    decides. `partial_answer`: the text of the answer that the prompt ends with.
    """

    token_ids: list[int]
    in_reasoning: bool
    functions: list[Function]
    forced: list[Function]
    partial_answer: str


def chat_prompt(
    tokenizer: Tokenizer,
    chat: Chat,
    check_text: Callable[[int], None] = lambda num_characters: None,
) -> ChatPrompt:
    """Renders and encodes a chat. Raises RequestError naming the field that is wrong.

    `check_text` is called between the two and may raise for a text that is too long.
    """
    messages, thinking = chat.messages, chat.thinking
    check_messages(messages)
    functions = declared_functions(chat.tools, messages)
    forced = forced_functions(chat.tool_choice, functions)
    partial = _partial_reply(messages, thinking) if chat.continue_final_message else None
    segments = render(
        messages[:-1] if partial is not None else messages,
        chat.tools,
        thinking=thinking.enabled,
        thinking_effort=thinking.effort,
        tool_choice=chat.tool_choice if isinstance(chat.tool_choice, str) else None,
        response_format=chat.response_format,
        add_generation_prompt=chat.add_generation_prompt or partial is not None,
        images=(),
    )
    if partial is not None:
        segments += partial.segments
    check_text(sum(len(segment.text) for segment in segments if not segment.special))
    in_reasoning = thinking.enabled and not (partial and partial.in_response)
    answer = partial.answer if partial else ""
    return ChatPrompt(tokenizer.encode_segments(segments), in_reasoning, functions, forced, answer)


@dataclass(frozen=True)
class _Partial:
    segments: list[Segment]
    in_response: bool
    answer: str


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
        return _Partial(text(content), in_response=True, answer=content)
    if not content:
        return _Partial(text(reasoning), in_response=False, answer="")
    opened = [*text(reasoning), *close_tag("think"), *open_tag("response"), *text(content)]
    return _Partial(opened, in_response=True, answer=content)
