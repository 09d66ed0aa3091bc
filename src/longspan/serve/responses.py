"""POST /v1/responses: the events of a chat as items of OpenAI's newer protocol, streamed or at once.

The whole answer is the response of the stream's last event, so the two cannot differ. Nothing is stored.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from longspan.chat import ContentDelta, Event, ReasoningDelta, ToolCallArguments, ToolCallEnd, ToolCallStart
from longspan.engine.output import Finish, StepOutput
from longspan.serve.chat_call import ChatCall, prepare_call
from longspan.serve.delivery import EventStream
from longspan.serve.failures import in_words_of, message_of, status_of
from longspan.serve.responses_body import ResponsesRequest
from longspan.serve.route import Generation
from longspan.serve.service import Service


@dataclass(frozen=True)
class ResponseCall:
    """A call with the body it came in."""

    body: ResponsesRequest
    call: ChatCall


def prepare_response(service: Service, body: ResponsesRequest, request_id: str) -> ResponseCall:
    """Raises RequestError: what can be refused is refused before any work."""
    chat, names = body.chat()
    with in_words_of(names):
        call_id = body.request_id or f"resp_{request_id}"
        return ResponseCall(body, prepare_call(service, chat, body, body.sampling(), call_id))


async def complete_response(service: Service, response: ResponseCall) -> dict[str, Any]:
    writer = ResponseWriter(response)
    async with service.run([response.call.request]) as steps:
        async for step in steps:
            writer.push(step)
    return writer.response


async def stream_response(service: Service, response: ResponseCall) -> EventStream:
    writer = ResponseWriter(response)

    async def events() -> AsyncGenerator[dict[str, Any], None]:
        async with service.run([response.call.request]) as steps:
            for event in writer.start():
                yield event
            async for step in steps:
                for event in writer.push(step):
                    yield event

    return await EventStream.open(events(), failed=writer.fail, named=True, done=None)


class ResponseWriter:
    """Steps of one choice -> events. Call `start`, then `push` until its step says that the choice has ended.

    `response` is the response object so far. An item is open until an event comes that belongs to another.
    """

    def __init__(self, response: ResponseCall) -> None:
        self._usage = response.call.usage()
        self._number = 0  # of the next event
        self._item: dict[str, Any] | None = None  # the open one, the last of the output
        self.response = _empty_response(response)

    def start(self) -> list[dict[str, Any]]:
        return [self._with_response("response.created"), self._with_response("response.in_progress")]

    def push(self, step: StepOutput) -> list[dict[str, Any]]:
        self._usage.add(step)
        events = [event for delta in step.deltas for event in self._delta(delta)]
        return events + self._finish(step.finish) if step.finish else events

    def fail(self, error: Exception) -> dict[str, Any]:
        """The last event of a stream that can't go on."""
        code = "rate_limit_exceeded" if status_of(error) == 429 else "server_error"
        self.response |= {"status": "failed", "error": {"code": code, "message": message_of(error)}}
        return self._with_response("response.failed")

    def _delta(self, delta: Event) -> list[dict[str, Any]]:
        match delta:
            case ReasoningDelta(text):
                return [*self._text_item("reasoning"), self._more(text)]
            case ContentDelta(text):
                return [*self._text_item("message"), self._more(text)]
            case ToolCallStart(_, call_id, name):
                call = {"type": "function_call", "call_id": call_id, "name": name, "arguments": ""}
                return [*self._close("completed"), self._open("fc", call)]
            case ToolCallArguments(_, text):
                return [self._more(text)]
            case ToolCallEnd():
                return self._close("completed")

    def _text_item(self, kind: str) -> list[dict[str, Any]]:
        """Opens an item of reasoning or of the answer, unless one is open."""
        if self._item is not None and self._item["type"] == kind:
            return []
        events = self._close("completed")
        if kind == "reasoning":
            events.append(self._open("rs", {"type": kind, "summary": [], "content": []}))
            part: dict[str, Any] = {"type": "reasoning_text", "text": ""}
        else:
            events.append(self._open("msg", {"type": kind, "role": "assistant", "content": []}))
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        events.append(self._event("response.content_part.added", content_index=0, part=part))
        self._item_now["content"].append(part)
        return events

    def _open(self, prefix: str, fields: dict[str, Any]) -> dict[str, Any]:
        output = self.response["output"]
        self._item = {"id": f"{prefix}_{self.response['id']}_{len(output)}"} | fields
        self._item["status"] = "in_progress"
        output.append(self._item)
        return self._event("response.output_item.added", item=self._item)

    def _more(self, text: str) -> dict[str, Any]:
        """More of the open item."""
        item = self._item_now
        if item["type"] == "function_call":
            item["arguments"] += text
            return self._event("response.function_call_arguments.delta", delta=text)
        item["content"][0]["text"] += text
        return self._event(
            f"response.{_TEXT[item['type']]}.delta", content_index=0, delta=text, **_extra(item)
        )

    def _close(self, status: str) -> list[dict[str, Any]]:
        if (item := self._item) is None:
            return []
        item["status"] = status
        if item["type"] == "function_call":
            fields = {"name": item["name"], "arguments": item["arguments"]}
            events = [self._event("response.function_call_arguments.done", **fields)]
        else:
            part = item["content"][0]
            done = f"response.{_TEXT[item['type']]}.done"
            events = [
                self._event(done, content_index=0, text=part["text"], **_extra(item)),
                self._event("response.content_part.done", content_index=0, part=part),
            ]
        events.append(self._event("response.output_item.done", item=item))
        self._item = None
        return events

    def _finish(self, finish: Finish) -> list[dict[str, Any]]:
        status = "incomplete" if finish.reason == "length" else "completed"
        events = self._close(status)
        usage = self._usage
        self.response |= {
            "status": status,
            "completed_at": int(time.time()) if status == "completed" else None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "usage": {
                "input_tokens": usage.prompt_tokens,
                "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
                "output_tokens": usage.completion_tokens,
                "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
                "total_tokens": usage.total_tokens,
            },
        }
        return [*events, self._with_response(f"response.{status}")]

    @property
    def _item_now(self) -> dict[str, Any]:
        assert self._item is not None, "a delta of an item came before its start"
        return self._item

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        """An event about the open item."""
        place = {"output_index": len(self.response["output"]) - 1}
        if "item" not in fields:
            place["item_id"] = self._item_now["id"]
        return self._numbered(kind, place | fields)

    def _with_response(self, kind: str) -> dict[str, Any]:
        return self._numbered(kind, {"response": self.response})

    def _numbered(self, kind: str, fields: dict[str, Any]) -> dict[str, Any]:
        """Copied, as response and items change before it is sent."""
        event = {"type": kind, "sequence_number": self._number} | deepcopy(fields)
        self._number += 1
        return event


_TEXT = {"reasoning": "reasoning_text", "message": "output_text"}


def _extra(item: dict[str, Any]) -> dict[str, Any]:
    """What OpenAI's clients demand in events of the answer's text."""
    return {"logprobs": []} if item["type"] == "message" else {}


def _empty_response(response: ResponseCall) -> dict[str, Any]:
    """What was asked for, and nothing yet of the answer."""
    body, call = response.body, response.call
    params = call.request.params
    return {
        "id": call.id,
        "object": "response",
        "created_at": call.created,
        "completed_at": None,
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "model": call.model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls,
        "previous_response_id": None,
        "reasoning": {"effort": body.reasoning.get("effort"), "summary": None},
        "service_tier": "default",
        "store": False,
        "temperature": params.temperature,
        "text": {"format": body.text.get("format") or {"type": "text"}},
        "tool_choice": body.tool_choice,
        "tools": body.tools,
        "top_p": params.top_p,
        "truncation": "disabled",
        "usage": None,
        "user": body.user,
    }


RESPONSES = Generation(
    "/v1/responses", ResponsesRequest, prepare_response, complete_response, stream_response
)
