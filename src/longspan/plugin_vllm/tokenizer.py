"""`longspan.chat`'s tokenizer as vLLM wants one (`--tokenizer-mode longspan`): no remote code, no conversion.

A token is named as byte-level BPE names it: each byte a printable character, so every id has a string of its
own, whether or not its bytes are UTF-8. That is how grammar backends learn the vocabulary (xgrammar takes us
for what we are, a tiktoken vocabulary, by the name of the file). A special token has its own name, and never
comes out of `encode`, unless it is asked for by `Markup`, which no request can make.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from transformers import BatchEncoding
from vllm.transformers_utils.repo_utils import get_non_weight_snapshot_path

from longspan.chat import Segment, Tokenizer
from longspan.chat.xtml import CONTROL_TOKENS
from longspan.config import load_config
from longspan.serve.prompts import Chat, chat_prompt
from longspan.serve.thinking import thinking_options


def _byte_names() -> list[str]:
    """A printable character for each byte: itself where it is one, else from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


class Markup(str):
    """Text whose markers are control tokens: what our parsers tell vLLM of the tags around reasoning."""


MARKERS = re.compile("(" + "|".join(map(re.escape, CONTROL_TOKENS)) + ")")
_NAMES = _byte_names()
_BYTES = {name: byte for byte, name in enumerate(_NAMES)}


class LongspanTokenizer:
    """vLLM's `TokenizerLike`. `base` is the tokenizer it wraps."""

    vocab_files_names = {"vocab_file": "tiktoken.model"}  # noqa: RUF012  (read as transformers' attribute)
    is_fast = True  # a token's text does not depend on its neighbours, so vLLM need not look for spaces

    def __init__(
        self,
        base: Tokenizer,
        *,
        eos_token_id: int,
        bos_token_id: int | None = None,
        pad_token_id: int | None = None,
        truncation_side: str = "left",
        name_or_path: str = "",
    ) -> None:
        self.base = base
        self.eos_token_id = eos_token_id
        self.bos_token_id: Any = bos_token_id  # vLLM's protocol has no word for a tokenizer without
        self.pad_token_id: Any = pad_token_id
        self.truncation_side = truncation_side
        self.name_or_path = name_or_path
        self.vocab_size = base.vocab_size
        self.max_token_id = base.vocab_size - 1
        tokens = [base.token_bytes(token_id) for token_id in range(base.n_base)]
        self.max_chars_per_token = max(map(len, tokens))
        self._names = ["".join(map(_NAMES.__getitem__, token)) for token in tokens] + list(base.special)
        self._ids = {name: token_id for token_id, name in enumerate(self._names)}

    @classmethod
    def from_pretrained(
        cls,
        path_or_repo_id: str | Path,
        *args: Any,
        revision: str | None = None,
        download_dir: str | None = None,
        truncation_side: str = "left",
        **kwargs: Any,
    ) -> LongspanTokenizer:
        """From a directory, or a repository of the Hugging Face hub. Raises CheckpointError, ConfigError."""
        directory = Path(path_or_repo_id)
        if not directory.is_dir():
            name = str(path_or_repo_id)
            directory = Path(get_non_weight_snapshot_path(name, revision=revision, cache_dir=download_dir))
        config = load_config(directory)
        base = Tokenizer.from_dir(directory)
        return cls(
            base,
            eos_token_id=config.eos_token_ids[0],
            bos_token_id=config.bos_token_id,
            pad_token_id=config.pad_token_id,
            truncation_side=truncation_side,
            name_or_path=str(path_or_repo_id),
        )

    def __len__(self) -> int:
        return self.vocab_size

    @property
    def all_special_tokens(self) -> list[str]:
        return list(self.base.special)

    @property
    def all_special_ids(self) -> list[int]:
        return list(self.base.special.values())

    def num_special_tokens_to_add(self) -> int:
        return 0

    def get_vocab(self) -> dict[str, int]:
        return self._ids

    def get_added_vocab(self) -> dict[str, int]:
        return self.base.special

    def __call__(
        self,
        text: str | list[str],
        text_pair: str | None = None,
        add_special_tokens: bool = True,
        truncation: bool = False,
        max_length: int | None = None,
    ) -> BatchEncoding:
        """`encode` for one text or several. Raises ValueError for a pair."""
        if text_pair is not None:
            raise ValueError("Pairs of texts are for classifiers; this tokenizer takes one text at a time.")
        texts = [text] if isinstance(text, str) else text
        rows = [self.encode(each, truncation, max_length) for each in texts]
        masks = [[1] * len(row) for row in rows]
        if isinstance(text, str):
            return BatchEncoding({"input_ids": rows[0], "attention_mask": masks[0]})
        return BatchEncoding({"input_ids": rows, "attention_mask": masks})

    def encode(
        self,
        text: str,
        truncation: bool | None = None,
        max_length: int | None = None,
        add_special_tokens: bool = True,
    ) -> list[int]:
        """Ids of ordinary text: what looks like a special token stays text, and none is added."""
        ids = self._encode_markup(text) if isinstance(text, Markup) else self.base.encode(text)
        if truncation is False or max_length is None or len(ids) <= max_length:
            return ids
        return ids[len(ids) - max_length :] if self.truncation_side == "left" else ids[:max_length]

    def _encode_markup(self, markup: Markup) -> list[int]:
        pieces = [piece for piece in MARKERS.split(markup) if piece]
        return self.base.encode_segments(Segment(piece, piece in CONTROL_TOKENS) for piece in pieces)

    def decode(self, ids: Sequence[int] | int, skip_special_tokens: bool = False) -> str:
        return self.base.decode([ids] if isinstance(ids, int) else ids, skip_special=skip_special_tokens)

    def convert_ids_to_tokens(self, ids: Iterable[int], skip_special_tokens: bool = False) -> list[str]:
        """Names of tokens; "" for an id outside of the vocabulary, which vLLM lets a prompt have."""
        limit = self.base.n_base if skip_special_tokens else self.vocab_size
        kept = (i for i in ids if i < limit or i >= self.vocab_size)
        return [self._names[i] if i < self.vocab_size else "" for i in kept]

    def convert_tokens_to_ids(self, tokens: str | list[str]) -> Any:
        """None for a name that is none."""
        return self._ids.get(tokens) if isinstance(tokens, str) else [self._ids.get(t) for t in tokens]

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        parts = (
            name.encode() if name in self.base.special else bytes(_BYTES[char] for char in name)
            for name in tokens
        )
        return b"".join(parts).decode("utf-8", errors="replace")

    def apply_chat_template(
        self, messages: list[Any], tools: list[dict[str, Any]] | None = None, **options: Any
    ) -> list[int]:
        """Token ids of a chat, rendered as `longspan serve` does. Raises RequestError naming what is wrong.

        `options`: `add_generation_prompt`, `continue_final_message`, `tool_choice`, `response_format`,
        `reasoning_effort` and whatever `chat_template_kwargs` may hold there.
        """
        return chat_prompt(self.base, _chat(messages, tools, **options)).token_ids


def _chat(
    messages: list[Any],
    tools: list[dict[str, Any]] | None = None,
    *,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    tool_choice: str | dict[str, Any] | None = None,
    response_format: dict[str, Any] | None = None,
    reasoning_effort: str | None = None,
    chat_template: None = None,
    documents: None = None,
    tokenize: bool = True,
    return_dict: bool = False,
    **template: Any,
) -> Chat:
    return Chat(
        messages=messages,
        tools=tools,
        tool_choice=tool_choice,
        response_format=response_format,
        thinking=thinking_options(reasoning_effort, None, template),
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message,
    )
