"""What the bodies of all routes share. A field is honoured, or refused by name with what would be accepted.

`null` means "not given", as in OpenAI's API. Ranges of the sampling fields belong to `SamplingParams`, the
structure of chat messages to `longspan.chat`.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from longspan.engine.request import SamplingParams
from longspan.errors import RequestError
from longspan.serve.json_text import read_json

_MAX_NAME = 256  # characters that a client gives to an id or a salt
MAX_PRIORITY = 2**31 - 1
_MAX_TIMEOUT = 10**9  # seconds
_SHOWN = 80  # characters of a field's name
_SAMPLING = {field.name for field in dataclasses.fields(SamplingParams)}


@dataclass(frozen=True)
class Refused:
    """A field of OpenAI's or vLLM's API that is known and not supported; `harmless` values change nothing."""

    remedy: str
    harmless: tuple[Any, ...] = ()


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
        raise RequestError(f"The request body is {json_kind(content)}; a JSON object is expected.")
    try:
        return kind.model_validate(keep_supported(content, kind.model_fields, kind.refused))
    except ValidationError as error:
        raise _first_problem(error) from error


def keep_supported(
    content: dict[str, Any], known: Collection[str], refused: dict[str, Refused], where: str = ""
) -> dict[str, Any]:
    """The fields of an object that are given and known. Raises RequestError for any other.

    `where`: what stands before a field's name, such as "messages[3].".
    """
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
            remedy = refused[name].remedy
            name = where + name
            raise RequestError(f"`{name}` is not supported.", param=name, remedy=remedy)
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


def _short(text: str) -> str:
    if len(text) > _MAX_NAME:
        raise ValueError(f"at most {_MAX_NAME} characters are expected, not {len(text)}")
    return text


Name = Annotated[str, AfterValidator(_short)]  # any characters: pydantic's own check refuses lone surrogates


class CallBody(Body):
    """What every route that generates takes, under the names of `SamplingParams` and `Request`."""

    model: str | None = None
    stream: bool = False
    request_id: Name | None = None
    priority: int = Field(default=0, ge=-MAX_PRIORITY, le=MAX_PRIORITY)
    timeout: float | None = Field(default=None, gt=0, le=_MAX_TIMEOUT)
    cache_salt: Name = ""
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, Any] | None = None  # `SamplingParams` looks at the numbers
    seed: int | None = None
    min_tokens: int | None = None
    stop_token_ids: FastList[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    # Accepted: they change nothing.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None

    def sampling(self) -> dict[str, Any]:
        """The given ones of the fields that have the names and meanings of `SamplingParams`."""
        names = _SAMPLING & type(self).model_fields.keys()
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        if self.logit_bias is not None:
            given["logit_bias"] = _bias_by_id(self.logit_bias)
        return given

    def scheduling(self) -> dict[str, Any]:
        """The fields that go to `Request` as they are."""
        return {"priority": self.priority, "timeout": self.timeout, "cache_salt": self.cache_salt}


def _bias_by_id(bias: dict[str, Any]) -> dict[int, Any]:
    for token in bias:
        if not re.fullmatch(r"-?[0-9]{1,18}", token):
            raise RequestError(
                f"`logit_bias` has the key {token[:_SHOWN]!r}.",
                param="logit_bias",
                remedy='Keys are token ids, as in {"1734": -100}.',
            )
    return {int(token): value for token, value in bias.items()}


def json_kind(value: Any) -> str:
    kinds = {dict: "an object", list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
    return kinds.get(type(value), "a number")


def illegal(where: str, found: Any, legal: str) -> RequestError:
    """The error of a field that is none of what is legal."""
    shown = repr(found)[:_SHOWN] if isinstance(found, str | int | float | None) else json_kind(found)
    return RequestError(f"`{where}` is {shown}.", param=where, remedy=f"Legal is {legal}.")


def string(item: dict[str, Any], name: str, where: str) -> str:
    """A field that must be a string."""
    if not isinstance(item.get(name), str):
        raise illegal(f"{where}.{name}", item.get(name), "a string")
    return item[name]
