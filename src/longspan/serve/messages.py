"""POST /v1/messages and /v1/messages/count_tokens: the events of a chat as blocks of Anthropic's protocol.

A whole message is what its stream adds up to: both come from one writer. Thinking is signed by nobody, so
signatures are empty, and those that come back are not looked at.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from pydantic_core import from_json

from longspan.chat import ContentDelta, Event, ReasoningDelta, ToolCallArguments, ToolCallEnd, ToolCallStart
from longspan.engine.output import Finish, StepOutput
from longspan.serve.chat_call import ChatCall, prepare_call
from longspan.serve.delivery import EventStream
from longspan.serve.failures import MESSAGES_PATH, anthropic_error, in_words_of, message_of, status_of
from longspan.serve.messages_body import CountTokensRequest, MessagesRequest
from longspan.serve.prompts import chat_prompt
from longspan.serve.route import Generation
from longspan.serve.service import Service


@dataclass(frozen=True)
class MessageCall:
    """A call with the body it came in."""

    body: MessagesRequest
    call: ChatCall
    request_id: str


def prepare_message(service: Service, body: MessagesRequest, request_id: str) -> MessageCall:
    """Raises RequestError: what can be refused is refused before any work."""
    chat, names = body.chat()
    with in_words_of(names):
        call_id = body.request_id or f"msg_{request_id}"
        call = prepare_call(service, chat, body, body.sampling(), call_id)
    return MessageCall(body, call, request_id)


def count_tokens(service: Service, body: CountTokensRequest) -> int:
    """Of the prompt. Slow for long chats: run it in a thread."""
    service.model_name(body.model)
    chat, names = body.chat()
    with in_words_of(names):
        return len(chat_prompt(service.tokenizer, chat, service.check_text).token_ids)


async def complete_message(service: Service, message: MessageCall) -> dict[str, Any]:
    writer = MessageWriter(message)
    async with service.run([message.call.request]) as steps:
        async for step in steps:
            writer.push(step)
    return writer.whole()


async def stream_message(service: Service, message: MessageCall) -> EventStream:
    writer = MessageWriter(message)

    async def events() -> AsyncGenerator[dict[str, Any], None]:
        async with service.run([message.call.request]) as steps:
            for event in writer.start():
                yield event
            async for step in steps:
                for event in writer.push(step):
                    yield event

    def failed(error: Exception) -> dict[str, Any]:
        return anthropic_error(status_of(error), message_of(error), message.request_id)

    return await EventStream.open(events(), failed=failed, named=True, done=None)


class MessageWriter:
    """Steps of one choice -> events. Call `start`, then `push` until its step says that the choice has ended.

    A block is open until an event comes that belongs to another.
    """

    def __init__(self, message: MessageCall) -> None:
        self._shows_thinking = message.body.shows_thinking
        self._usage = message.call.usage()
        self._open = False  # the last block
        self._message: dict[str, Any] = {
            "id": message.call.id,
            "type": "message",
            "role": "assistant",
            "model": message.call.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self._usage_object(),
        }

    def start(self) -> list[dict[str, Any]]:
        return [{"type": "message_start", "message": deepcopy(self._message)}, {"type": "ping"}]

    def push(self, step: StepOutput) -> list[dict[str, Any]]:
        self._usage.add(step)
        events = [event for delta in step.deltas for event in self._delta(delta)]
        return events + self._finish(step.finish) if step.finish else events

    def whole(self) -> dict[str, Any]:
        """The message so far."""
        blocks = [
            block | {"input": _input(block["input"])} if block["type"] == "tool_use" else block
            for block in self._message["content"]
        ]
        return self._message | {"content": blocks}

    def _delta(self, delta: Event) -> list[dict[str, Any]]:
        match delta:
            case ReasoningDelta(text):
                if not self._shows_thinking:
                    return []
                block = {"type": "thinking", "thinking": "", "signature": ""}
                return [*self._in_block(block), self._more("thinking", "thinking_delta", "thinking", text)]
            case ContentDelta(text):
                block = {"type": "text", "text": ""}
                return [*self._in_block(block), self._more("text", "text_delta", "text", text)]
            case ToolCallStart(_, call_id, name):
                call = {"type": "tool_use", "id": call_id, "name": name, "input": ""}
                return [*self._close(), self._start_block(call)]
            case ToolCallArguments(_, text):
                return [self._more("input", "input_json_delta", "partial_json", text)]
            case ToolCallEnd():
                return self._close()

    def _in_block(self, block: dict[str, Any]) -> list[dict[str, Any]]:
        """Opens this block unless one of its type is open."""
        if self._open and self._message["content"][-1]["type"] == block["type"]:
            return []
        return [*self._close(), self._start_block(block)]

    def _start_block(self, block: dict[str, Any]) -> dict[str, Any]:
        self._message["content"].append(block)
        self._open = True
        shown = block | ({"input": {}} if block["type"] == "tool_use" else {})
        return self._about_block("content_block_start", content_block=shown)

    def _more(self, field: str, kind: str, name: str, text: str) -> dict[str, Any]:
        self._message["content"][-1][field] += text
        return self._about_block("content_block_delta", delta={"type": kind, name: text})

    def _close(self) -> list[dict[str, Any]]:
        if not self._open:
            return []
        self._open = False
        return [self._about_block("content_block_stop")]

    def _about_block(self, kind: str, **fields: Any) -> dict[str, Any]:
        return {"type": kind, "index": len(self._message["content"]) - 1} | fields

    def _finish(self, finish: Finish) -> list[dict[str, Any]]:
        events = self._close()
        if finish.reason == "stop" and isinstance(finish.stop_reason, str):
            end = {"stop_reason": "stop_sequence", "stop_sequence": finish.stop_reason}
        else:
            reasons = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
            end = {"stop_reason": reasons[finish.reason], "stop_sequence": None}
        usage = self._usage_object()
        self._message |= end | {"usage": usage}
        return [*events, {"type": "message_delta", "delta": end, "usage": usage}, {"type": "message_stop"}]

    def _usage_object(self) -> dict[str, Any]:
        """Here `input_tokens` are those that were not in the prefix cache."""
        usage = self._usage
        return {
            "input_tokens": usage.prompt_tokens - usage.cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": usage.cached_tokens,
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"thinking_tokens": usage.reasoning_tokens},
        }


def _input(arguments: str) -> dict[str, Any]:
    """The arguments of a call, or what is complete of them; nothing where no object begins."""
    try:
        value = from_json(arguments, allow_partial=True)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


MESSAGES = Generation(MESSAGES_PATH, MessagesRequest, prepare_message, complete_message, stream_message)
