"""JSON schemas as llguidance takes them: blanks bounded, unknown formats ignored, faults found and named."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from longspan.errors import RequestError
from longspan.structure.structure import uncompilable
from longspan.structure.vocabulary import check_size, dump, error_in

DEFINITIONS = ("$defs", "definitions")
_BLAMED_DEPTH = 20
_MAPS = (*DEFINITIONS, "properties", "patternProperties")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLES = ("items", "additionalProperties")
_VALUES = ("const", "enum", "default", "examples")  # not schemas
# A weak model fills its budget with blanks if it may: between two tokens one space, or a line and its indent.
_BLANKS = {"whitespace_pattern": r" |\n {0,16}"}
_FORMATS = ["date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"]


def with_blanks(schema: Any) -> Any:
    """The schema, with a bound on the blanks between tokens of JSON and without formats that mean nothing to
    us, which the standard says to ignore."""
    cleaned = _without_unknown_formats(schema)
    if isinstance(cleaned, bool):
        cleaned = {} if cleaned else {"enum": []}
    return cleaned | {"x-guidance": _BLANKS}


def check_schema(schema: Any, param: str) -> None:
    """Raises RequestError naming the smallest part that can't be enforced."""
    if not isinstance(schema, dict | bool):
        raise RequestError(f"`{param}` is no schema.", param=param, remedy="Send a JSON object.")
    check_size(schema, param)
    if problem := schema_problem(schema):
        raise uncompilable(*_blame(schema, param, definitions(schema), problem))


def schema_problem(schema: Any) -> str | None:
    """Why a schema can't be enforced; None if it can."""
    try:
        return error_in(dump({"json_schema": with_blanks(schema)}))
    except RecursionError:
        return "it is nested too deeply"


def definitions(schema: Any) -> dict[str, Any]:
    """What `$ref`s of a part of the schema may point to."""
    return {key: schema[key] for key in DEFINITIONS if key in schema} if isinstance(schema, dict) else {}


def _blame(schema: Any, param: str, defs: dict[str, Any], problem: str, depth: int = 0) -> tuple[str, str]:
    for name, part in _parts(schema) if depth < _BLAMED_DEPTH else ():
        if isinstance(part, dict) and (found := schema_problem(defs | part)):
            return _blame(part, f"{param}.{name}", defs, found, depth + 1)
    return param, problem


def _parts(schema: Any) -> Iterator[tuple[str, Any]]:
    for key, value in schema.items() if isinstance(schema, dict) else ():
        if key in _MAPS and isinstance(value, dict):
            yield from ((f"{key}.{name}", part) for name, part in value.items())
        elif key in _LISTS and isinstance(value, list):
            yield from ((f"{key}[{i}]", part) for i, part in enumerate(value))
        elif key in _SINGLES:
            yield key, value


def _without_unknown_formats(schema: Any, is_schema: bool = True) -> Any:
    """`is_schema` False: a mapping of names to schemas, where "format" is a name."""
    if isinstance(schema, list):
        return [_without_unknown_formats(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: value
        if is_schema and key in _VALUES
        else _without_unknown_formats(value, not (is_schema and key in _MAPS))
        for key, value in schema.items()
        if not (is_schema and key == "format" and value not in _FORMATS)
    }
