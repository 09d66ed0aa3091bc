"""POST /v1/chat/completions: the events of a chat as OpenAI's deltas, or added up to one message."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any

from longspan.chat import (
    ContentDelta,
    Event,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
    collect,
)
from longspan.engine.output import Finish, TokenLogprobs
from longspan.serve.chat_call import ChatCall, prepare_call
from longspan.serve.delivery import EventStream
from longspan.serve.logprobs import chat_logprobs, prompt_logprobs
from longspan.serve.protocol import ChatRequest
from longspan.serve.route import Generation
from longspan.serve.service import Service


@dataclass(frozen=True)
class OpenAIChat:
    """A call with the body it came in."""

    body: ChatRequest
    call: ChatCall

    def head(self, kind: str) -> dict[str, Any]:
        call = self.call
        return {"id": call.id, "object": kind, "created": call.created, "model": call.model}


def prepare_chat(service: Service, body: ChatRequest, request_id: str) -> OpenAIChat:
    """Raises RequestError: what can be refused is refused before any work."""
    call_id = body.request_id or f"chatcmpl-{request_id}"
    return OpenAIChat(body, prepare_call(service, body.chat(), body, body.sampling(), call_id))


async def stream_chat(service: Service, chat: OpenAIChat) -> EventStream:
    return await EventStream.open(_chunks(service, chat))


async def _chunks(service: Service, chat: OpenAIChat) -> AsyncGenerator[dict[str, Any], None]:
    """The role of each choice, its deltas, its end, and the usage if asked for."""
    body, options = chat.body, chat.body.stream_options
    head = chat.head("chat.completion.chunk")
    usage = chat.call.usage()

    def chunk(
        index: int, delta: dict[str, Any], logprobs: Any = None, end: dict[str, Any] | None = None
    ) -> dict:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None} | (end or {})
        chunk = head | {"choices": [choice]}
        if options and options.continuous_usage_stats:
            chunk["usage"] = usage.as_json()
        return chunk

    async with service.run([chat.call.request]) as steps:
        for index in range(body.n):
            yield chunk(index, {"role": "assistant", "content": ""})
        async for step in steps:
            usage.add(step)
            logprobs = _logprobs(service, body, step.logprobs)
            for event in _kept(body, step.deltas):
                if delta := _delta(event):
                    yield chunk(step.index, delta, logprobs)
                    logprobs = None
            if step.finish:
                yield chunk(step.index, {}, logprobs, _end(step.finish))
            elif logprobs:
                yield chunk(step.index, {}, logprobs)
    if options and options.include_usage:
        yield head | {"choices": [], "usage": usage.as_json()}


async def complete_chat(service: Service, chat: OpenAIChat) -> dict[str, Any]:
    """The whole answer at once."""
    body = chat.body
    choices = [_Choice() for _ in range(body.n)]
    usage = chat.call.usage()
    answer = chat.head("chat.completion")
    async with service.run([chat.call.request]) as steps:
        async for step in steps:
            usage.add(step)
            choice = choices[step.index]
            choice.events += _kept(body, step.deltas)
            choice.logprobs += step.logprobs
            choice.finish = step.finish
            if step.prompt_logprobs is not None:
                answer["prompt_logprobs"] = prompt_logprobs(service.tokenizer, step.prompt_logprobs)
    answer["choices"] = [
        {
            "index": index,
            "message": collect(choice.events).to_message(),
            "logprobs": _logprobs(service, body, choice.logprobs),
            **_end(choice.finish),
        }
        for index, choice in enumerate(choices)
        if choice.finish
    ]
    return answer | {"usage": usage.as_json()}


@dataclass
class _Choice:
    """One choice of a whole answer, so far."""

    events: list[Event] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish: Finish | None = None


def _kept(body: ChatRequest, events: list[Event]) -> list[Event]:
    """The events that the caller asked to see."""
    if body.include_reasoning:
        return events
    return [event for event in events if not isinstance(event, ReasoningDelta)]


def _delta(event: Event) -> dict[str, Any]:
    match event:
        case ReasoningDelta(text):
            return {"reasoning_content": text}
        case ContentDelta(text):
            return {"content": text}
        case ToolCallStart(index, call_id, name):
            function = {"name": name, "arguments": ""}
            return {"tool_calls": [{"index": index, "id": call_id, "type": "function", "function": function}]}
        case ToolCallArguments(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}
        case ToolCallEnd():
            return {}  # OpenAI's protocol has no mark for it


def _logprobs(service: Service, body: ChatRequest, steps: list[TokenLogprobs]) -> dict[str, Any] | None:
    if not body.logprobs or not steps:
        return None
    return {"content": chat_logprobs(service.tokenizer, steps, body.top_logprobs or 0)}


def _end(finish: Finish) -> dict[str, Any]:
    return {"finish_reason": finish.reason, "stop_reason": finish.stop_reason}


CHATS = Generation("/v1/chat/completions", ChatRequest, prepare_chat, complete_chat, stream_chat)
