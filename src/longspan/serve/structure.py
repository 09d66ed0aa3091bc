"""The fields of a body that say what a reply must obey, and what the engine gets for them."""

from __future__ import annotations

from typing import Any

from longspan.engine.request import SamplingParams
from longspan.errors import RequestError
from longspan.serve.body import CallBody
from longspan.serve.prompts import Chat, ChatPrompt
from longspan.structure import Calls, Structure, StructuredOutputs, Vocabulary, asked_answer, chat_structure

_GUIDED = "guided_"


class StructureBody(CallBody):
    """OpenAI's field, vLLM's, and vLLM's older names for its own."""

    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None

    def sampling(self) -> dict[str, Any]:
        """With `structured_outputs`, whatever its name in the body."""
        given = super().sampling()
        guided = {
            name.removeprefix(_GUIDED): value
            for name in StructureBody.model_fields
            if name.startswith(_GUIDED) and (value := getattr(self, name)) is not None
        }
        if guided and "structured_outputs" in given:
            what = f"`structured_outputs` and `{_GUIDED}{next(iter(guided))}` were both given."
            raise RequestError(what, param="structured_outputs", remedy="Send one of them.")
        return given | ({"structured_outputs": StructuredOutputs(**guided, prefix=_GUIDED)} if guided else {})


def structure_of_text(
    vocabulary: Vocabulary, params: SamplingParams, response_format: dict[str, Any] | None = None
) -> Structure | None:
    """For a reply that is text from its first token on. Raises RequestError naming what can't be enforced.

    Slow for large schemas: run it in a thread.
    """
    answer = asked_answer(response_format, params.structured_outputs)
    return answer.structure(vocabulary) if answer else None


def structure_of_chat(
    vocabulary: Vocabulary, params: SamplingParams, chat: Chat, prompt: ChatPrompt
) -> Structure | None:
    """As `structure_of_text`, for a chat: what its answer must be, and what it must or may call."""
    answer = asked_answer(chat.response_format, params.structured_outputs)
    may_call = [] if chat.tool_choice == "none" else prompt.functions
    calls = Calls(prompt.forced or may_call, bool(prompt.forced), not chat.parallel_tool_calls)
    return chat_structure(
        vocabulary, answer=answer, calls=calls, thinking=prompt.in_reasoning, prefix=prompt.partial_answer
    )
