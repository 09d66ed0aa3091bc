"""Bodies of the HTTP routes. A field is honoured, or refused by name with what would have been accepted.

`null` means "not given", as in OpenAI's API. Ranges of the sampling fields belong to `SamplingParams`, the
structure of chat messages to `longspan.chat`.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationError,
    WithJsonSchema,
    model_validator,
)

from longspan.engine.request import MAX_STOPS
from longspan.errors import RequestError
from longspan.serve.json_text import read_json

_SHOWN = 80  # characters of a field's name


@dataclass(frozen=True)
class Refused:
    """A field of OpenAI's or vLLM's API that is known and not supported; `harmless` values change nothing."""

    remedy: str
    harmless: tuple[Any, ...] = ()


_NO_STORE = Refused("Nothing is stored: leave it out or send false.", (False,))
_TIER = Refused('There is one tier: leave it out, or send "auto" or "default".', ("auto", "default"))
_GUIDED = Refused(
    "Structured output is not available; describe the format in the prompt, as plain text.",
    ({"type": "text"},),
)

REFUSED_EVERYWHERE = {
    "use_beam_search": Refused("Beam search is not available; leave it out or send false.", (False,)),
    "length_penalty": Refused("It belongs to beam search, which is not available.", (1, 1.0)),
    "response_format": _GUIDED,
    "guided_json": _GUIDED,
    "guided_regex": _GUIDED,
    "guided_choice": _GUIDED,
    "guided_grammar": _GUIDED,
    "structured_outputs": _GUIDED,
    "truncate_prompt_tokens": Refused("Prompts are never cut; shorten the prompt before sending it."),
    "allowed_token_ids": Refused("Use `logit_bias` instead."),
    "bad_words": Refused("Use `logit_bias` instead."),
    "priority": Refused("Requests are served in order of arrival; leave it out or send 0.", (0,)),
    "spaces_between_special_tokens": Refused("Leave it out; tokens are joined as they are.", (True, False)),
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
    "documents": Refused("Put documents into a message."),
}
REFUSED_IN_COMPLETIONS = {
    "suffix": Refused("The model continues text and does not fill in the middle; leave it out."),
    "best_of": Refused("Leave it out, or use `n` and choose among the answers.", (1,)),
    "messages": Refused("Chats belong to /v1/chat/completions."),
}


_T = TypeVar("_T")
# Without fail_fast a list with a million wrong items would give a million errors.
FastList = Annotated[list[_T], Field(fail_fast=True)]


class Body(BaseModel):
    """A JSON body; read it with `parse_body`. `refused`: known fields that are not supported."""

    model_config = ConfigDict(strict=True)
    refused: ClassVar[dict[str, Refused]] = {}


AnyBody = TypeVar("AnyBody", bound=Body)


def parse_body(raw: bytes, kind: type[AnyBody]) -> AnyBody:
    """The body of a request, whatever its header says it is. Raises RequestError naming the field.

    Slow for large bodies: run it in a thread.
    """
    content = read_json(raw)
    if not isinstance(content, dict):
        raise RequestError(f"The request body is {_json_kind(content)}; a JSON object is expected.")
    try:
        return kind.model_validate(_keep_supported(content, list(kind.model_fields), kind.refused))
    except ValidationError as error:
        raise _first_problem(error) from error


def _keep_supported(
    content: dict[str, Any], known: list[str], refused: dict[str, Refused], where: str = ""
) -> dict[str, Any]:
    kept = {}
    for name, value in content.items():
        if value is None:
            continue
        if name in known:
            kept[name] = value
        elif name not in refused:
            shown = name[:_SHOWN]
            close = difflib.get_close_matches(shown, known, n=1, cutoff=0.7)
            hint = f"Did you mean `{close[0]}`?" if close else f"Known fields: {', '.join(sorted(known))}."
            raise RequestError(f"Unknown field `{where}{shown}`.", param=where + shown, remedy=hint)
        elif not any(value == ok and type(value) is type(ok) for ok in refused[name].harmless):
            raise RequestError(f"`{name}` is not supported.", param=name, remedy=refused[name].remedy)
    return kept


def _first_problem(error: ValidationError) -> RequestError:
    """The first field that is wrong. Where it may be of several types, all are named."""
    problems = error.errors(include_url=False)
    field = problems[0]["loc"][0]
    of_field = [problem for problem in problems if problem["loc"][0] == field]
    path = problems[0]["loc"] if len(of_field) == 1 else (field,)
    param = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).lstrip(".")
    alternatives = sorted({problem["msg"][0].lower() + problem["msg"][1:] for problem in of_field})
    return RequestError(f"`{param}`: {' or '.join(alternatives)}.", param=param)


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
        return _keep_supported(content, list(cls.model_fields), {}, where="stream_options.")


class GenerationBody(Body):
    """What chats and completions share. `sampling()` gives the fields of `SamplingParams` by its names."""

    model: str | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, Any] | None = None  # `SamplingParams` looks at the numbers
    seed: int | None = None
    stop: str | Annotated[list[str], Field(fail_fast=True, max_length=MAX_STOPS)] | None = None
    stop_token_ids: FastList[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    prompt_logprobs: int | None = None
    n: int = 1
    stream: bool = False
    stream_options: StreamOptions | None = None
    request_id: str | None = None
    # Accepted: they change nothing.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None

    not_sampling: ClassVar[frozenset[str]] = frozenset(
        {"model", "stream", "stream_options", "request_id"}
        | {"user", "metadata", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"}
    )

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

    def sampling(self) -> dict[str, Any]:
        names = GenerationBody.model_fields.keys() - self.not_sampling
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        if self.logit_bias is not None:
            given["logit_bias"] = _bias_by_id(self.logit_bias)
        return given


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

    def sampling(self) -> dict[str, Any]:
        given = super().sampling()
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
            f"`{where}[{wrong}]` is {_json_kind(items[wrong])}.",
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

    def sampling(self) -> dict[str, Any]:
        given = super().sampling() | {"skip_special_tokens": self.skip_special_tokens}
        if self.logprobs is not None:
            given["logprobs"] = self.logprobs
        return given


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
    reasoning_effort: str | None = None
    thinking: dict[str, Any] | bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    return_token_strs: bool = False


class DetokenizeRequest(Body):
    """POST /detokenize."""

    model: str | None = None
    tokens: FastList[int]


def _bias_by_id(bias: dict[str, Any]) -> dict[int, Any]:
    for token in bias:
        if not re.fullmatch(r"-?[0-9]{1,18}", token):
            raise RequestError(
                f"`logit_bias` has the key {token[:_SHOWN]!r}.",
                param="logit_bias",
                remedy='Keys are token ids, as in {"1734": -100}.',
            )
    return {int(token): value for token, value in bias.items()}


def _json_kind(value: Any) -> str:
    kinds = {dict: "an object", list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
    return kinds.get(type(value), "a number")
