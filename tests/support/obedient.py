"""A model that says anything it may, and what it said."""

from __future__ import annotations

import random
from functools import lru_cache

import numpy as np

from longspan.chat import Reply, ReplyParser
from longspan.structure import Constraint, Structure, Vocabulary

_ENDS = (b'"', b"}", b"]", b",")
_CONTROL = ("<|close|>", "<|sep|>", "<|end_of_msg|>")


def allowed(constraint: Constraint) -> list[int]:
    return np.flatnonzero(_may_come(constraint)).tolist()


def say_anything(
    structure: Structure, vocabulary: Vocabulary, seed: int, *, closes: float = 0.4, limit: int = 4000
) -> list[int]:
    """A reply that closes what is open with likelihood `closes`, else any token that may come, to its end."""
    rng, tokenizer = random.Random(seed), vocabulary.tokenizer
    closing, single = _kinds(vocabulary)
    constraint = structure.start(vocabulary)
    ids: list[int] = []
    while len(ids) < limit:
        legal, draw = _may_come(constraint), rng.random()
        assert legal.any(), f"nothing may follow {tokenizer.decode(ids)!r}"
        wanted = closing if draw < closes else single if draw > 0.7 else legal
        candidates = np.flatnonzero(legal & wanted if (legal & wanted).any() else legal)
        ids.append(int(candidates[rng.randrange(len(candidates))]))
        constraint.accept(ids[-1])
        if ids[-1] in vocabulary.eos_token_ids:
            return ids
    raise AssertionError(f"no end of {tokenizer.decode(ids)[:500]!r}")


def _may_come(constraint: Constraint) -> np.ndarray:
    return np.unpackbits(constraint.mask().numpy().view(np.uint8), bitorder="little").astype(bool)


@lru_cache(maxsize=4)
def _kinds(vocabulary: Vocabulary) -> tuple[np.ndarray, np.ndarray]:
    """Which tokens may close something, and which are of one byte: some patterns wait for one."""
    tokenizer = vocabulary.tokenizer
    closing, single = np.zeros((2, (tokenizer.vocab_size + 31) // 32 * 32), dtype=bool)
    for token_id in range(tokenizer.vocab_size):
        token = tokenizer.token_bytes(token_id)
        closing[token_id] = token.startswith(_ENDS) or token.decode(errors="replace") in _CONTROL
        single[token_id] = len(token) == 1
    return closing, single


def text_of(vocabulary: Vocabulary, ids: list[int]) -> str:
    """A reply that is text, without its end."""
    assert ids[-1] in vocabulary.eos_token_ids
    return vocabulary.tokenizer.decode(ids[:-1])


def read(vocabulary: Vocabulary, ids: list[int], *, thinking: bool) -> Reply:
    """What a chat reply says. However its tokens are grouped, that is the same."""
    replies = []
    for size in (1, 2, 7, len(ids)):
        ids_of_calls = iter(range(10**6))
        parser = ReplyParser(
            vocabulary.tokenizer, thinking=thinking, call_id=lambda it=ids_of_calls: f"{next(it)}"
        )
        for start in range(0, len(ids), size):
            parser.push(ids[start : start + size])
        parser.finish()
        replies.append(parser.reply)
    assert all(reply == replies[0] for reply in replies)
    return replies[0]
