"""The value of one argument: a type for its tag, and what stands between the tags."""

from __future__ import annotations

import json
from typing import Any

from llguidance import regex_to_lark

from longspan.structure.lark import Rules
from longspan.structure.schema import definitions, schema_problem, with_blanks
from longspan.structure.vocabulary import dump, error_in

LABELS = ("string", "number", "boolean", "null", "object", "array")
_LENGTHS = {"minLength", "maxLength"}
_ABOUT_STRINGS = {"const", "enum", "pattern", *_LENGTHS, "anyOf", "oneOf", "allOf", "$ref", "$dynamicRef"}
_ABOUT_STRINGS |= {"not", "if", "then", "else"}


class NotRaw(Exception):
    """The schema can't be told as raw strings and JSON values between tags."""


class Definitions:
    """What `$ref`s of a schema may point to, and what was found out about it before."""

    def __init__(self, schema: Any) -> None:
        self.members = definitions(schema)
        self._types: dict[str, set[str]] = {}
        self._strings: dict[str, str | None] = {}

    def types(self, where: str) -> set[str]:
        if where not in self._types:
            self._types[where] = set(LABELS)  # if it refers to itself
            self._types[where] = types_of(self._target(where), self)
        return self._types[where]

    def string(self, rules: Rules, where: str) -> str:
        """Raises NotRaw, also for what refers to itself."""
        if where not in self._strings:
            self._strings[where] = None
            self._strings[where] = _string(rules, self._target(where), self)
        found = self._strings[where]
        if found is None:
            raise NotRaw
        return found

    def _target(self, where: str) -> Any:
        match where.split("/"):
            case ["#", key, name] if name in self.members.get(key, ()):
                return self.members[key][name]
        raise NotRaw


def values(rules: Rules, schema: Any, defs: Definitions) -> list[tuple[str, str]]:
    """Label and grammar of each type that satisfies `schema`. Raises NotRaw."""
    schema = {} if schema is True else schema
    labels = types_of(schema, defs)
    return [
        (label, grammar)
        for label in LABELS
        if label in labels and (grammar := _value(rules, label, schema, defs, only=len(labels) == 1))
    ]


def types_of(schema: Any, defs: Definitions) -> set[str]:
    """The labels of the types that a value may have; too many rather than too few."""
    labels: set[str] = set(LABELS)
    if isinstance(schema, bool):
        return labels if schema else set()
    if "type" in schema:
        given = schema["type"]
        labels &= {_label(kind) for kind in (given if isinstance(given, list) else [given])}
    if "const" in schema:
        labels &= {label_of(schema["const"])}
    if "enum" in schema:
        labels &= set(map(label_of, schema["enum"]))
    if "$ref" in schema:
        labels &= defs.types(schema["$ref"])
    for key in ("anyOf", "oneOf"):
        if key in schema:
            labels &= set().union(*(types_of(branch, defs) for branch in schema[key]))
    for branch in schema.get("allOf", ()):
        labels &= types_of(branch, defs)
    return labels


def label_of(value: Any) -> str:
    """The type in the tag of a JSON value."""
    kinds = {
        type(None): "null",
        bool: "boolean",
        int: "number",
        float: "number",
        str: "string",
        dict: "object",
    }
    return kinds.get(type(value), "array")


def _label(kind: Any) -> str:
    return "number" if kind == "integer" else kind


def _value(rules: Rules, label: str, schema: Any, defs: Definitions, only: bool) -> str | None:
    """None if no value of this type satisfies the schema."""
    if label == "string":
        return _string(rules, schema, defs)
    part = defs.members | (schema if only else {"allOf": [schema, {"type": label}]})
    if problem := schema_problem(part):
        if only:
            raise NotRaw(problem)
        return None
    return rules.rule("%json " + json.dumps(with_blanks(part)))


def _string(rules: Rules, schema: Any, defs: Definitions) -> str:
    """A string as it is, without quotes and escapes."""
    if schema is True or not (said := _ABOUT_STRINGS & schema.keys()):
        return rules.any_text
    if said <= {"pattern", *_LENGTHS}:
        return _bounded(rules, schema)
    if len(said) > 1:
        raise NotRaw
    (key,) = said
    match key, schema[key]:
        case "const", text:
            texts = [text]
        case "enum", texts:
            pass
        case "$ref", where:
            return defs.string(rules, where)
        case (("anyOf" | "oneOf" | "allOf"), branches):
            branches = [branch for branch in branches if "string" in types_of(branch, defs)]
            if key != "anyOf" and len(branches) > 1:
                raise NotRaw
            return rules.rule(" | ".join(_string(rules, branch, defs) for branch in branches))
        case _:
            raise NotRaw
    return rules.terminal(" | ".join(json.dumps(text) for text in texts if isinstance(text, str)))


def _bounded(rules: Rules, schema: dict[str, Any]) -> str:
    """A string with a pattern, which matches anywhere unless it is anchored, or with bounds on its length."""
    parts = []
    if "pattern" in schema:
        pattern = schema["pattern"]
        begins, ends = pattern.startswith("^"), pattern.endswith("$") and not pattern.endswith("\\$")
        if "|" in pattern and (begins or ends):
            raise NotRaw  # the anchor may belong to one of several alternatives
        inner = pattern[begins : len(pattern) - ends]
        before, after = "" if begins else "(?s:.*)", "" if ends else "(?s:.*)"
        parts.append(f"/{before}(?:{regex_to_lark(inner, 'dw')}){after}/")
    if _LENGTHS & schema.keys():
        parts.append(f"/(?s:.){{{schema.get('minLength', 0)},{schema.get('maxLength', '')}}}/")
    body = " & ".join(parts)
    if error_in(dump({"lark_grammar": f"start: T\nT: {body}"})):
        raise NotRaw
    return rules.terminal(body)
