"""Models and a tokenizer for engines."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from support.fake_model import FakeModel
from support.random_checkpoint import write_checkpoint
from support.tokens import SPECIAL

from longspan.chat import Tokenizer
from longspan.config import ModelConfig, load_config
from longspan.model.decoder import Decoder
from longspan.model.loader import load_model


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    """One token for each byte, and the control tokens."""
    return Tokenizer({bytes([b]): b for b in range(256)}, {256 + i: name for i, name in enumerate(SPECIAL)})


@pytest.fixture(scope="session")
def config(data_dir: Path, tokenizer: Tokenizer) -> ModelConfig:
    """Small, with both kinds of memory, the byte tokenizer's vocabulary and <|end_of_msg|> as the end."""
    config = load_config(data_dir / "k31-text")
    end = tokenizer.special["<|end_of_msg|>"]
    return replace(config, vocab_size=tokenizer.vocab_size, eos_token_ids=(end,))


@pytest.fixture
def fake(config: ModelConfig) -> FakeModel:
    return FakeModel(config)


@pytest.fixture(scope="session")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    """A random K3.1 model with all parts, in float32; its indexer chooses TOP_K = 7 tokens."""
    directory = write_checkpoint(tmp_path_factory.mktemp("k31"), "k3.1", packed=True)
    return load_model(directory, dtype="float32")
