"""Where grammars meet a tokenizer: llguidance's view of ours, and the compiling of grammars for it.

llguidance compiles by recursion, one level for each rule, definition or nested schema on the way, and a stack
that is full ends the process. So each grammar is compiled by a thread whose stack holds the largest one that
the checks here let through. Its time doubles with every regex in an intersection, so these are counted too.
What takes too long nevertheless is left behind with its thread.
"""

from __future__ import annotations

import atexit
import json
import re
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeVar

from llguidance import LLMatcher, LLTokenizer

from longspan.chat import Tokenizer
from longspan.chat.tokenizer import PATTERN
from longspan.errors import RequestError

MAX_TEXT = 200_000  # characters of a regex or grammar, and of all choices
MAX_NODES = 10_000  # objects and lists in a schema
MAX_INTERSECTIONS = 16  # of regexes
_STACK_BYTES = 2**29  # of address space; memory is taken as it is used
_SECONDS = 10

# A string or regex of Lark, to be passed over, or an intersection.
_AND = re.compile(r'"(?:\\.|[^"\\\n])*"|/(?:\\.|[^/\\\n])+/|(&)')

_stack_size = threading.Lock()
_under_way: set[Future[Any]] = set()
T = TypeVar("T")


@dataclass(frozen=True)
class Vocabulary:
    """A tokenizer, and the tokens that end a text."""

    tokenizer: Tokenizer
    eos_token_ids: tuple[int, ...]

    def compile(self, grammar: str) -> Future[LLMatcher]:
        """A matcher at the start of a grammar, to be copied and never fed. It may hold an error.

        Raises RequestError if the model knows no end: nothing could tell that a reply is complete.
        """
        if not self.eos_token_ids:
            what = "This model has no token that ends a text, so no structure can be enforced."
            raise RequestError(what, remedy="Give config.json an eos_token_id.")
        return _compile(self, grammar)

    def prepare(self) -> None:
        """Begins what the first grammar would have to wait for: half a second for 160,000 tokens."""
        if self.eos_token_ids:
            self.compile(dump({"lark_grammar": 'start: ""'}))


def dump(*grammars: dict[str, Any]) -> str:
    """llguidance's grammar: the first is the one to begin with, others are used by name."""
    return json.dumps({"grammars": grammars})


@lru_cache(maxsize=4096)
def error_in(grammar: str) -> str | None:
    """What is wrong with a grammar, whatever the tokenizer; None if nothing is."""
    return waited_for(_on_large_stack(lambda: _error_in(grammar)))


def waited_for(compiled: Future[T]) -> T:
    """Raises RequestError if it takes too long."""
    try:
        return compiled.result(_SECONDS)
    except TimeoutError as error:
        what = f"The structure that was asked for takes more than {_SECONDS} seconds to compile."
        raise RequestError(what, remedy="Simplify it: fewer patterns at a time for one string.") from error


def check_length(text: str, param: str) -> None:
    """Raises RequestError for a regex or grammar that is too long to compile."""
    _at_most(MAX_TEXT, len(text), "characters", param)


def check_intersections(lark: str, param: str) -> None:
    """Raises RequestError for a grammar in Lark with too many intersections."""
    found = sum(match[1] is not None for match in _AND.finditer(lark))
    _at_most(MAX_INTERSECTIONS, found, "intersections", param)


def check_size(schema: Any, param: str) -> None:
    """Raises RequestError for a schema that is too large to compile."""
    nodes, merged, patterns, todo = 0, 0, 0, [schema]
    while todo:
        node = todo.pop()
        if isinstance(node, dict):
            here = sum(key in node for key in ("pattern", "format"))
            patterns += here
            # What stands beside a reference or alternatives is intersected with them.
            merged += here if any(key in node for key in ("$ref", "anyOf", "oneOf")) else 0
            merged += len(node["allOf"]) if isinstance(node.get("allOf"), list) else 0
        if isinstance(node, dict | list):
            nodes += 1
            todo += node.values() if isinstance(node, dict) else node
    _at_most(MAX_NODES, nodes, "objects and lists", param)
    _at_most(MAX_INTERSECTIONS, min(merged, patterns), "patterns that may be intersected", param)


def _at_most(most: int, found: int, of_what: str, param: str) -> None:
    if found > most:
        raise RequestError(
            f"`{param}` has {found} {of_what}.", param=param, remedy=f"Legal are at most {most}."
        )


def _on_large_stack(function: Callable[[], T]) -> Future[T]:
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:  # a panic of llguidance's is no Exception
            future.set_exception(error if isinstance(error, Exception) else RuntimeError(str(error)))

    with _stack_size:
        before = threading.stack_size(_STACK_BYTES)
        try:
            threading.Thread(target=run, name="grammar", daemon=True).start()
        finally:
            threading.stack_size(before)
    _under_way.add(future)
    future.add_done_callback(_under_way.discard)
    return future


@atexit.register
def _finish() -> None:
    """A thread that comes back to Python while the interpreter ends is unwound, and Rust dies of it."""
    wait(tuple(_under_way), _SECONDS)


@lru_cache(maxsize=64)
def _compile(vocabulary: Vocabulary, grammar: str) -> Future[LLMatcher]:
    return _on_large_stack(lambda: LLMatcher(_ll_tokenizer(vocabulary), grammar, log_level=0))


@lru_cache(maxsize=8)
def _ll_tokenizer(vocabulary: Vocabulary) -> LLTokenizer:
    tokenizer = vocabulary.tokenizer
    return LLTokenizer.from_tiktoken(  # type: ignore[attr-defined]
        encoder={tokenizer.token_bytes(token_id): token_id for token_id in range(tokenizer.n_base)},
        special_tokens=tokenizer.special,
        pattern=PATTERN,
        eos_token=list(vocabulary.eos_token_ids),
        n_vocab=tokenizer.vocab_size,
    )


def _error_in(grammar: str) -> str | None:
    failed, messages = LLMatcher.validate_grammar_with_warnings(grammar)
    return messages[0] if failed else None
