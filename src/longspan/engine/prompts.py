"""Prompts as `LLM.generate` takes them, vLLM's `TextPrompt` and `TokensPrompt` included -> texts and ids."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from longspan.errors import RequestError
from longspan.token_ids import plain, shown, to_token_ids

Prompt = str | Sequence[int] | Mapping[str, Any]
"""A text, token ids, {"prompt": text} or {"prompt_token_ids": ids}."""


def parse_prompts(prompts: Any, vocab_size: int) -> list[str | list[int]]:
    """One prompt or several; token ids may be integers of any type, in lists, arrays or tensors.

    A list that holds nothing but single items is one prompt of token ids. Raises RequestError for what is no
    prompt.
    """
    prompts = plain(prompts)
    if isinstance(prompts, str | Mapping):
        return [_prompt(prompts, vocab_size, "prompts")]
    if isinstance(prompts, bytes) or not isinstance(prompts, Iterable):
        raise _no_prompt(prompts, "prompts")
    items = [plain(item) for item in prompts]
    if items and not any(isinstance(item, Iterable) for item in items):
        return [to_token_ids(items, vocab_size, "prompts")]
    return [_prompt(item, vocab_size, f"prompts[{i}]") for i, item in enumerate(items)]


def _prompt(item: Any, vocab_size: int, name: str) -> str | list[int]:
    if isinstance(item, Mapping):
        if set(item) == {"prompt_token_ids"}:
            return to_token_ids(item["prompt_token_ids"], vocab_size, f"{name}.prompt_token_ids")
        item = item["prompt"] if set(item) == {"prompt"} and isinstance(item["prompt"], str) else item
    if isinstance(item, str):
        return item
    if isinstance(item, list | tuple):
        return to_token_ids(item, vocab_size, name)
    raise _no_prompt(item, name)


def _no_prompt(found: Any, name: str) -> RequestError:
    return RequestError(
        f"`{name}` is {shown(found)}.",
        param=name,
        remedy='Give each as a text, a list of token ids, {"prompt": text} or {"prompt_token_ids": ids}.',
    )
