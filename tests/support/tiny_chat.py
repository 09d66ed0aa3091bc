"""A very small K3.1 checkpoint of random weights that can chat: it has the tokenizer of the bundled one."""

from __future__ import annotations

import shutil
from pathlib import Path

from support.random_checkpoint import write_checkpoint

BUNDLED = Path(__file__).parents[2] / "models" / "k31-tiny"
VOCAB_SIZE, END_OF_MESSAGE = 2048, 1794
MAX_MODEL_LEN = 4096


def write_chat_checkpoint(directory: Path) -> Path:
    write_checkpoint(directory, "k3.1", packed=True, vocab_size=VOCAB_SIZE, eos_token_id=END_OF_MESSAGE)
    for name in ("tiktoken.model", "tokenizer_config.json"):
        shutil.copy(BUNDLED / name, directory)
    return directory
