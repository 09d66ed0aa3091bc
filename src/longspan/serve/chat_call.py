"""One chat on its way through the engine, whatever protocol it came in and its answer goes out in."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from longspan.chat import ReplyParser
from longspan.chat.xtml import CONTROL_TOKENS
from longspan.engine.readers import ChatReader
from longspan.engine.request import Request, SamplingParams
from longspan.errors import RequestError
from longspan.serve.body import CallBody
from longspan.serve.prompts import Chat, chat_prompt
from longspan.serve.service import Service, engine_id
from longspan.serve.structure import structure_of_chat
from longspan.serve.usage import Usage


@dataclass(frozen=True)
class ChatCall:
    """A chat that can be served: what goes to the engine, and what every answer repeats."""

    id: str
    request: Request
    model: str
    created: int  # seconds since 1970
    reasoning_ends_at: frozenset[int] | None  # as `Usage` takes it

    def usage(self) -> Usage:
        return Usage([self.request], self.reasoning_ends_at)


def prepare_call(
    service: Service, chat: Chat, body: CallBody, sampling: dict[str, Any], call_id: str
) -> ChatCall:
    """Renders, encodes and checks. Raises RequestError: what can be refused is refused before any work.

    `sampling`: arguments of `SamplingParams`; without `max_tokens` a reply goes on until the context is full.
    Slow for long chats: run it in a thread.
    """
    model = service.model_name(body.model)
    if not (chat.add_generation_prompt or chat.continue_final_message):
        raise RequestError(
            "`add_generation_prompt` is false, so there is no reply to begin.",
            param="add_generation_prompt",
            remedy="Leave it out, or set `continue_final_message` to continue the last message.",
        )
    arguments: dict[str, Any] = {"max_tokens": None} | sampling
    params = SamplingParams(**arguments)
    service.check_choices(params.n)
    prompt = chat_prompt(service.tokenizer, chat, service.check_text)
    request = Request(
        id=engine_id(call_id),
        prompt_token_ids=prompt.token_ids,
        params=params,
        make_reader=lambda: ChatReader(
            ReplyParser(service.tokenizer, thinking=prompt.in_reasoning),
            params,
            max_calls=0 if chat.tool_choice == "none" else None if chat.parallel_tool_calls else 1,
        ),
        structure=structure_of_chat(service.vocabulary, params, chat, prompt),
        **body.scheduling(),
    )
    service.check([request])
    ends = frozenset(map(service.tokenizer.special_id, CONTROL_TOKENS)) if prompt.in_reasoning else None
    return ChatCall(call_id, request, model, int(time.time()), ends)
