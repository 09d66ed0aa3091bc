"""A tokenizer with merges, one of single bytes for small models, and both as vocabularies."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from support.tokens import SPECIAL

from longspan.chat import Tokenizer
from longspan.config import ModelConfig, load_config
from longspan.structure import Vocabulary


@pytest.fixture(scope="session")
def vocabulary(tiny_dir: Path) -> Vocabulary:
    tokenizer = Tokenizer.from_dir(tiny_dir)
    return Vocabulary(tokenizer, (tokenizer.special["<|end_of_msg|>"],))


@pytest.fixture(scope="session")
def bytes_vocabulary() -> Vocabulary:
    """One token for each byte, and the control tokens."""
    names = {256 + i: name for i, name in enumerate(SPECIAL)}
    tokenizer = Tokenizer({bytes([b]): b for b in range(256)}, names)
    return Vocabulary(tokenizer, (tokenizer.special["<|end_of_msg|>"],))


@pytest.fixture(scope="session")
def config(data_dir: Path, bytes_vocabulary: Vocabulary) -> ModelConfig:
    """Of a small model for the tokenizer of bytes."""
    return replace(
        load_config(data_dir / "k31-text"),
        vocab_size=bytes_vocabulary.tokenizer.vocab_size,
        eos_token_ids=bytes_vocabulary.eos_token_ids,
    )
