"""The grammar of a chat reply: what its answer must be, and the calls that it must or may make.

Thinking is free, and the grammar begins in the response channel whether there is thinking or not. Tags come
as exactly the tokens that a prompt has for them. In order:

- A reply that must call has an empty response. One that may call has an answer, calls, or both.
- Calls are those of declared functions, one after the other. Arguments obey the schema of a function that
  must be called or is `strict`; else they are any keys with values of any type.
- Then the message is closed, and only the end is left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from longspan.chat import Segment, Tokenizer, xtml
from longspan.chat.tool_choice import Function
from longspan.structure.answer import Answer
from longspan.structure.arguments import any_arguments, arguments
from longspan.structure.lark import Rules
from longspan.structure.structure import Structure
from longspan.structure.vocabulary import Vocabulary, dump


@dataclass(frozen=True)
class Calls:
    """What a reply may call, or with `forced` must call one of; with `single` there is one call at most."""

    functions: Sequence[Function] = ()
    forced: bool = False
    single: bool = False


def chat_structure(
    vocabulary: Vocabulary, *, answer: Answer | None, calls: Calls, thinking: bool, prefix: str = ""
) -> Structure | None:
    """None where the reply is free. `thinking`: the prompt opened the think channel, otherwise the response
    channel, and `prefix` is the text that it has there already.

    Raises RequestError naming the field, or the part of a schema, that can't be enforced.
    """
    if not (answer or calls.forced or any(function.strict for function in calls.functions)):
        return None
    tokenizer = vocabulary.tokenizer
    grammars = [{"lark_grammar": _reply(tokenizer, answer, calls, thinking)}]
    prefix_ids = tuple(tokenizer.encode(prefix)) if answer and not calls.forced else ()
    if answer:
        answer.structure(vocabulary, prefix_ids)  # so that a fault in it is not laid on the tools
        grammars.append({"name": "answer", **answer.grammar})
    structure = Structure(dump(*grammars), thinking, prefix_ids)
    structure.check(vocabulary, "tools" if calls.functions else "response_format")
    return structure


def _reply(tokenizer: Tokenizer, answer: Answer | None, calls: Calls, thinking: bool) -> str:
    rules = Rules(tokenizer)
    # The token that closes the think channel is not part of the grammar.
    opened = [*xtml.close_tag("think")[1:], *xtml.open_tag("response")] if thinking else []
    content = "@answer" if answer else rules.any_text
    close, end = rules.tokens(xtml.close_tag("response")), rules.tokens(xtml.close_tag("message"))
    called = f"{_calls(rules, calls)} {end}" if calls.functions else ""
    if calls.forced:
        reply = f"{close} {called}"
    elif not called:
        reply = f"{content} {close} {end}"
    else:
        reply = f"{content} {close} ({end} | {called}) | {close} {called}"
    rules.add("start", f"{rules.tokens(opened)} ({reply})")
    return str(rules)


def _calls(rules: Rules, calls: Calls) -> str:
    first, more = [], []
    number = "/[1-9][0-9]{0,3}/"
    for function in calls.functions:
        constrained = calls.forced or function.strict
        body = arguments(rules, function) if constrained else any_arguments(rules)
        first.append(_call(rules, function.name, [Segment("1")], body))
        more.append(_call(rules, function.name, rules.terminal(number), body))
    others = "" if calls.single else f"({' | '.join(more)})*"
    opened, closed = rules.tokens(xtml.open_tag("tools")), rules.tokens(xtml.close_tag("tools"))
    return rules.rule(f"{opened} ({' | '.join(first)}) {others} {closed}")


def _call(rules: Rules, name: str, index: list[Segment] | str, body: str) -> str:
    head = xtml.open_tag("call", [("tool", name), ("index", "INDEX")])
    at = len(head) - 1 - head[::-1].index(Segment("INDEX"))
    number = index if isinstance(index, str) else rules.tokens(index)
    before, after, close = map(rules.tokens, (head[:at], head[at + 1 :], xtml.close_tag("call")))
    return f"{before} {number} {after} {body} {close}"
