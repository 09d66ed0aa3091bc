"""Answers: whatever a model would rather say, what comes obeys."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from support.obedient import allowed, say_anything, text_of
from support.schemas import schemas

from longspan.errors import RequestError
from longspan.structure import StructuredOutputs, Vocabulary, asked_answer

SEEDS = st.integers(0, 2**32)
KEYWORDS = ["type", "properties", "required", "items", "enum", "const", "anyOf", "oneOf", "allOf", "$ref"]
KEYWORDS += ["$defs", "pattern", "format", "minLength", "maxLength", "additionalProperties", "prefixItems"]
KEYWORDS += ["minimum", "x-guidance", "title"]


def replies(vocabulary: Vocabulary, number: int = 20, **outputs: Any) -> list[str]:
    structure = StructuredOutputs(**outputs).answer().structure(vocabulary)
    return [text_of(vocabulary, say_anything(structure, vocabulary, seed)) for seed in range(number)]


@settings(max_examples=80)
@given(schema=schemas, seed=SEEDS)
def test_json_satisfies_its_schema_whatever_the_model_would_say(
    vocabulary: Vocabulary, schema: dict[str, Any], seed: int
) -> None:
    structure = StructuredOutputs(json=schema).answer().structure(vocabulary)
    value = json.loads(text_of(vocabulary, say_anything(structure, vocabulary, seed)))
    Draft202012Validator(schema).validate(value)


def test_json_object_is_an_object_of_any_kind(vocabulary: Vocabulary) -> None:
    found = [json.loads(text) for text in replies(vocabulary, json_object=True)]
    assert all(isinstance(value, dict) for value in found)
    assert any(value for value in found)


def test_a_schema_may_come_as_text(vocabulary: Vocabulary) -> None:
    assert set(replies(vocabulary, json='{"enum": [1, "a"]}')) == {"1", '"a"'}


def test_a_regex_matches_the_whole_text(vocabulary: Vocabulary) -> None:
    for pattern in ("[a-c]{2,5}", "^(yes|no)$", "a/b|c\\d", '[^"]é'):
        assert all(re.fullmatch(pattern, text) for text in replies(vocabulary, regex=pattern))


def test_a_choice_is_one_of_the_texts_and_every_one_can_be_made(vocabulary: Vocabulary) -> None:
    texts = ["yes", "yes, of course", "", '"quoted"', "天😀\n", "<|close|>"]
    assert set(replies(vocabulary, 200, choice=texts)) == set(texts)


@pytest.mark.parametrize(
    "grammar",
    ['root ::= word (" " word)?\nword ::= "a" | "bc"', 'start: word (" " word)?\nword: "a" | "bc"'],
)
def test_a_grammar_may_be_gbnf_or_lark(vocabulary: Vocabulary, grammar: str) -> None:
    found = set(replies(vocabulary, 60, grammar=grammar))
    assert found == {"a", "bc", "a a", "a bc", "bc a", "bc bc"}


def blanks_after(vocabulary: Vocabulary, text: str, wanted: bytes) -> int:
    """How many characters of blanks a model that likes `wanted` can put behind a beginning of JSON."""
    tokenizer = vocabulary.tokenizer
    constraint = StructuredOutputs(json_object=True).answer().structure(vocabulary).start(vocabulary)
    for token_id in tokenizer.encode(text):
        constraint.accept(token_id)
    count = 0
    while space := [i for i in allowed(constraint) if tokenizer.token_bytes(i).isspace()]:
        liked = [i for i in space if tokenizer.token_bytes(i) == wanted]
        constraint.accept((liked or space)[0])
        count += len(tokenizer.token_bytes((liked or space)[0]))
    assert not any(tokenizer.token_bytes(i)[:1].isspace() for i in allowed(constraint))
    return count


@pytest.mark.parametrize("text", ["{", '{"a"', '{"a":', '{"a": [1', '{"a": 1'])
def test_blanks_come_to_an_end_everywhere(vocabulary: Vocabulary, text: str) -> None:
    assert blanks_after(vocabulary, text, b" ") == 1
    assert blanks_after(vocabulary, text, b"\n") == 17


@pytest.mark.parametrize("layout", [{}, {"indent": 2}, {"indent": 4}, {"separators": (",", ":")}])
def test_json_may_be_laid_out_in_lines_or_in_one(vocabulary: Vocabulary, layout: dict[str, Any]) -> None:
    text = json.dumps({"a": [1, {"b": "c"}], "d": {}}, **layout)
    structure = StructuredOutputs(json_object=True).answer().structure(vocabulary)
    constraint = structure.start(vocabulary)
    for token_id in vocabulary.tokenizer.encode(text):
        assert token_id in allowed(constraint)
        constraint.accept(token_id)
    assert vocabulary.eos_token_ids[0] in allowed(constraint)


@pytest.mark.parametrize(
    ("outputs", "param", "says"),
    [
        ({}, "json_object", "None of"),
        ({"json": {}, "regex": "a"}, "regex", "both|were given"),
        ({"json": [1]}, "json", "not a schema"),
        ({"json": "{"}, "json", "no JSON"),
        ({"json": "[]"}, "json", "no schema"),
        ({"json": False}, "json", "schema"),
        ({"json": {"enum": []}}, "json", "Unsatisfiable"),
        ({"json": {"properties": {"a": {"items": {"not": {}}}}}}, "json.properties.a.items", "not"),
        ({"json": {"anyOf": [{}, {"type": "strin"}]}}, "json.anyOf[1]", "strin"),
        ({"json": {"$ref": "#/$defs/x", "$defs": {"x": {"pattern": "("}}}}, "json.$defs.x", "regex"),
        ({"json": {"$ref": "#/$defs/x"}}, "json", "does not exist"),
        ({"json": {"$ref": "http://example.com/schema"}}, "json", "example.com"),
        ({"json": {"type": "array", "uniqueItems": True}}, "json", "uniqueItems"),
        ({"regex": "("}, "regex", "unclosed group"),
        ({"json": {"pattern": "(?=a)b"}}, "json", "look-ahead"),
        ({"regex": "[^\\s\\S]"}, "regex", "can't be enforced"),
        ({"regex": 5}, "regex", "text"),
        ({"regex": "\ud83d"}, "regex", "can't be enforced"),
        ({"choice": ["\ud83d"]}, "choice", "can't be enforced"),
        ({"json": {"enum": ["\ud83d"]}}, "json", "can't be enforced"),
        ({"json": {"$ref": "#"}}, "json", "no text matches"),
        ({"grammar": "start: start"}, "grammar", "no text matches"),
        ({"grammar": "start: <[99999]>"}, "grammar", "99999"),
        ({"choice": []}, "choice", "one or more"),
        ({"choice": ["a", 1]}, "choice", "one or more"),
        ({"choice": "yes"}, "choice", "list"),
        ({"grammar": "root ::= b"}, "grammar", "'b' not found"),
        ({"grammar": ""}, "grammar", "can't be enforced"),
        ({"json_object": False}, "json_object", "None of"),
    ],
)
def test_what_cannot_be_enforced_is_named(
    vocabulary: Vocabulary, outputs: dict[str, Any], param: str, says: str
) -> None:
    with pytest.raises(RequestError, match=says) as error:
        StructuredOutputs(**outputs).answer().structure(vocabulary)
    assert error.value.param == f"structured_outputs.{param}"


def test_a_dict_of_an_unknown_field_is_refused() -> None:
    with pytest.raises(RequestError, match="Known: json, regex") as error:
        StructuredOutputs.from_dict({"jsn": {}})
    assert error.value.param == "structured_outputs.jsn"
    assert StructuredOutputs.from_dict({"json": None, "regex": "a"}).regex == "a"


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


def patterns(number: int) -> list[dict[str, Any]]:
    return [{"type": "string", "pattern": f"(a.*b.*{i})"} for i in range(number)]


@pytest.mark.parametrize(
    "outputs",
    [
        {"json": {"allOf": patterns(17)}},
        {
            "json": {
                "$ref": "#/$defs/0",
                "$defs": {str(i): {"$ref": f"#/$defs/{i + 1}"} | p for i, p in enumerate(patterns(30))},
            }
        },
        {"grammar": "start: T\nT: " + " & ".join(f"/.*a.*b{i}.*/" for i in range(18))},
    ],
)
def test_intersections_that_would_take_for_ever_are_refused(outputs: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="Legal are at most 16"):
        StructuredOutputs(**outputs).answer()


def test_an_and_within_a_literal_is_no_intersection(vocabulary: Vocabulary) -> None:
    entities = " | ".join(f'"&{i};" /&/' for i in range(30))
    StructuredOutputs(grammar=f"start: {entities}").answer().structure(vocabulary)
    StructuredOutputs(regex="&" * 30).answer().structure(vocabulary)
    StructuredOutputs(choice=["&"] * 30).answer().structure(vocabulary)
    StructuredOutputs(json={"properties": {str(i): p for i, p in enumerate(patterns(30))}}).answer()


@pytest.mark.parametrize(
    "outputs",
    [
        {"json": nested(500)},
        {"json": nested(20_000)},
        {"json": {"enum": list(range(5000)), "anyOf": [{}] * 11_000}},
        {"regex": "(" * 100_000},
        {"regex": "a" * 300_000},
        {"regex": "((a{1000}){1000}){1000}"},
        {"grammar": "start: " + "(" * 90_000},
        {"choice": ["x" * 300_000]},
    ],
    ids=["deep", "deeper", "wide", "open", "long", "powers", "parentheses", "text"],
)
def test_a_structure_of_any_size_is_compiled_or_refused(
    vocabulary: Vocabulary, outputs: dict[str, Any]
) -> None:
    try:
        StructuredOutputs(**outputs).answer().structure(vocabulary)
    except RequestError as error:
        assert error.param and error.param.startswith("structured_outputs.")


def test_a_long_chain_of_definitions_does_not_end_the_process(vocabulary: Vocabulary) -> None:
    chain = {f"d{i}": {"properties": {"x": {"$ref": f"#/$defs/d{i + 1}"}}} for i in range(3300)}
    schema = {"$ref": "#/$defs/d0", "$defs": chain | {"d3300": {"type": "string"}}}
    StructuredOutputs(json=schema).answer().structure(vocabulary)
    rules = "start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(14_000)) + 'r14000: "x"\n'
    StructuredOutputs(grammar=rules).answer().structure(vocabulary)


@settings(max_examples=100)
@given(
    schema=st.recursive(
        st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=4)),
        lambda inner: st.one_of(
            st.lists(inner, max_size=3),
            st.dictionaries(
                st.sampled_from(KEYWORDS),
                inner,
                max_size=4,
            ),
        ),
        max_leaves=8,
    )
)
def test_a_schema_of_nonsense_is_compiled_or_refused(vocabulary: Vocabulary, schema: Any) -> None:
    try:
        StructuredOutputs(json=schema).answer().structure(vocabulary)
    except RequestError as error:
        assert error.param


@pytest.mark.parametrize("given", [None, {"type": "text"}])
def test_a_text_format_asks_for_nothing(given: Any) -> None:
    assert asked_answer(given, None) is None


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"type": "xml"}, "response_format"),
        ({}, "response_format"),
        ({"type": "json_schema"}, "response_format.json_schema"),
        ({"type": "json_schema", "json_schema": {"name": "x"}}, "response_format.json_schema"),
        ({"type": "json_schema", "json_schema": {"schema": 3}}, "response_format.json_schema.schema"),
        (
            {"type": "json_schema", "json_schema": {"schema": {"properties": {"a": {"if": {}}}}}},
            "response_format.json_schema.schema.properties.a",
        ),
    ],
)
def test_a_response_format_that_cannot_be_enforced_is_named(given: Any, param: str) -> None:
    with pytest.raises(RequestError) as error:
        asked_answer(given, None)
    assert error.value.param == param


def test_two_answers_at_once_are_refused() -> None:
    with pytest.raises(RequestError, match="both"):
        asked_answer({"type": "json_object"}, StructuredOutputs(regex="a"))
