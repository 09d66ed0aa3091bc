"""Trains the small tokenizer: byte BPE over English and chats, written as a `tiktoken.model`.

Digits never merge (pieces of digits are left out of the counts), so that arithmetic works digit by digit. The
256 special ids stand behind the base vocabulary at the offsets of the published Kimi K3 tokenizer.
"""

from __future__ import annotations

import base64
import itertools
import json
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path

import regex

from longspan.chat.tokenizer import PATTERN

N_BASE = 1792
SPECIAL = {
    0: "[BOS]",
    1: "[EOS]",
    2: "<|end_of_msg|>",
    3: "<|open|>",
    4: "<|close|>",
    5: "<|sep|>",
    6: "[start_header_id]",
    7: "[end_header_id]",
    9: "[EOT]",
    18: "<|media_begin|>",
    19: "<|media_content|>",
    20: "<|media_end|>",
    21: "<|media_pad|>",
    65: "<osagent_mode>",
    254: "[UNK]",
    255: "[PAD]",
}

_PIECE = regex.compile(PATTERN, regex.V1)


def count_pieces(texts: Iterable[str]) -> Counter[bytes]:
    counts: Counter[bytes] = Counter()
    for text in texts:
        counts.update(p.encode() for p in _PIECE.findall(text) if not p[0].isnumeric())
    return counts


def train(counts: Counter[bytes], n_base: int = N_BASE) -> list[bytes]:
    """Tokens by rank: the 256 bytes, then merges of the most frequent pair (ties: smallest bytes)."""
    tokens = [bytes([b]) for b in range(256)]
    words = [[bytes([b]) for b in piece] for piece in counts]
    weights = list(counts.values())
    pairs: Counter[tuple[bytes, bytes]] = Counter()
    where: dict[tuple[bytes, bytes], set[int]] = defaultdict(set)
    for i, word in enumerate(words):
        for pair in itertools.pairwise(word):
            pairs[pair] += weights[i]
            where[pair].add(i)
    while len(tokens) < n_base:
        best = min(pairs, key=lambda p: (-pairs[p], p))
        merged = best[0] + best[1]
        tokens.append(merged)
        for i in where.pop(best):
            word = words[i]
            for pair in itertools.pairwise(word):
                pairs[pair] -= weights[i]
            words[i] = word = _merge(word, best, merged)
            for pair in itertools.pairwise(word):
                pairs[pair] += weights[i]
                where[pair].add(i)
        del pairs[best]
    return tokens


def _merge(word: list[bytes], pair: tuple[bytes, bytes], merged: bytes) -> list[bytes]:
    out: list[bytes] = []
    i = 0
    while i < len(word):
        if i + 1 < len(word) and (word[i], word[i + 1]) == pair:
            out.append(merged)
            i += 2
        else:
            out.append(word[i])
            i += 1
    return out


def write(tokens: list[bytes], directory: Path) -> None:
    """tiktoken.model, tokenizer_config.json and generation_config.json."""
    directory.mkdir(parents=True, exist_ok=True)
    lines = [f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(tokens)]
    (directory / "tiktoken.model").write_text("".join(lines), encoding="ascii")
    added = {
        str(len(tokens) + offset): {
            "content": name,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": True,
        }
        for offset, name in SPECIAL.items()
    }
    config = {
        "added_tokens_decoder": added,
        "additional_special_tokens": ["<|end_of_msg|>"],
        "bos_token": "[BOS]",
        "eos_token": "[EOS]",
        "pad_token": "[PAD]",
        "unk_token": "[UNK]",
        "model_max_length": 1048576,
        "tokenizer_class": "TikTokenTokenizer",
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n")
    generation = {"max_length": 1048576, "eos_token_id": len(tokens) + 2}
    (directory / "generation_config.json").write_text(json.dumps(generation) + "\n")
