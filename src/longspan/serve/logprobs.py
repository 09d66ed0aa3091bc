"""Log-probabilities in the shapes of chats and completions, and what all shapes need."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from longspan.chat import Tokenizer
from longspan.engine.output import TokenLogprobs

_LOWEST = -9999.0  # stands for minus infinity, which JSON can't say


def chat_logprobs(tokenizer: Tokenizer, steps: Iterable[TokenLogprobs], top: int) -> list[dict[str, Any]]:
    """`choices[].logprobs.content`: an entry per generated token, markup too, with the `top` likeliest."""
    entries = []
    for candidates in steps:
        chosen = next(iter(candidates))
        entry = _chat_token(tokenizer, chosen, candidates)
        entry["top_logprobs"] = [
            _chat_token(tokenizer, token, candidates) for token in top_tokens(candidates, top)
        ]
        entries.append(entry)
    return entries


def _chat_token(tokenizer: Tokenizer, token: int, candidates: TokenLogprobs) -> dict[str, Any]:
    raw = tokenizer.token_bytes(token)
    return {
        "token": raw.decode("utf-8", errors="replace"),
        "logprob": finite(candidates[token].logprob),
        "bytes": list(raw),
    }


def completion_logprobs(
    tokenizer: Tokenizer,
    token_ids: Iterable[int],
    steps: Iterable[TokenLogprobs | None],
    top: int,
    offset: int,
) -> dict[str, Any]:
    """`choices[].logprobs` of a completion, its text starts at `offset`. A prompt's first token has none."""
    columns: dict[str, list[Any]] = {
        "tokens": [],
        "token_logprobs": [],
        "top_logprobs": [],
        "text_offset": [],
    }
    for token, candidates in zip(token_ids, steps, strict=True):
        text = token_text(tokenizer, token)
        columns["tokens"].append(text)
        columns["text_offset"].append(offset)
        offset += len(text)
        if candidates is None:
            columns["token_logprobs"].append(None)
            columns["top_logprobs"].append(None)
        else:
            columns["token_logprobs"].append(finite(candidates[token].logprob))
            best = {
                token_text(tokenizer, t): finite(candidates[t].logprob) for t in top_tokens(candidates, top)
            }
            columns["top_logprobs"].append(best)
    return columns


def prompt_logprobs(
    tokenizer: Tokenizer, steps: Iterable[TokenLogprobs | None]
) -> list[dict[str, Any] | None]:
    """vLLM's `prompt_logprobs`: per token, id -> {logprob, rank, decoded_token}; None for the first."""
    return [
        None
        if candidates is None
        else {
            str(token): {
                "logprob": finite(c.logprob),
                "rank": c.rank,
                "decoded_token": token_text(tokenizer, token),
            }
            for token, c in candidates.items()
        }
        for candidates in steps
    ]


def top_tokens(candidates: TokenLogprobs, count: int) -> list[int]:
    """The `count` likeliest, the likeliest first."""
    ranked = sorted(candidates, key=lambda token: candidates[token].rank)
    return [token for token in ranked if candidates[token].rank <= count][:count]


def token_text(tokenizer: Tokenizer, token: int) -> str:
    return tokenizer.token_bytes(token).decode("utf-8", errors="replace")


def finite(logprob: float) -> float:
    """As JSON can say it."""
    return max(logprob, _LOWEST)
