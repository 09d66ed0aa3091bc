"""The value of one argument: a type for its tag, and what stands between the tags."""

from __future__ import annotations

import json
from typing import Any

from llguidance import regex_to_lark

from longspan.structure.lark import Rules
from longspan.structure.schema import schema_problem, with_blanks
from longspan.structure.vocabulary import dump, error_in

LABELS = ("string", "number", "boolean", "null", "object", "array")
_LENGTHS = {"minLength", "maxLength"}
_ABOUT_STRINGS = {"const", "enum", "pattern", *_LENGTHS, "anyOf", "oneOf", "allOf", "$ref", "$dynamicRef"}
_ABOUT_STRINGS |= {"not", "if", "then", "else"}
_MAX_REFS = 32


class NotRaw(Exception):
    """The schema can't be told as raw strings and JSON values between tags."""


def values(rules: Rules, schema: Any, defs: dict[str, Any]) -> list[tuple[str, str]]:
    """Label and grammar of each type that satisfies `schema`, whose `$ref`s point into `defs`.

    Raises NotRaw.
    """
    schema = {} if schema is True else schema
    labels = types_of(schema, defs)
    return [
        (label, grammar)
        for label in LABELS
        if label in labels and (grammar := _value(rules, label, schema, defs, only=len(labels) == 1))
    ]


def types_of(schema: Any, defs: dict[str, Any], depth: int = 0) -> set[str]:
    """The labels of the types that a value may have; too many rather than too few."""
    labels: set[str] = set(LABELS)
    if isinstance(schema, bool):
        return labels if schema else set()
    if "type" in schema:
        given = schema["type"]
        labels &= {_label(kind) for kind in (given if isinstance(given, list) else [given])}
    if "const" in schema:
        labels &= {label_of(schema["const"])}
    if isinstance(schema.get("enum"), list):
        labels &= set(map(label_of, schema["enum"]))
    if "$ref" in schema and depth < _MAX_REFS:
        labels &= types_of(_target(schema["$ref"], defs), defs, depth + 1)
    for key in ("anyOf", "oneOf"):
        if key in schema:
            labels &= set().union(*(types_of(branch, defs, depth) for branch in schema[key]))
    for branch in schema.get("allOf", ()):
        labels &= types_of(branch, defs, depth)
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


def _value(rules: Rules, label: str, schema: Any, defs: dict[str, Any], only: bool) -> str | None:
    """None if no value of this type satisfies the schema."""
    if label == "string":
        return _string(rules, schema, defs)
    part = defs | (schema if only else {"allOf": [schema, {"type": label}]})
    if problem := schema_problem(part):
        if only:
            raise NotRaw(problem)
        return None
    return rules.rule("%json " + json.dumps(with_blanks(part)))


def _string(rules: Rules, schema: Any, defs: dict[str, Any], depth: int = 0) -> str | None:
    """A string as it is, without quotes and escapes."""
    if schema is True or not (said := _ABOUT_STRINGS & schema.keys()):
        return rules.any_text
    if said <= {"pattern", *_LENGTHS}:
        return _bounded(rules, schema)
    if len(said) > 1 or depth == _MAX_REFS:
        raise NotRaw
    (key,) = said
    match key, schema[key]:
        case "const", text:
            texts = [text]
        case "enum", texts:
            pass
        case "$ref", where:
            return _string(rules, _target(where, defs), defs, depth + 1)
        case (("anyOf" | "oneOf" | "allOf"), branches):
            branches = [branch for branch in branches if "string" in types_of(branch, defs)]
            if key != "anyOf" and len(branches) > 1:
                raise NotRaw
            found = [_string(rules, branch, defs, depth + 1) for branch in branches]
            return rules.rule(" | ".join(part for part in found if part))
        case _:
            raise NotRaw
    return rules.rule(" | ".join(json.dumps(text) for text in texts if isinstance(text, str)))


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


def _target(where: str, defs: dict[str, Any]) -> Any:
    """What a `$ref` into the definitions means. Raises NotRaw for any other."""
    match where.split("/"):
        case ["#", key, name] if name in defs.get(key, ()):
            return defs[key][name]
    raise NotRaw
