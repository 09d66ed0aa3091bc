"""Bodies of OpenAI's older routes, with vLLM's extensions, and of /tokenize and /detokenize."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, WithJsonSchema, model_validator

from longspan.engine.request import MAX_STOPS
from longspan.errors import RequestError
from longspan.serve.body import Body, FastList, Refused, json_kind, keep_supported
from longspan.serve.prompts import Chat
from longspan.serve.structure import StructureBody
from longspan.serve.thinking import thinking_options

_NO_STORE = Refused("Nothing is stored: leave it out or send false.", (False,))
_TIER = Refused('There is one tier: leave it out, or send "auto" or "default".', ("auto", "default"))
REFUSED_EVERYWHERE = {
    "best_of": Refused("Leave it out, or use `n` and choose among the answers.", (1,)),
    "early_stopping": Refused("It belongs to beam search, which is not available.", (False,)),
    "use_beam_search": Refused("Beam search is not available; leave it out or send false.", (False,)),
    "length_penalty": Refused("It belongs to beam search, which is not available.", (1, 1.0)),
    "truncate_prompt_tokens": Refused("Prompts are never cut; shorten the prompt before sending it."),
    "allowed_token_ids": Refused("Use `logit_bias` instead."),
    "bad_words": Refused("Use `logit_bias` instead."),
    "spaces_between_special_tokens": Refused("Leave it out; tokens are joined as they are.", (True, False)),
    # SGLang's router sends them with every request.
    "no_stop_trim": Refused("Use `include_stop_str_in_output`.", (False,)),
    "return_hidden_states": Refused("They are not available; leave it out or send false.", (False,)),
}
REFUSED_IN_CHAT = {
    "skip_special_tokens": Refused("Markup is read, never shown; leave it out or send true.", (True,)),
    "functions": Refused("Use `tools`.", ([],)),
    "function_call": Refused("Use `tool_choice`."),
    "audio": Refused("Replies are text; leave it out."),
    "modalities": Refused('Replies are text: leave it out or send ["text"].', (["text"],)),
    "prediction": Refused("Predicted outputs are not available; leave it out."),
    "web_search_options": Refused("There is no built-in web search; declare your own in `tools`."),
    "verbosity": Refused('Only "medium", which changes nothing, is accepted.', ("medium",)),
    "service_tier": _TIER,
    "store": _NO_STORE,
    "echo": Refused("Leave it out or send false.", (False,)),
    "chat_template": Refused("The format of this model family is fixed; use `chat_template_kwargs`."),
    "separate_reasoning": Refused("Use `include_reasoning`.", (True,)),
    "stream_reasoning": Refused("Use `include_reasoning`.", (True,)),
    "documents": Refused("Put documents into a message."),
}
REFUSED_IN_COMPLETIONS = {
    "suffix": Refused("The model continues text and does not fill in the middle; leave it out."),
    "messages": Refused("Chats belong to /v1/chat/completions."),
}


class StreamOptions(BaseModel):
    """`include_usage` adds a last chunk without choices, `continuous_usage_stats` usage on every chunk."""

    model_config = ConfigDict(strict=True)
    include_usage: bool = False
    continuous_usage_stats: bool = False

    @model_validator(mode="before")
    @classmethod
    def _known(cls, content: Any) -> Any:
        if not isinstance(content, dict):
            return content
        return keep_supported(content, cls.model_fields, {}, where="stream_options.")


class GenerationBody(StructureBody):
    """What chats and completions share."""

    max_tokens: int | None = None
    stop: str | Annotated[list[str], Field(fail_fast=True, max_length=MAX_STOPS)] | None = None
    prompt_logprobs: int | None = None
    n: int = 1
    stream_options: StreamOptions | None = None

    @model_validator(mode="after")
    def _stream_options_need_stream(self) -> GenerationBody:
        if self.stream_options is not None and not self.stream:
            raise RequestError(
                "`stream_options` was given without `stream`.",
                param="stream_options",
                remedy="Set `stream` to true or leave it out.",
            )
        if self.stream and self.prompt_logprobs is not None:
            raise RequestError(
                "`prompt_logprobs` is not available in a stream.",
                param="prompt_logprobs",
                remedy="Set `stream` to false.",
            )
        return self


class ChatRequest(GenerationBody):
    """POST /v1/chat/completions."""

    refused = REFUSED_EVERYWHERE | REFUSED_IN_CHAT

    messages: list[Any]
    tools: FastList[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool = True
    reasoning_effort: str | None = None
    thinking: dict[str, Any] | bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    include_reasoning: bool = True
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = Field(default=None, ge=0, le=20)

    def chat(self) -> Chat:
        return _chat(self, parallel_tool_calls=self.parallel_tool_calls)

    def sampling(self) -> dict[str, Any]:
        given = super().sampling()
        given.pop("logprobs", None)  # here it is a switch
        longer = self.max_completion_tokens
        if longer is not None and given.setdefault("max_tokens", longer) != longer:
            raise RequestError(
                f"`max_tokens` is {self.max_tokens} and `max_completion_tokens` is {longer}.",
                param="max_completion_tokens",
                remedy="They mean the same: send one of them.",
            )
        if self.top_logprobs is not None and not self.logprobs:
            raise RequestError(
                "`top_logprobs` was given without `logprobs`.",
                param="top_logprobs",
                remedy="Set `logprobs` to true.",
            )
        if self.logprobs:
            given["logprobs"] = self.top_logprobs or 0
        return given


def _check_prompt(prompt: Any) -> Any:
    """The type of the first item decides what the others must be."""
    if isinstance(prompt, list) and prompt and type(prompt[0]) in (str, int, list):
        _check_items(prompt, type(prompt[0]), "prompt")
        if isinstance(prompt[0], list):
            for i, ids in enumerate(prompt):
                _check_items(ids, int, f"prompt[{i}]")
    elif not isinstance(prompt, str) and prompt != []:
        what = "`prompt` is neither a text nor token ids, nor a list of either."
        raise RequestError(what, param="prompt", remedy='Send a text, such as "In the beginning".')
    return prompt


def _check_items(items: list[Any], kind: type, where: str) -> None:
    wrong = next((i for i, item in enumerate(items) if type(item) is not kind), None)
    if wrong is not None:
        raise RequestError(
            f"`{where}[{wrong}]` is {json_kind(items[wrong])}.",
            param=f"{where}[{wrong}]",
            remedy="A prompt is a text, a list of texts, a list of token ids or a list of such lists.",
        )


# As a union of lists every item would be tried as every type.
Prompt = Annotated[
    str | list[str] | list[int] | list[list[int]],
    PlainValidator(_check_prompt),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"type": "string"}},
                {"type": "array", "items": {"type": "integer"}},
                {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}},
            ]
        }
    ),
]


class CompletionRequest(GenerationBody):
    """POST /v1/completions. Text in `prompt` is plain text; control tokens can be given as token ids."""

    refused = REFUSED_EVERYWHERE | REFUSED_IN_COMPLETIONS

    prompt: Prompt
    echo: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = Field(default=None, ge=0, le=20)

    @property
    def only_echo(self) -> bool:
        """Nothing is to be generated."""
        return self.echo and self.max_tokens == 0


class TokenizeRequest(Body):
    """POST /tokenize: a text (`prompt`) or a chat (`messages` and the fields that shape its rendering)."""

    refused: ClassVar[dict[str, Refused]] = {
        "add_special_tokens": Refused("This tokenizer adds none; leave it out.", (True, False)),
    }

    model: str | None = None
    prompt: str | None = None
    messages: list[Any] | None = None
    tools: FastList[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    response_format: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    thinking: dict[str, Any] | bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    return_token_strs: bool = False

    def chat(self) -> Chat:
        return _chat(self)


def _chat(body: ChatRequest | TokenizeRequest, **more: Any) -> Chat:
    return Chat(
        messages=body.messages or [],
        tools=body.tools,
        tool_choice=body.tool_choice,
        response_format=body.response_format,
        thinking=thinking_options(body.reasoning_effort, body.thinking, body.chat_template_kwargs),
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        **more,
    )


class DetokenizeRequest(Body):
    """POST /detokenize."""

    model: str | None = None
    tokens: FastList[int]
