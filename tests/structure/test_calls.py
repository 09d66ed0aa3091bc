"""Tool calls: whatever a model would rather do, the calls that come are complete, declared and valid."""

from __future__ import annotations

import json
import pickle
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from support.obedient import allowed, read, say_anything
from support.schemas import parameters, schemas

from longspan.chat import Function, Tokenizer, declared_functions, forced_functions, render, xtml
from longspan.errors import CheckpointError, RequestError
from longspan.structure import Calls, Structure, StructuredOutputs, Vocabulary, chat_structure

SEEDS = st.integers(0, 2**32)
NAMES = ["get_weather", "get_wealth", "get", 'say "hi" & <|close|>', "天気😀"]


def functions(*params: Any, strict: bool = False) -> list[Function]:
    """Functions f0, f1, ... with these parameters."""
    return [Function(f"f{i}", schema, strict, f"tools[{i}].function") for i, schema in enumerate(params)]


def forced(vocabulary: Vocabulary, *params: Any, thinking: bool = False, single: bool = False) -> Structure:
    calls = Calls(functions(*params), forced=True, single=single)
    structure = chat_structure(vocabulary, answer=None, calls=calls, thinking=thinking)
    assert structure
    return structure


def arguments(vocabulary: Vocabulary, structure: Structure, seed: int) -> list[Any]:
    """Of the calls of one reply."""
    reply = read(vocabulary, say_anything(structure, vocabulary, seed), thinking=structure.thinking)
    assert reply.tool_calls and all(call.complete for call in reply.tool_calls)
    return [json.loads(call.arguments) for call in reply.tool_calls]


@settings(max_examples=60)
@given(params=st.lists(parameters, min_size=1, max_size=3), thinking=st.booleans(), seed=SEEDS)
def test_forced_calls_are_complete_and_satisfy_the_schema_of_their_function(
    vocabulary: Vocabulary, params: list[Any], thinking: bool, seed: int
) -> None:
    structure = pickle.loads(pickle.dumps(forced(vocabulary, *params, thinking=thinking)))
    reply = read(vocabulary, say_anything(structure, vocabulary, seed), thinking=thinking)
    assert reply.content is None and reply.tool_calls
    for call in reply.tool_calls:
        assert call.complete
        Draft202012Validator(params[int(call.name[1:])]).validate(json.loads(call.arguments))
        keys = [key for key, _ in json.loads(call.arguments, object_pairs_hook=list)]
        assert len(set(keys)) == len(keys)


@settings(max_examples=60)
@given(
    schema=schemas.map(lambda inner: {"anyOf": [{"type": "object", "properties": {"a": inner}}]}), seed=SEEDS
)
def test_a_schema_that_is_no_plain_object_is_satisfied_by_a_json_block(
    vocabulary: Vocabulary, schema: Any, seed: int
) -> None:
    for value in arguments(vocabulary, forced(vocabulary, schema), seed):
        Draft202012Validator(schema).validate(value)


@pytest.mark.parametrize("thinking", [True, False])
def test_every_name_can_be_called_and_no_other(vocabulary: Vocabulary, thinking: bool) -> None:
    named = [Function(name, {"type": "object"}, False, "") for name in NAMES]
    structure = chat_structure(vocabulary, answer=None, calls=Calls(named, forced=True), thinking=thinking)
    assert structure
    seen = set()
    for seed in range(60):
        reply = read(vocabulary, say_anything(structure, vocabulary, seed), thinking=thinking)
        assert reply.content is None
        seen |= {call.name for call in reply.tool_calls}
    assert seen == set(NAMES)


@pytest.mark.parametrize("thinking", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_the_tokens_of_a_rendered_turn_are_allowed_one_by_one(
    vocabulary: Vocabulary, thinking: bool, name: str
) -> None:
    values = {
        "city": "Oslo <|close|>",
        "days": 3,
        "near": None,
        "sure": False,
        "map": {"k": [1, "two"]},
        "": [],
    }
    turn = {
        "role": "assistant",
        "reasoning_content": "Look it up." if thinking else None,
        "tool_calls": [{"name": name, "arguments": values}, {"name": "get"}],
    }
    encode = vocabulary.tokenizer.encode_segments
    prompt = encode(render([], thinking=thinking))
    reply = encode(render([turn], thinking=thinking, add_generation_prompt=False))
    named = [Function(name, {"type": "object"}, False, "") for name in NAMES]
    structure = chat_structure(vocabulary, answer=None, calls=Calls(named, forced=True), thinking=thinking)
    assert structure
    constraint = structure.start(vocabulary)
    for token_id in reply[len(prompt) :]:
        assert token_id in allowed(constraint)
        constraint.accept(token_id)
    assert allowed(constraint) == list(vocabulary.eos_token_ids)


def test_a_single_name_leaves_no_choice_before_the_arguments(vocabulary: Vocabulary) -> None:
    constraint = forced(vocabulary, {"type": "object", "properties": {"a": {}}}).start(vocabulary)
    ids = []
    while len(legal := allowed(constraint)) == 1:
        ids += legal
        constraint.accept(ids[-1])
    tokenizer = vocabulary.tokenizer
    assert tokenizer.decode(ids) == (
        '<|close|>response<|sep|><|open|>tools<|sep|><|open|>call tool="f0" index="1"<|sep|>'
    )
    assert {tokenizer.decode([i]) for i in legal} == {"<|open|>", "<|close|>"}


def test_required_properties_come_in_any_order(vocabulary: Vocabulary) -> None:
    schema = {"properties": {name: {"const": 1} for name in "abc"}, "required": ["c", "a"]}
    orders = {
        tuple(call) for seed in range(80) for call in arguments(vocabulary, forced(vocabulary, schema), seed)
    }
    assert {("a", "c"), ("c", "a"), ("b", "c", "a"), ("c", "b", "a")} <= orders
    assert all({"a", "c"} <= set(order) for order in orders)


@pytest.mark.parametrize("number", [63, 64, 65])
def test_functions_may_have_more_properties_than_bits(vocabulary: Vocabulary, number: int) -> None:
    names = [f"p{i}" for i in range(number)]
    schema = {"properties": {name: {"type": "null"} for name in names}, "required": names[1:]}
    for call in arguments(vocabulary, forced(vocabulary, schema, single=True), 1):
        assert set(names[1:]) <= set(call) <= set(names)


@pytest.mark.parametrize("schema", [None, {"type": "object", "properties": {}}, {"properties": {}}])
def test_a_function_without_parameters_is_called_without_arguments(
    vocabulary: Vocabulary, schema: Any
) -> None:
    assert all(call == {} for call in arguments(vocabulary, forced(vocabulary, schema), 3))


@pytest.mark.parametrize(
    "schema", [True, {}, {"type": "object"}, {"additionalProperties": True, "properties": {}}]
)
def test_a_function_of_any_object_takes_any_keys(vocabulary: Vocabulary, schema: Any) -> None:
    structure = forced(vocabulary, schema, single=True)
    replies = [
        read(vocabulary, say_anything(structure, vocabulary, seed), thinking=False) for seed in range(10)
    ]
    assert any(json.loads(reply.tool_calls[0].arguments) for reply in replies)


def test_undeclared_keys_obey_what_is_said_of_them(vocabulary: Vocabulary) -> None:
    schema = {
        "properties": {"x & y": {"type": "null"}},
        "additionalProperties": {"type": "integer", "minimum": 1, "maximum": 3},
    }
    structure = forced(vocabulary, schema, single=True)
    keys = set()
    for seed in range(30):
        reply = read(vocabulary, say_anything(structure, vocabulary, seed), thinking=False)
        for key, value in json.loads(reply.tool_calls[0].arguments).items():
            assert value is None if key == "x & y" else value in (1, 2, 3)
            keys.add(key)
    assert len(keys) > 5


def test_a_declared_key_does_not_come_again_as_an_undeclared_one(vocabulary: Vocabulary) -> None:
    schema = {"properties": {"x & y": {"const": 1}}, "required": ["x & y"], "additionalProperties": True}
    constraint = forced(vocabulary, schema).start(vocabulary)
    call = [*xtml.close_tag("response"), *xtml.open_tag("tools")]
    call += xtml.open_tag("call", [("tool", "f0"), ("index", "1")])
    argument = xtml.open_tag("argument", [("key", "x & y"), ("type", "number")])
    value = [*xtml.text("1"), *xtml.close_tag("argument")]
    encode = vocabulary.tokenizer.encode_segments
    for token_id in encode([*call, *argument, *value, *argument[:5]]):
        assert token_id in allowed(constraint)
        constraint.accept(token_id)
    assert not set(encode(argument[5:6])) & set(allowed(constraint))


def test_values_have_the_type_that_their_tag_says(vocabulary: Vocabulary) -> None:
    schema = {"properties": {"v": {"enum": ["1", 1, None, True, "null"]}}, "required": ["v"]}
    found = {
        repr(call["v"])
        for seed in range(80)
        for call in arguments(vocabulary, forced(vocabulary, schema), seed)
    }
    assert found == {"'1'", "1", "None", "True", "'null'"}


def test_definitions_are_known_to_every_property(vocabulary: Vocabulary) -> None:
    word, tree = {"$ref": "#/$defs/word"}, {"$ref": "#/$defs/tree"}
    schema = {
        "properties": {"s": word, "o": tree, "n": {"anyOf": [word, {"type": "null"}]}},
        "required": ["s", "o", "n"],
        "$defs": {
            "word": {"type": "string", "enum": ["x", "y"]},
            "tree": {"type": "object", "properties": {"next": tree}, "additionalProperties": False},
        },
    }
    structure = forced(vocabulary, schema)
    for seed in range(20):
        for call in arguments(vocabulary, structure, seed):
            Draft202012Validator(schema).validate(call)


def test_a_definition_that_means_itself_many_times_is_looked_at_once(vocabulary: Vocabulary) -> None:
    twice = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(60)}
    schema = {"properties": {"a": {"$ref": "#/$defs/d0"}}, "$defs": twice | {"d60": {"type": "string"}}}
    forced(vocabulary, schema)
    loop = {
        "properties": {"a": {"$ref": "#/$defs/d"}},
        "$defs": {"d": {"anyOf": [{"$ref": "#/$defs/d"}, {}]}},
    }
    forced(vocabulary, loop)


@pytest.mark.parametrize(
    ("schema", "param"),
    [
        ({"properties": {"x": {"not": {}}}}, "properties.x"),
        ({"properties": {"x": {"type": "array", "items": {"uniqueItems": True}}}}, "properties.x.items"),
        ({"properties": {"x": {"enum": []}}, "required": ["x"]}, "properties.x"),
        ({"properties": {"😀": {"pattern": "("}}}, "properties.😀"),
        ({"type": "string"}, ""),
        ("object", ""),
        ({"type": "object", "required": ["x"], "additionalProperties": False}, ""),
        ({"properties": []}, ""),
    ],
)
def test_a_schema_that_cannot_be_enforced_is_named(vocabulary: Vocabulary, schema: Any, param: str) -> None:
    with pytest.raises(RequestError) as error:
        forced(vocabulary, {}, schema)
    assert error.value.param == "tools[1].function.parameters" + (f".{param}" if param else "")


def test_one_call_is_all_if_calls_are_not_parallel(vocabulary: Vocabulary) -> None:
    many, one = forced(vocabulary, None), forced(vocabulary, None, single=True)
    counts = [[len(arguments(vocabulary, s, seed)) for seed in range(20)] for s in (many, one)]
    assert max(counts[0]) > 1 and set(counts[1]) == {1}


ANSWER = StructuredOutputs(
    json={"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
)


def test_an_answer_obeys_and_may_be_left_out_for_calls(vocabulary: Vocabulary) -> None:
    calls = Calls(functions({"type": "object", "properties": {"n": {"type": "null"}}}))
    structure = chat_structure(vocabulary, answer=ANSWER.answer(), calls=calls, thinking=True)
    assert structure
    kinds = set()
    for seed in range(60):
        reply = read(vocabulary, say_anything(structure, vocabulary, seed), thinking=True)
        if reply.content is not None:
            assert isinstance(json.loads(reply.content)["a"], int)
        kinds.add((reply.content is not None, bool(reply.tool_calls)))
        assert all(call.complete for call in reply.tool_calls)
    assert kinds == {(True, False), (False, True), (True, True)}


def test_calls_that_a_model_decides_on_are_free_unless_the_function_is_strict(vocabulary: Vocabulary) -> None:
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"]}
    free, strict = Function("free", schema, False, ""), Function("strict", schema, True, "")
    assert chat_structure(vocabulary, answer=None, calls=Calls([free]), thinking=True) is None
    structure = chat_structure(vocabulary, answer=None, calls=Calls([free, strict]), thinking=True)
    assert structure
    found: dict[str, set[str]] = {"free": set(), "strict": set()}
    without = 0
    for seed in range(80):
        reply = read(vocabulary, say_anything(structure, vocabulary, seed), thinking=True)
        without += not reply.tool_calls
        for call in reply.tool_calls:
            found[call.name].add(call.arguments)
    assert without
    assert {json.loads(call)["n"] for call in found["strict"]} == {1, 2}
    assert len(found["free"]) > 5


@pytest.mark.parametrize("partial", ["", "{", '{"a": 4', '{"a": 12}'])
def test_an_answer_that_the_prompt_began_is_completed(vocabulary: Vocabulary, partial: str) -> None:
    structure = chat_structure(
        vocabulary, answer=ANSWER.answer(), calls=Calls(), thinking=False, prefix=partial
    )
    assert structure
    reply = read(vocabulary, say_anything(structure, vocabulary, 5), thinking=False)
    assert isinstance(json.loads(partial + (reply.content or ""))["a"], int)


def test_an_answer_that_the_prompt_began_wrongly_is_refused(vocabulary: Vocabulary) -> None:
    with pytest.raises(RequestError, match="satisfy"):
        chat_structure(vocabulary, answer=ANSWER.answer(), calls=Calls(), thinking=False, prefix="So: {")


def test_thinking_is_free_but_cannot_end_the_reply(vocabulary: Vocabulary) -> None:
    tokenizer = vocabulary.tokenizer
    constraint = forced(vocabulary, None, thinking=True).start(vocabulary)
    for token_id in [*tokenizer.encode("Hm! <|close|>response"), 255]:
        assert allowed(constraint) == [*range(tokenizer.n_base), tokenizer.special["<|close|>"]]
        constraint.accept(token_id)
    ids = tokenizer.encode_segments([*xtml.close_tag("think"), *xtml.open_tag("response")])
    for token_id in ids:
        assert token_id in allowed(constraint)
        constraint.accept(token_id)
        if token_id != ids[0]:
            continue
        assert len(allowed(constraint)) == 1


def test_nothing_but_the_end_follows_the_end(vocabulary: Vocabulary) -> None:
    structure = StructuredOutputs(choice=["yes"]).answer().structure(vocabulary)
    constraint = structure.start(vocabulary)
    for token_id in vocabulary.tokenizer.encode("yes"):
        constraint.accept(token_id)
    for _ in range(3):
        assert allowed(constraint) == list(vocabulary.eos_token_ids)
        constraint.accept(vocabulary.eos_token_ids[0])


def test_a_tokenizer_without_chat_tokens_cannot_force_a_call() -> None:
    plain = Vocabulary(Tokenizer({bytes([b]): b for b in range(256)}, {}), (256,))
    with pytest.raises(CheckpointError, match="no special token"):
        forced(plain, None)


def test_a_model_without_an_end_cannot_be_held_to_a_structure(vocabulary: Vocabulary) -> None:
    endless = Vocabulary(vocabulary.tokenizer, ())
    endless.prepare()
    with pytest.raises(RequestError, match="eos_token_id"):
        forced(endless, None)


def test_a_later_declaration_of_a_name_replaces_an_earlier_one() -> None:
    tools = [{"function": {"name": "f", "parameters": {"type": "object"}}}, {"function": {"name": "g"}}]
    messages = [{"role": "system", "tools": [{"function": {"name": "f", "strict": True}}]}]
    found = declared_functions(tools, messages)
    assert [(f.name, f.parameters, f.strict, f.where) for f in found] == [
        ("f", None, True, "messages[0].tools[0].function"),
        ("g", None, False, "tools[1].function"),
    ]
    assert forced_functions("required", found) == found
    assert forced_functions({"type": "function", "function": {"name": "g"}}, found) == found[1:]
    assert forced_functions("auto", found) == forced_functions("none", found) == []
