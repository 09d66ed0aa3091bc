"""The arguments of a tool call in XTML, as the schema of its function wants them.

A function whose schema is a plain object (`properties`, `required`, `additionalProperties`) gets `argument`
tags: every required property, none twice, in any order (beyond 64 properties in that of the schema). The
type in a tag is that of the value. A string stands there raw; `enum`, `const`, `pattern` and the lengths
hold for it, while `format` is a note to the model. Any other value is JSON of the property's schema.
Undeclared keys may come where `additionalProperties` says so, or where there are no `properties` at all.

Where the schema says more, or a property can't be told in tags, the call has one `json` block instead: an
object that satisfies all of it.
"""

from __future__ import annotations

import json
from typing import Any

from longspan.chat import Segment, xtml
from longspan.chat.tool_choice import Function
from longspan.errors import RequestError
from longspan.structure.lark import Rules
from longspan.structure.schema import check_schema, with_blanks
from longspan.structure.values import Definitions, NotRaw, types_of, values

MAX_ANY_ORDER = 64  # bits of the parameter of a rule

_COMBINED = {"allOf", "anyOf", "oneOf", "not", "if", "then", "else", "const", "enum", "$ref", "$dynamicRef"}
_COMBINED |= {"patternProperties", "propertyNames", "minProperties", "maxProperties", "unevaluatedProperties"}
_COMBINED |= {"dependentRequired", "dependentSchemas", "dependencies"}


def arguments(rules: Rules, function: Function) -> str:
    """The grammar of what stands in a call. Raises RequestError naming the part that can't be enforced."""
    schema, where = function.parameters, f"{function.where}.parameters"
    if schema is None:
        return '""'
    check_schema(schema, where)
    try:
        if "object" not in types_of(schema, Definitions(schema)):
            what = f"`{where}` allows no object, and arguments are one."
            raise RequestError(what, param=where, remedy='Send {"type": "object", "properties": {...}}.')
        schema = ({} if schema is True else schema) | {"type": "object"}
        check_schema(schema, where)  # once more: nothing but an object can satisfy it now
        return _tags(rules, schema)
    except NotRaw:
        return _block(rules, schema)


def any_arguments(rules: Rules) -> str:
    """Any keys with values of any type."""
    return _tags(rules, {})


def _block(rules: Rules, schema: Any) -> str:
    """All arguments as one JSON object."""
    tag = rules.tokens(xtml.open_tag("json", [("type", "object")]))
    return rules.rule(f"{tag} %json {json.dumps(with_blanks(schema))} {rules.tokens(xtml.close_tag('json'))}")


def _tags(rules: Rules, schema: dict[str, Any]) -> str:
    if _COMBINED & schema.keys():
        raise NotRaw
    defs = Definitions(schema)
    declared, required = dict(schema.get("properties", {})), list(schema.get("required", ()))
    for name in required:
        declared.setdefault(name, schema.get("additionalProperties", True))
    given = {
        name: _argument(rules, [xtml.Segment(xtml.escape(name))], part, defs)
        for name, part in declared.items()
    }
    if not all(given[name] for name in required):
        raise NotRaw
    given = {name: rule for name, rule in given.items() if rule}
    extra = _undeclared(rules, schema.get("additionalProperties", "properties" not in schema), declared, defs)
    if len(given) > MAX_ANY_ORDER:
        parts = [rule if name in required else f"{rule}?" for name, rule in given.items()]
        return rules.rule(" ".join(parts + ([f"{extra}*"] if extra else [])))
    if not given:
        return f"{extra}*" if extra else '""'
    order = sorted(given, key=lambda name: name not in required)
    return _each_once(rules, [given[name] for name in order], len(set(required)), extra)


def _each_once(rules: Rules, once: list[str], num_required: int, extra: str | None) -> str:
    """Bit i of the rule's parameter: once[i] has come. The first `num_required` must."""
    name = rules.new_name()
    end = f'"" %if is_ones([0:{num_required}])' if num_required else '""'
    lines = [end, *(f"{rule} {name}::set_bit({i}) %if bit_clear({i})" for i, rule in enumerate(once))]
    if extra:
        lines.append(f"{extra} {name}::_")
    rules.add(f"{name}::_", "\n    | ".join(lines))
    return f"{name}::0"


def _argument(rules: Rules, key: list[Segment] | str, schema: Any, defs: Definitions) -> str | None:
    """One argument. `key`: segments, or the name of a terminal. None if no value satisfies the schema."""
    close = rules.tokens(xtml.close_tag("argument"))
    alternatives = []
    for label, value in values(rules, schema, defs):
        head = xtml.open_tag("argument", [("key", "KEY"), ("type", label)])
        at = head.index(Segment("KEY"))
        key_part = key if isinstance(key, str) else rules.tokens(key)
        alternatives.append(
            f"{rules.tokens(head[:at])} {key_part} {rules.tokens(head[at + 1 :])} {value} {close}"
        )
    return rules.rule(" | ".join(alternatives)) if alternatives else None


def _undeclared(rules: Rules, schema: Any, declared: dict[str, Any], defs: Definitions) -> str | None:
    """An argument of any key but those `declared`."""
    if schema is False:
        return None
    key = '/([^"&]|&amp;|&quot;)*/'
    if declared:
        key += " & ~(" + " | ".join(json.dumps(xtml.escape(name)) for name in declared) + ")"
    return _argument(rules, rules.terminal(key), schema, defs)
