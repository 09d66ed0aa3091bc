"""POST /v1/completions: one or several prompts, each continued `n` times, as plain text."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass, replace
from typing import Any

from longspan.engine.output import Finish, StepOutput, TokenLogprobs
from longspan.engine.request import Request
from longspan.errors import RequestError
from longspan.serve.delivery import EventStream
from longspan.serve.logprobs import completion_logprobs, prompt_logprobs
from longspan.serve.protocol import CompletionRequest
from longspan.serve.route import Generation
from longspan.serve.service import Service, engine_id
from longspan.serve.text_request import text_request, to_token_ids
from longspan.serve.usage import Usage

DEFAULT_MAX_TOKENS = 16  # OpenAI's


@dataclass(frozen=True)
class CompletionCall:
    """A completion ready to run: one engine request per prompt."""

    body: CompletionRequest
    id: str
    requests: list[Request]
    first_choices: dict[str, int]  # request id -> number of its first choice
    echoes: list[str]  # the text of each prompt if it is to be repeated, else ""
    created: int
    model: str

    def head(self) -> dict[str, Any]:
        return {"id": self.id, "object": "text_completion", "created": self.created, "model": self.model}

    def choice_of(self, step: StepOutput) -> int:
        """Choices are numbered through: all those of the first prompt, then all those of the second."""
        return self.first_choices[step.request_id] + step.index

    def usage(self) -> Usage:
        return Usage(self.requests)


def prepare_completion(service: Service, body: CompletionRequest, request_id: str) -> CompletionCall:
    """Checks and encodes. Raises RequestError: what can be refused is refused before any work."""
    model = service.model_name(body.model)
    sampling = body.sampling()
    if body.echo and body.logprobs is not None:
        if body.stream:
            raise RequestError(
                "`echo` with `logprobs` is not available in a stream.",
                param="echo",
                remedy="Set `stream` to false.",
            )
        # The log-probabilities of an echoed prompt are asked for together with those of its continuation.
        sampling.setdefault("prompt_logprobs", body.logprobs)
    if body.only_echo:
        # The engine makes one token of every prompt; `_outputs` leaves it out.
        for name in ("stop", "stop_token_ids", "min_tokens"):
            sampling.pop(name, None)
        sampling |= {"max_tokens": 1, "ignore_eos": True}
    call_id = body.request_id or f"cmpl-{request_id}"
    texts_or_ids = _prompts(body)
    service.check_choices(len(texts_or_ids) * body.n)
    prompts = [to_token_ids(service, prompt) for prompt in texts_or_ids]
    requests = [
        text_request(
            service,
            engine_id(call_id),
            token_ids,
            sampling,
            default_max_tokens=DEFAULT_MAX_TOKENS,
            response_format=body.response_format,
            **body.scheduling(),
        )
        for token_ids in prompts
    ]
    service.check(requests)
    echoes = [service.tokenizer.decode(token_ids) if body.echo else "" for token_ids in prompts]
    first_choices = {request.id: i * body.n for i, request in enumerate(requests)}
    return CompletionCall(body, call_id, requests, first_choices, echoes, int(time.time()), model)


def _prompts(body: CompletionRequest) -> list[str] | list[list[int]]:
    if isinstance(body.prompt, str):
        return [body.prompt]
    if not body.prompt:
        raise RequestError(
            "`prompt` is empty.", param="prompt", remedy="Send a text, token ids or a list of either."
        )
    return [body.prompt] if isinstance(body.prompt[0], int) else body.prompt  # type: ignore[return-value]


async def _outputs(call: CompletionCall, steps: AsyncIterator[StepOutput]) -> AsyncIterator[StepOutput]:
    async for step in steps:
        yield replace(step, deltas=[], token_ids=[], logprobs=[]) if call.body.only_echo else step


async def stream_completion(service: Service, call: CompletionCall) -> EventStream:
    return await EventStream.open(_chunks(service, call))


async def _chunks(service: Service, call: CompletionCall) -> AsyncGenerator[dict[str, Any], None]:
    """Chunks of text, each choice's end, then the usage if asked for."""
    body, options = call.body, call.body.stream_options
    usage = call.usage()
    offsets = [len(echo) for echo in call.echoes for _ in range(body.n)]  # of the next token

    def chunk(choice: dict[str, Any]) -> dict[str, Any]:
        chunk = call.head() | {"choices": [choice]}
        if options and options.continuous_usage_stats:
            chunk["usage"] = usage.as_json()
        return chunk

    async with service.run(call.requests) as steps:
        if body.echo:
            for index in range(len(offsets)):
                yield chunk(_choice(index, call.echoes[index // body.n]))
        async for step in _outputs(call, steps):
            usage.add(step)
            index, text, logprobs = call.choice_of(step), _text(step), None
            if step.logprobs:
                args = step.token_ids, step.logprobs, body.logprobs or 0, offsets[index]
                logprobs = completion_logprobs(service.tokenizer, *args)
                offsets[index] += sum(map(len, logprobs["tokens"]))
            if text or logprobs or step.finish:
                yield chunk(_choice(index, text, logprobs, step.finish))
    if options and options.include_usage:
        yield call.head() | {"choices": [], "usage": usage.as_json()}


async def complete_text(service: Service, call: CompletionCall) -> dict[str, Any]:
    """The whole answer at once."""
    outputs: list[list[StepOutput]] = [[] for _ in range(len(call.requests) * call.body.n)]
    usage = call.usage()
    async with service.run(call.requests) as steps:
        async for step in _outputs(call, steps):
            usage.add(step)
            outputs[call.choice_of(step)].append(step)
    choices = [_whole_choice(service, call, index, outputs) for index in range(len(outputs))]
    return call.head() | {"choices": choices, "usage": usage.as_json()}


def _whole_choice(
    service: Service, call: CompletionCall, index: int, outputs: list[list[StepOutput]]
) -> dict[str, Any]:
    body, prompt = call.body, index // call.body.n
    steps = outputs[index]
    # The engine reports on the prompt once, with its first choice.
    of_prompt = outputs[prompt * body.n][0].prompt_logprobs
    token_ids = [token for step in steps for token in step.token_ids]
    logprobs: list[TokenLogprobs | None] = [entry for step in steps for entry in step.logprobs]
    text, echo = "".join(map(_text, steps)), call.echoes[prompt]
    columns = None
    if body.logprobs is not None:
        if body.echo and of_prompt is not None:
            token_ids = call.requests[prompt].prompt_token_ids + token_ids
            logprobs = of_prompt + logprobs
        columns = completion_logprobs(service.tokenizer, token_ids, logprobs, body.logprobs, 0)
    choice = _choice(index, echo + text, columns, steps[-1].finish)
    if body.prompt_logprobs is not None and of_prompt is not None:
        choice["prompt_logprobs"] = prompt_logprobs(service.tokenizer, of_prompt)
    return choice


def _choice(index: int, text: str, logprobs: Any = None, finish: Finish | None = None) -> dict[str, Any]:
    return {
        "index": index,
        "text": text,
        "logprobs": logprobs,
        "finish_reason": finish.reason if finish else None,
        "stop_reason": finish.stop_reason if finish else None,
    }


def _text(step: StepOutput) -> str:
    return "".join(delta.text for delta in step.deltas)


COMPLETIONS = Generation(
    "/v1/completions", CompletionRequest, prepare_completion, complete_text, stream_completion
)
