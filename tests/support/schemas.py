"""Small JSON schemas that some value satisfies, for hypothesis."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

NAMES = ["a", "b", "key", "größe", "🍕", 'say "hi"', "x & y", "<|close|>", ""]
_literals = st.one_of(
    st.none(), st.booleans(), st.integers(-9, 99), st.sampled_from(["", "red", 'a"b', "天", "a\nb"])
)

_strings = st.one_of(
    st.just({"type": "string"}),
    st.builds(
        lambda low, more: {"type": "string", "minLength": low, "maxLength": low + more},
        st.integers(0, 3),
        st.integers(0, 4),
    ),
    st.sampled_from(["^[a-z]{2,4}$", "^a", "^(ab|c)+$", "^\\d{2}-\\d{2}$"]).map(
        lambda pattern: {"type": "string", "pattern": pattern}
    ),
    st.just({"type": "string", "format": "binary"}),
)
_numbers = st.one_of(
    st.just({"type": "number"}),
    st.just({"type": "boolean"}),
    st.just({"type": "null"}),
    st.builds(
        lambda low, more: {"type": "integer", "minimum": low, "maximum": low + more},
        st.integers(-9, 99),
        st.integers(0, 30),
    ),
    st.just({"type": ["integer", "null"]}),
)
_choices = st.one_of(
    st.lists(_literals, min_size=1, max_size=4, unique_by=repr).map(lambda values: {"enum": values}),
    _literals.map(lambda value: {"const": value}),
)


def _deeper(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(
        objects(inner),
        inner.map(lambda items: {"type": "array", "items": items, "maxItems": 2}),
        st.lists(inner, min_size=1, max_size=3).map(lambda branches: {"anyOf": branches}),
        inner.map(lambda schema: {"allOf": [schema]}),
    )


@st.composite
def objects(draw: st.DrawFn, inner: st.SearchStrategy[Any], closed: bool | None = None) -> dict[str, Any]:
    """`closed`: whether undeclared keys are ruled out; None: drawn."""
    names = draw(st.lists(st.sampled_from(NAMES), max_size=4, unique=True))
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {name: draw(inner) for name in names},
        "required": [name for name in names if draw(st.booleans())],
    }
    if draw(st.booleans()) if closed is None else closed:
        schema["additionalProperties"] = False
    return schema


leaves = st.one_of(_strings, _numbers, _choices)
schemas = st.recursive(leaves, _deeper, max_leaves=4)
parameters = objects(schemas, closed=True)
