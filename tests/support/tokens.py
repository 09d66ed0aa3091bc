"""A tokenizer with one token for each byte, as files in the published format."""

from __future__ import annotations

import base64
import json
from pathlib import Path

SPECIAL = ["[BOS]", "[EOS]", "<|end_of_msg|>", "<|open|>", "<|close|>", "<|sep|>"]


def write_byte_tokenizer(directory: Path) -> None:
    """Ids 0 to 255 are the bytes, 256 on the control tokens; 512 ids in all."""
    lines = [f"{base64.b64encode(bytes([byte])).decode()} {byte}" for byte in range(256)]
    (directory / "tiktoken.model").write_text("\n".join(lines) + "\n")
    added = {str(256 + i): {"content": name, "special": True} for i, name in enumerate(SPECIAL)}
    (directory / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": added}))
