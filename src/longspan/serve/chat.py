"""POST /v1/chat/completions: a body becomes an engine request, its events OpenAI's deltas or one message."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from typing import Any

from longspan.chat import (
    ContentDelta,
    Event,
    ForcedToolCall,
    ReasoningDelta,
    ReplyParser,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
    collect,
)
from longspan.chat.xtml import CONTROL_TOKENS
from longspan.engine.output import Finish, TokenLogprobs
from longspan.engine.readers import ChatReader
from longspan.engine.request import Request, SamplingParams
from longspan.errors import RequestError
from longspan.serve.logprobs import chat_logprobs, prompt_logprobs
from longspan.serve.prompts import ChatPrompt, chat_prompt
from longspan.serve.protocol import ChatRequest
from longspan.serve.service import Service
from longspan.serve.usage import Usage


@dataclass(frozen=True)
class ChatCall:
    """A chat request ready to run, with the fields that every chunk of its answer repeats."""

    body: ChatRequest
    request: Request
    prompt: ChatPrompt
    created: int
    model: str

    def head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.body.request_id or self.request.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
        }


def prepare_chat(service: Service, body: ChatRequest) -> ChatCall:
    """Checks, renders and encodes. Raises RequestError: what can be refused is refused before any work."""
    model = service.model_name(body.model)
    if not (body.add_generation_prompt or body.continue_final_message):
        raise RequestError(
            "`add_generation_prompt` is false, so there is no reply to begin.",
            param="add_generation_prompt",
            remedy="Leave it out, or set `continue_final_message` to continue the last message.",
        )
    sampling: dict[str, Any] = {"max_tokens": None} | body.sampling()
    params = SamplingParams(**sampling)
    prompt = chat_prompt(service.tokenizer, body, service.check_text)
    request = Request(
        id=f"chatcmpl-{uuid.uuid4().hex}",
        prompt_token_ids=prompt.token_ids,
        params=params,
        make_reader=lambda: ChatReader(
            ReplyParser(service.tokenizer, thinking=prompt.in_reasoning),
            params,
            max_calls=0 if body.tool_choice == "none" else None if body.parallel_tool_calls else 1,
        ),
        make_constraint=_constraint(service, prompt),
    )
    service.check_choices(params.n)
    service.check([request])
    return ChatCall(body, request, prompt, int(time.time()), model)


def _constraint(service: Service, prompt: ChatPrompt) -> Callable[[], ForcedToolCall] | None:
    if not prompt.forced:
        return None
    return lambda: ForcedToolCall(service.tokenizer, prompt.forced, thinking=prompt.in_reasoning)


async def stream_chat(service: Service, call: ChatCall) -> AsyncGenerator[dict[str, Any], None]:
    """Chunks: the role of each choice, its deltas, its end, and the usage if asked for."""
    body, options = call.body, call.body.stream_options
    head = call.head("chat.completion.chunk")
    usage = _usage(service, call)

    def chunk(
        index: int, delta: dict[str, Any], logprobs: Any = None, end: dict[str, Any] | None = None
    ) -> dict:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None} | (end or {})
        chunk = head | {"choices": [choice]}
        if options and options.continuous_usage_stats:
            chunk["usage"] = usage.as_json()
        return chunk

    async with service.run([call.request]) as steps:
        for index in range(body.n):
            yield chunk(index, {"role": "assistant", "content": ""})
        async for step in steps:
            usage.add(step)
            logprobs = _logprobs(service, body, step.logprobs)
            for event in _kept(call, step.deltas):
                if delta := _delta(event):
                    yield chunk(step.index, delta, logprobs)
                    logprobs = None
            if step.finish:
                yield chunk(step.index, {}, logprobs, _end(step.finish))
            elif logprobs:
                yield chunk(step.index, {}, logprobs)
    if options and options.include_usage:
        yield head | {"choices": [], "usage": usage.as_json()}


async def complete_chat(service: Service, call: ChatCall) -> dict[str, Any]:
    """The whole answer at once."""
    choices = [_Choice() for _ in range(call.body.n)]
    usage = _usage(service, call)
    answer = call.head("chat.completion")
    async with service.run([call.request]) as steps:
        async for step in steps:
            usage.add(step)
            choice = choices[step.index]
            choice.events += _kept(call, step.deltas)
            choice.logprobs += step.logprobs
            choice.finish = step.finish
            if step.prompt_logprobs is not None:
                answer["prompt_logprobs"] = prompt_logprobs(service.tokenizer, step.prompt_logprobs)
    answer["choices"] = [
        {
            "index": index,
            "message": collect(choice.events).to_message(),
            "logprobs": _logprobs(service, call.body, choice.logprobs),
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


def _usage(service: Service, call: ChatCall) -> Usage:
    control_ids = {service.tokenizer.special_id(token) for token in CONTROL_TOKENS}
    return Usage(len(call.request.prompt_token_ids), control_ids if call.prompt.in_reasoning else None)


def _kept(call: ChatCall, events: list[Event]) -> list[Event]:
    """The events that the caller asked to see."""
    if call.body.include_reasoning:
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
