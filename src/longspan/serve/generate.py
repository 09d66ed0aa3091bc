"""SGLang's POST /generate: each event of a stream, and the whole answer, holds all that came so far."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any

from longspan.engine.output import Finish, Logprob, StepOutput, TokenLogprobs
from longspan.engine.request import Request
from longspan.serve.body import illegal
from longspan.serve.delivery import EventStream
from longspan.serve.failures import in_words_of
from longspan.serve.generate_body import NAMES, GenerateRequest, sampling
from longspan.serve.logprobs import finite, token_text, top_tokens
from longspan.serve.route import Generation
from longspan.serve.service import Service, engine_id
from longspan.serve.text_request import text_request, to_token_ids

DEFAULT_MAX_TOKENS = 128  # SGLang's


@dataclass(frozen=True)
class PromptCall:
    """One prompt of the body and all its choices."""

    rid: str
    request: Request
    logprobs_from: int | None  # position in the prompt of the first log-probability; None: of the reply only


@dataclass(frozen=True)
class GenerateCall:
    body: GenerateRequest
    prompts: list[PromptCall]
    is_list: bool


def prepare_generate(service: Service, body: GenerateRequest, request_id: str) -> GenerateCall:
    """Raises RequestError: what can be refused is refused before any work."""
    service.model_name(body.model)
    prompts = body.prompts()
    count = len(prompts)
    given = [sampling(params) for params in body.for_each("sampling_params", body.sampling_params, count)]
    service.check_choices(sum(arguments["n"] for arguments in given))
    names = [request_id] if count == 1 else [f"{request_id}-{i}" for i in range(count)]
    rids = names if body.rid is None else body.for_each("rid", body.rid, count)
    wants = body.for_each("return_logprob", body.return_logprob, count)
    starts = body.for_each("logprob_start_len", body.logprob_start_len, count)
    tops = body.for_each("top_logprobs_num", body.top_logprobs_num, count)
    calls = []
    for i, prompt in enumerate(prompts):
        with in_words_of(NAMES):
            token_ids = to_token_ids(service, prompt)
            length = len(token_ids)
            start = starts[i] if wants[i] and starts[i] < length else -1
            if start < -1:
                raise illegal("logprob_start_len", start, "a position in the prompt, or -1")
            if wants[i]:
                given[i] |= {"logprobs": tops[i]} | ({"prompt_logprobs": tops[i]} if start >= 0 else {})
            request = text_request(
                service,
                engine_id(rids[i]),
                token_ids,
                given[i],
                default_max_tokens=DEFAULT_MAX_TOKENS,
                **body.scheduling(),
            )
            service.check([request])
        calls.append(PromptCall(rids[i], request, start if start >= 0 else None))
    return GenerateCall(body, calls, body.is_batch or calls[0].request.params.n > 1)


async def complete_generate(service: Service, call: GenerateCall) -> Any:
    writer = GenerateWriter(service, call)
    async with service.run(writer.requests, tells_aborts=True) as steps:
        async for step in steps:
            writer.push(step)
    answers = writer.answers()
    return answers if call.is_list else answers[0]


async def stream_generate(service: Service, call: GenerateCall) -> EventStream:
    async def events() -> AsyncGenerator[dict[str, Any], None]:
        writer = GenerateWriter(service, call)
        async with service.run(writer.requests, tells_aborts=True) as steps:
            async for step in steps:
                yield writer.push(step)

    return await EventStream.open(events())


@dataclass
class _Choice:
    """What came so far of one choice."""

    call: PromptCall
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    cached_tokens: int = 0
    finish: Finish | None = None


class GenerateWriter:
    """Steps -> answers so far. Choices are numbered prompt by prompt."""

    def __init__(self, service: Service, call: GenerateCall) -> None:
        self._tokenizer = service.tokenizer
        self._call = call
        self.requests = [prompt.request for prompt in call.prompts]
        self._choices = [_Choice(prompt) for prompt in call.prompts for _ in range(prompt.request.params.n)]
        self._first: dict[str, int] = {}  # request id -> number of its first choice
        for number, choice in enumerate(self._choices):
            self._first.setdefault(choice.call.request.id, number)
        self._of_prompt: dict[str, list[TokenLogprobs | None]] = {}  # request id -> of the whole prompt

    def push(self, step: StepOutput) -> dict[str, Any]:
        number = self._first[step.request_id] + step.index
        choice = self._choices[number]
        choice.text += "".join(delta.text for delta in step.deltas)
        choice.token_ids += step.token_ids
        choice.logprobs += step.logprobs
        choice.cached_tokens += step.cached_tokens
        choice.finish = step.finish
        if step.prompt_logprobs is not None:
            self._of_prompt[step.request_id] = step.prompt_logprobs
        return self._answer(number)

    def answers(self) -> list[dict[str, Any]]:
        return [self._answer(number) for number in range(len(self._choices))]

    def _answer(self, number: int) -> dict[str, Any]:
        choice = self._choices[number]
        request, finish = choice.call.request, choice.finish
        info: dict[str, Any] = {
            "id": choice.call.rid,
            "finish_reason": finish and _reason(choice, finish),
            "prompt_tokens": len(request.prompt_token_ids),
            "completion_tokens": len(choice.token_ids),
            "cached_tokens": choice.cached_tokens,
        }
        if finish:
            info["e2e_latency"] = finish.times.finished - finish.times.arrived
        if request.params.logprobs is not None:
            info |= self._logprobs(choice)
        answer = {"text": choice.text, "output_ids": list(choice.token_ids), "meta_info": info}
        return answer | ({"index": number} if self._call.is_list else {})

    def _logprobs(self, choice: _Choice) -> dict[str, Any]:
        start, request = choice.call.logprobs_from, choice.call.request
        prompt: list[tuple[int, TokenLogprobs | None]] = []
        if start is not None and request.id in self._of_prompt:
            found = self._of_prompt[request.id][start + 1 :]
            # As SGLang does it, the first has none, wherever it is.
            prompt = list(zip(request.prompt_token_ids[start:], [None, *found], strict=True))
        reply: list[tuple[int, TokenLogprobs | None]]
        reply = list(zip(choice.token_ids, choice.logprobs, strict=True))
        columns: dict[str, list[Any]] = {
            "input_token_logprobs": self._chosen(prompt),
            "output_token_logprobs": self._chosen(reply),
        }
        if count := request.params.logprobs:
            columns["input_top_logprobs"] = self._top(prompt, count)
            columns["output_top_logprobs"] = self._top(reply, count)
        return columns

    def _chosen(self, entries: list[tuple[int, TokenLogprobs | None]]) -> list[list[Any]]:
        return [self._entry(token, None if found is None else found[token]) for token, found in entries]

    def _top(
        self, entries: list[tuple[int, TokenLogprobs | None]], count: int
    ) -> list[list[list[Any]] | None]:
        """The `count` likeliest of each position."""
        return [
            None
            if found is None
            else [self._entry(token, found[token]) for token in top_tokens(found, count)]
            for _, found in entries
        ]

    def _entry(self, token: int, found: Logprob | None) -> list[Any]:
        """[log-probability, id, text if asked for]"""
        text = token_text(self._tokenizer, token) if self._call.body.return_text_in_logprobs else None
        return [found and finite(found.logprob), token, text]


def _reason(choice: _Choice, finish: Finish) -> dict[str, Any]:
    match finish.reason:
        case "length":
            return {"type": "length", "length": len(choice.token_ids)}
        case "abort":
            return {"type": "abort", "message": "The request was ended by /abort_request."}
    ended_by = choice.token_ids[-1] if choice.token_ids else None
    matched = finish.stop_reason if finish.stop_reason is not None else ended_by
    return {"type": "stop", "matched": matched}


GENERATE = Generation("/generate", GenerateRequest, prepare_generate, complete_generate, stream_generate)
