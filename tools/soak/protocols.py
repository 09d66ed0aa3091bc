"""The answers of each route, whole and as streams, in one form."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from pydantic_core import from_json

from soak.answers import Answer, Choice, Failure

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
RESPONSES, MESSAGES, GENERATE = "/v1/responses", "/v1/messages", "/generate"
_ANTHROPIC = {"rate_limit_error": 429, "api_error": 500, "overloaded_error": 503, "timeout_error": 504}

Json = dict[str, Any]


@dataclass(frozen=True)
class Protocol:
    """`is_last`: an event that ends a stream in order; None: it ends with [DONE]."""

    whole: Callable[[Json], Answer]
    streamed: Callable[[Iterable[Json]], Answer]
    stream: Json  # fields that ask for a stream with its usage
    is_last: Callable[[Json], bool] | None = None

    def read_stream(self, text: str) -> Answer | Failure:
        lines = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
        is_done = bool(lines) and lines[-1] == "[DONE]"
        if is_done == (self.is_last is not None):
            return failure(lines[-1] if lines else "", None)
        events = [json.loads(line) for line in (lines[:-1] if is_done else lines)]
        if self.is_last is not None and not self.is_last(events[-1]):
            return failure(json.dumps(events[-1]), None)
        return self.streamed(events)


def failure(text: str, status: int | None) -> Failure:
    """`status` None: of an event in a stream, which names its own."""
    try:
        content = json.loads(text)
        if content.get("type") == "response.failed":
            return Failure(500, content["response"]["error"]["message"])
        error = content["error"]
        code = error["code"] if "code" in error else status or _ANTHROPIC[error["type"]]
        if status in (None, code):
            return Failure(code, error["message"])
    except (ValueError, KeyError, TypeError):
        pass
    return Failure(0, f"no error object of status {status}: {text[:200]!r}")


def _openai_whole(body: Json) -> Answer:
    answer = Answer()
    _openai_usage(answer, body["usage"])
    for item in body["choices"]:
        choice = answer.choice(item["index"])
        message = item.get("message", {})
        choice.text = item.get("text") or message.get("content") or ""
        choice.reasoning = message.get("reasoning_content") or ""
        calls = [call["function"] for call in message.get("tool_calls") or ()]
        choice.calls = [[call["name"], call["arguments"]] for call in calls]
        choice.add_logprobs(item["logprobs"])
        choice.finish_reason, choice.stop_reason = item["finish_reason"], item["stop_reason"]
    return answer


def _openai_streamed(events: Iterable[Json]) -> Answer:
    answer = Answer()
    for event in events:
        if event.get("usage"):
            _openai_usage(answer, event["usage"])
        for item in event["choices"]:
            _add_openai(answer.choice(item["index"]), item)
    return answer


def _openai_usage(answer: Answer, usage: Json) -> None:
    answer.set_usage(
        usage["prompt_tokens"],
        usage["completion_tokens"],
        usage["completion_tokens_details"]["reasoning_tokens"],
        usage["total_tokens"],
        usage["prompt_tokens_details"]["cached_tokens"],
    )


def _add_openai(choice: Choice, item: Json) -> None:
    if choice.finish_reason:
        raise ValueError(f"something came after the end of choice {item['index']}: {item}")
    delta = item.get("delta", {})
    choice.text += item.get("text") or delta.get("content") or ""
    choice.reasoning += delta.get("reasoning_content") or ""
    for call in delta.get("tool_calls") or ():
        if call["index"] == len(choice.calls):
            choice.calls.append([call["function"]["name"], ""])
        choice.calls[call["index"]][1] += call["function"]["arguments"]
    choice.add_logprobs(item["logprobs"])
    choice.finish_reason, choice.stop_reason = item["finish_reason"], item.get("stop_reason")


def _response_whole(response: Json) -> Answer:
    answer = Answer()
    choice = answer.choice(0)
    for item in response["output"]:
        if item["type"] == "function_call":
            choice.calls.append([item["name"], item["arguments"]])
        elif item["type"] == "reasoning":
            choice.reasoning += item["content"][0]["text"]
        else:
            choice.text += item["content"][0]["text"]
    _end_response(answer, response)
    return answer


def _response_streamed(events: Iterable[Json]) -> Answer:
    answer = Answer()
    choice = answer.choice(0)
    for event in events:
        match event["type"]:
            case "response.output_item.added" if event["item"]["type"] == "function_call":
                choice.calls.append([event["item"]["name"], ""])
            case "response.function_call_arguments.delta":
                choice.calls[-1][1] += event["delta"]
            case "response.output_text.delta":
                choice.text += event["delta"]
            case "response.reasoning_text.delta":
                choice.reasoning += event["delta"]
            case "response.completed" | "response.incomplete":
                _end_response(answer, event["response"])
    return answer


def _end_response(answer: Answer, response: Json) -> None:
    usage = response["usage"]
    answer.choices[0].finish_reason = response["status"]
    answer.set_usage(
        usage["input_tokens"],
        usage["output_tokens"],
        usage["output_tokens_details"]["reasoning_tokens"],
        usage["total_tokens"],
        usage["input_tokens_details"]["cached_tokens"],
    )


def _message_whole(message: Json) -> Answer:
    answer = Answer()
    choice = answer.choice(0)
    for block in message["content"]:
        match block["type"]:
            case "text":
                choice.text += block["text"]
            case "thinking":
                choice.reasoning += block["thinking"]
            case "tool_use":
                choice.calls.append([block["name"], json.dumps(block["input"])])
    _end_message(answer, message, message["usage"])
    return answer


def _message_streamed(events: Iterable[Json]) -> Answer:
    answer = Answer()
    choice = answer.choice(0)
    for event in events:
        match event["type"]:
            case "content_block_start" if event["content_block"]["type"] == "tool_use":
                choice.calls.append([event["content_block"]["name"], ""])
            case "content_block_delta":
                delta = event["delta"]
                choice.text += delta.get("text", "")
                choice.reasoning += delta.get("thinking", "")
                if "partial_json" in delta:
                    choice.calls[-1][1] += delta["partial_json"]
            case "message_delta":
                _end_message(answer, event["delta"], event["usage"])
    for call in choice.calls:  # what is cut off counts as far as it goes, as in the whole message
        try:
            call[1] = json.dumps(from_json(call[1], allow_partial=True))
        except ValueError:
            call[1] = "{}"
    return answer


def _end_message(answer: Answer, end: Json, usage: Json) -> None:
    choice = answer.choices[0]
    choice.finish_reason, choice.stop_reason = end["stop_reason"], end["stop_sequence"]
    cached = usage["cache_read_input_tokens"]
    prompt, completion = usage["input_tokens"] + cached, usage["output_tokens"]
    reasoning = usage["output_tokens_details"]["thinking_tokens"]
    answer.set_usage(prompt, completion, reasoning, prompt + completion, cached)


def _generated(answers: Json | list[Json]) -> Answer:
    found = answers if isinstance(answers, list) else [answers]
    answer = Answer()
    cached = completion = 0
    for item in found:
        info = item["meta_info"]
        choice = answer.choice(item.get("index", 0))
        choice.text, choice.stop_reason = item["text"], info["finish_reason"].get("matched")
        choice.finish_reason = info["finish_reason"]["type"]
        choice.logprobs = {"ids": [item["output_ids"]]}
        completion += info["completion_tokens"]
        cached = max(cached, info["cached_tokens"])
    prompt = found[0]["meta_info"]["prompt_tokens"]
    answer.set_usage(prompt, completion, 0, prompt + completion, cached)
    return answer


def _generated_streamed(events: Iterable[Json]) -> Answer:
    last = {event.get("index", 0): event for event in events}
    return _generated(list(last.values()))


_OPENAI = Protocol(
    _openai_whole, _openai_streamed, {"stream": True, "stream_options": {"include_usage": True}}
)
PROTOCOLS = {
    CHAT: _OPENAI,
    TEXT: _OPENAI,
    RESPONSES: Protocol(
        _response_whole,
        _response_streamed,
        {"stream": True},
        is_last=lambda event: event["type"] in ("response.completed", "response.incomplete"),
    ),
    MESSAGES: Protocol(
        _message_whole,
        _message_streamed,
        {"stream": True},
        is_last=lambda event: event["type"] == "message_stop",
    ),
    GENERATE: Protocol(_generated, _generated_streamed, {"stream": True}),
}
