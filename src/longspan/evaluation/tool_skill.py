"""The tool-calling skill: declared functions, requests in plain words, the call, answers from results."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from typing import Any

from longspan.evaluation import vocabulary as words
from longspan.evaluation.skills import Check, Turn, assistant, user

Tool = dict[str, Any]


@dataclass(frozen=True)
class Parameter:
    names: tuple[str, ...]
    kind: str  # JSON type
    pool: str  # attribute of `vocabulary`, "WORD" or "NUMBER"


@dataclass(frozen=True)
class Family:
    """Functions that do one thing: possible names, parameters, ways to ask ({0}, {1} = values), results."""

    names: tuple[str, ...]
    about: str
    parameters: tuple[Parameter, ...]
    asks: tuple[str, ...]
    result: str | None = None  # a result with {r}, and how it is told
    told: str = ""


_CITY = Parameter(("city", "location", "place"), "string", "CITIES")
_NAME = Parameter(("name", "person", "to"), "string", "NAMES")
_ROOM = Parameter(("room", "where"), "string", "ROOMS")
_ITEM = Parameter(("item", "product", "thing"), "string", "ITEMS")
_COUNT = Parameter(("count", "amount", "number"), "number", "NUMBER")
_LEVEL = Parameter(("level", "value", "degrees"), "number", "NUMBER")
_DAY = Parameter(("day", "date"), "string", "DAYS")
_TOPIC = Parameter(("query", "topic", "word"), "string", "NOUNS")

FAMILIES = (
    Family(
        ("get_weather", "weather", "current_weather", "get_forecast"),
        "Get the weather of a city.",
        (_CITY,),
        (
            "What is the weather in {0}?",
            "How is the weather in {0}?",
            "Tell me the weather in {0}.",
            "What's the weather like in {0}?",
        ),
        "{r} degrees",
        "It is {r} degrees in {0}.",
    ),
    Family(
        ("get_time", "local_time", "clock"),
        "Get the time in a city.",
        (_CITY,),
        ("What time is it in {0}?", "Tell me the time in {0}."),
        "{r} minutes past nine",
        "It is {r} minutes past nine in {0}.",
    ),
    Family(
        ("send_message", "send_mail", "notify"),
        "Send a word to a person.",
        (_NAME, _TOPIC),
        ("Send {0} the word {1}.", "Tell {0} about the {1}."),
    ),
    Family(("call_person", "phone", "ring"), "Call a person.", (_NAME,), ("Call {0}.", "Please phone {0}.")),
    Family(
        ("set_light", "light", "dim"),
        "Set the light of a room.",
        (_ROOM, _LEVEL),
        ("Set the light in the {0} to {1}.", "Turn the light of the {0} to {1}."),
    ),
    Family(
        ("set_heating", "heat", "thermostat"),
        "Set the heating of a room.",
        (_ROOM, _LEVEL),
        ("Heat the {0} to {1} degrees.", "Set the heating in the {0} to {1}."),
    ),
    Family(
        ("buy", "order_item", "purchase"),
        "Buy things.",
        (_ITEM, _COUNT),
        ("Buy {1} {0}.", "Order {1} {0}, please.", "I need {1} {0}."),
    ),
    Family(
        ("get_stock", "stock", "inventory"),
        "How many are in stock.",
        (_ITEM,),
        ("How many {0} are in stock?", "Do we have {0}?"),
        "{r}",
        "There are {r} {0} in stock.",
    ),
    Family(
        ("book_table", "reserve", "book"),
        "Book a table.",
        (_DAY, _COUNT),
        ("Book a table on {0} for {1} people.", "Reserve a table for {1} on {0}."),
    ),
    Family(
        ("search", "find", "look_up"),
        "Search for something.",
        (_TOPIC,),
        ("Search for {0}.", "Look up {0}.", "Find something about the {0}."),
        "{r} pages",
        "I found {r} pages about {0}.",
    ),
    Family(
        ("travel_time", "distance", "route"),
        "Distance of two cities.",
        (
            Parameter(("start", "source", "origin"), "string", "CITIES"),
            Parameter(("end", "target", "destination"), "string", "CITIES"),
        ),
        ("How far is it from {0} to {1}?", "What is the distance from {0} to {1}?"),
        "{r} miles",
        "It is {r} miles from {0} to {1}.",
    ),
    Family(
        ("add_event", "remind", "schedule"),
        "Add an event to the calendar.",
        (Parameter(("title", "event", "what"), "string", "NOUNS"), _DAY),
        ("Remind me of the {0} on {1}.", "Add the {0} on {1} to my calendar."),
    ),
)


def _draw(rng: random.Random, parameter: Parameter) -> str | int:
    return rng.randrange(2, 100) if parameter.pool == "NUMBER" else rng.choice(getattr(words, parameter.pool))


@dataclass(frozen=True)
class Declared:
    """A family with its names chosen."""

    family: Family
    name: str
    keys: tuple[str, ...]

    @property
    def tool(self) -> Tool:
        properties = {k: {"type": p.kind} for k, p in zip(self.keys, self.family.parameters, strict=True)}
        parameters = {"type": "object", "properties": properties, "required": list(self.keys)}
        function = {"name": self.name, "description": self.family.about, "parameters": parameters}
        return {"type": "function", "function": function}


def _generic(rng: random.Random) -> Family:
    """A function with a made-up name, asked for by its name: nothing but copying helps."""
    name = f"{rng.choice(words.NOUNS)}_{rng.choice(words.NOUNS)}"
    key = rng.choice(words.NOUNS)
    pool, kind = rng.choice((("NOUNS", "string"), ("NUMBER", "number"), ("NAMES", "string")))
    parameter = Parameter((key,), kind, pool)
    asks = (
        f"Call {name} with {key} {{0}}.",
        f"Use {name} with {key} = {{0}}.",
        f"Run {name} on {key} {{0}}.",
    )
    return Family((name,), f"Do the {name.split('_')[0]}.", (parameter,), asks)


def declare(rng: random.Random, count: int) -> list[Declared]:
    """`count` different functions."""
    families = rng.sample(FAMILIES, count)
    families = [_generic(rng) if rng.random() < 0.25 else f for f in families]
    return [
        Declared(f, rng.choice(f.names), tuple(rng.choice(p.names) for p in f.parameters)) for f in families
    ]


def call(rng: random.Random, declared: list[Declared]) -> list[Turn]:
    """A request that one of the functions serves; and the answer from its result."""
    one = rng.choice(declared)
    values = [_draw(rng, p) for p in one.family.parameters]
    arguments = dict(zip(one.keys, values, strict=True))
    answer = assistant(f"I call {one.name}.", "") | {"tool_calls": [_call(one.name, arguments)]}
    key = (one.name, *one.keys, *map(str, values))
    ask = rng.choice(one.family.asks).format(*values)
    turns = [Turn("tool_call", user(ask), answer, _calls(one.name, arguments), key)]
    if one.family.result is None:
        done = "Done."
        result: dict[str, Any] = {"role": "tool", "name": one.name, "content": "ok"}
        check: Check = lambda reply: (reply.content or "").strip() == done  # noqa: E731
        return [*turns, Turn("tool_result", [result], assistant("It is done.", done), check)]
    number = rng.randrange(2, 100)
    told = one.family.told.format(*values, r=number)
    result = {"role": "tool", "name": one.name, "content": one.family.result.format(r=number)}
    check = lambda reply: (reply.content or "").strip() == told  # noqa: E731
    return [*turns, Turn("tool_result", [result], assistant("I tell the result.", told), check)]


def _call(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {"type": "function", "id": "call_0", "function": function}


def _calls(name: str, arguments: dict[str, Any]) -> Check:
    def check(reply: Any) -> bool:
        calls = reply.tool_calls or []
        return len(calls) == 1 and _name_and_arguments(calls[0]) == (name, arguments)

    return check


def _name_and_arguments(call: Any) -> tuple[str, Any]:
    """Of a call as a dict in OpenAI's shape or as an object with `name` and `arguments`."""
    function = call["function"] if isinstance(call, dict) else call
    name = function["name"] if isinstance(function, dict) else function.name
    arguments = function["arguments"] if isinstance(function, dict) else function.arguments
    try:
        return name, json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        return name, None
