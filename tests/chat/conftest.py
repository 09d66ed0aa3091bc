"""A small tokenizer in the published file format, trained on the fly."""

from __future__ import annotations

import base64
import json
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest

from longspan.chat import Tokenizer

CORPUS = (
    "message role user assistant system tool index think response tools call argument json key type string "
    "number the weather in Oslo is cold and the stock level of the item is low, so it is best to wait for "
    'the next one. get_weather get_wealth search {"city": "Oslo", "unit": "C"} '
    "你好世界 안녕하세요 한국어 👩‍👩‍👧 déjà vu naïve aaaaaaaaaaaaaaaa\n"
)
NAMED = ["[BOS]", "[EOS]", "<|end_of_msg|>", "<|open|>", "<|close|>", "<|sep|>"]
MEDIA = ["<|media_begin|>", "<|media_content|>", "<|media_end|>", "<|media_pad|>"]


def train_ranks(text: str, num_merges: int) -> dict[bytes, int]:
    """All bytes, then the most frequent pair of tokens, `num_merges` times over."""
    tokens = [bytes([byte]) for byte in range(256)]
    line = [bytes([byte]) for byte in text.encode()]
    for _ in range(num_merges):
        left, right = Counter(pairwise(line)).most_common(1)[0][0]
        merged, i = [], 0
        while i < len(line):
            joined = line[i : i + 2] == [left, right]
            merged.append(left + right if joined else line[i])
            i += 1 + joined
        line = merged
        tokens.append(left + right)
    return {token: rank for rank, token in enumerate(dict.fromkeys(tokens))}


def write_tokenizer(directory: Path, ranks: dict[bytes, int], names: dict[int, str]) -> None:
    lines = [f"{base64.b64encode(token).decode()} {rank}" for token, rank in ranks.items()]
    (directory / "tiktoken.model").write_text("\n".join(lines) + "\n")
    added = {str(token_id): {"content": name, "special": True} for token_id, name in names.items()}
    (directory / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": added}))


@pytest.fixture(scope="session")
def ranks() -> dict[bytes, int]:
    return train_ranks(CORPUS * 3, 250)


@pytest.fixture(scope="session")
def special_names(ranks: dict[bytes, int]) -> dict[int, str]:
    """Special names at the offsets of Kimi K3."""
    n = len(ranks)
    return {n + i: name for i, name in enumerate(NAMED)} | {n + 18 + i: name for i, name in enumerate(MEDIA)}


@pytest.fixture(scope="session")
def tokenizer(
    ranks: dict[bytes, int], special_names: dict[int, str], tmp_path_factory: pytest.TempPathFactory
) -> Tokenizer:
    directory = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(directory, ranks, special_names)
    return Tokenizer.from_dir(directory)
