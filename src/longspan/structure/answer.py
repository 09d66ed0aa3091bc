"""What the text of an answer must be: JSON of a schema, a regex, one of several texts, a grammar."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from llguidance import regex_to_lark
from llguidance.gbnf_to_lark import any_to_lark

from longspan.errors import RequestError
from longspan.structure.schema import check_schema, with_blanks
from longspan.structure.structure import Structure, uncompilable
from longspan.structure.vocabulary import Vocabulary, check_intersections, check_length, dump, error_in

_FIELDS = ("json", "regex", "choice", "grammar", "json_object")


@dataclass(frozen=True)
class StructuredOutputs:
    """What a text must be, by exactly one of vLLM's fields. Raises RequestError naming a field that is wrong.

    `json`: a schema, as an object or as text. `regex` matches the whole text. `grammar`: GBNF or Lark.
    """

    json: dict[str, Any] | bool | str | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    prefix: str = "structured_outputs."  # of the names that errors give the fields

    def __post_init__(self) -> None:
        given = self._given()
        if len(given) != 1:
            names = [f"`{self.prefix}{name}`" for name in given or _FIELDS]
            what = f"{' and '.join(names)} were given." if given else f"None of {', '.join(names)} is given."
            raise RequestError(what, param=self.prefix + (given or _FIELDS)[-1], remedy="Give one of them.")
        kinds = {"json": dict | bool | str, "choice": list, "json_object": bool}
        legal = {"json": "a schema", "choice": "a list of texts", "json_object": "true or false"}
        name = given[0]
        if not isinstance(getattr(self, name), kinds.get(name, str)):
            raise self._illegal(name, legal.get(name, "a text"))
        if self.choice is not None and not (self.choice and all(isinstance(x, str) for x in self.choice)):
            raise self._illegal("choice", "a list of one or more texts")

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> StructuredOutputs:
        """As a body has it, `null` meaning "not given". Raises RequestError for an unknown field."""
        unknown = [name for name, value in fields.items() if name not in _FIELDS and value is not None]
        if unknown:
            param = f"structured_outputs.{unknown[0][:80]}"
            raise RequestError(
                f"Unknown field `{param}`.", param=param, remedy=f"Known: {', '.join(_FIELDS)}."
            )
        return cls(**{name: value for name, value in fields.items() if value is not None})

    def _given(self) -> list[str]:
        """`json_object` false is as good as not given."""
        given = [name for name in _FIELDS if getattr(self, name) is not None]
        return [name for name in given if name != "json_object" or self.json_object]

    def _illegal(self, name: str, legal: str) -> RequestError:
        return RequestError(f"`{self.prefix}{name}` is not {legal}.", param=self.prefix + name)

    def answer(self) -> Answer:
        """Raises RequestError for what can't be compiled."""
        param = self.prefix + self._given()[0]
        if self.json_object:
            return json_answer({"type": "object"}, param)
        if self.json is not None:
            return json_answer(_parsed(self.json, param), param)
        try:
            lark = self._lark(param)
        except RequestError:
            raise
        except Exception as error:
            raise uncompilable(param, str(error)) from error
        check_intersections(lark, param)
        if problem := error_in(dump({"lark_grammar": lark})):
            raise uncompilable(param, problem)
        return Answer({"lark_grammar": lark}, param)

    def _lark(self, param: str) -> str:
        """Raises RequestError for what is too long, and various errors for what is wrong."""
        if self.choice is not None:
            check_length("".join(self.choice), param)
            return "start: T\nT: " + " | ".join(json.dumps(text) for text in self.choice)
        check_length(self.regex or self.grammar or "", param)
        if self.regex is not None:
            return f"start: /{regex_to_lark(self.regex, '')}/"
        return any_to_lark(self.grammar or "")


@dataclass(frozen=True)
class Answer:
    """A grammar of llguidance's that is used under a name, and the field of the request that asked for it."""

    grammar: dict[str, Any]
    param: str

    def structure(self, vocabulary: Vocabulary, prefix: tuple[int, ...] = ()) -> Structure:
        """For a reply that is the answer and nothing else. Raises RequestError where there can be none."""
        structure = Structure(dump(self.grammar), prefix=prefix)
        structure.check(vocabulary, self.param)
        return structure


def json_answer(schema: Any, param: str) -> Answer:
    """JSON that satisfies a schema. Raises RequestError naming the part of it that can't be enforced."""
    check_schema(schema, param)
    return Answer({"json_schema": with_blanks(schema)}, param)


def response_format_answer(response_format: dict[str, Any] | None) -> Answer | None:
    """OpenAI's field; None for text. Raises RequestError naming what is wrong in it."""
    match response_format:
        case None | {"type": "text"}:
            return None
        case {"type": "json_object"}:
            return json_answer({"type": "object"}, "response_format")
        case {"type": "json_schema", "json_schema": {"schema": schema}}:
            return json_answer(schema, "response_format.json_schema.schema")
        case {"type": "json_schema"}:
            remedy = 'Send {"type": "json_schema", "json_schema": {"name": ..., "schema": {...}}}.'
            what = "`response_format` has no `json_schema.schema`."
            raise RequestError(what, param="response_format.json_schema", remedy=remedy)
    kind = response_format.get("type")
    what = f"`response_format.type` is {kind!r}."
    raise RequestError(what, param="response_format", remedy="Legal: text, json_object, json_schema.")


def asked_answer(response_format: dict[str, Any] | None, outputs: StructuredOutputs | None) -> Answer | None:
    """What one of two fields asks for. Raises RequestError if both do, or for what can't be compiled."""
    answer = response_format_answer(response_format)
    if answer and outputs:
        what = "`response_format` and `structured_outputs` were both given."
        raise RequestError(what, param="structured_outputs", remedy="Send one of them.")
    return outputs.answer() if outputs else answer


def _parsed(schema: Any, param: str) -> Any:
    if not isinstance(schema, str):
        return schema
    try:
        return json.loads(schema)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"`{param}` is no JSON: {error}.", param=param, remedy="Send a schema.") from error
