"""Text <-> token ids: byte-level BPE of a published `tiktoken.model`, and the 256 special ids behind it.

`encode` never yields a special id; only `encode_segments` does, and only from segments marked special. The
merging is tiktoken's; slicing, special ids and decoding are ours.
"""

from __future__ import annotations

import base64
import binascii
import codecs
import json
import re
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path

import tiktoken

from longspan.chat.xtml import CONTROL_TOKENS, Segment
from longspan.errors import CheckpointError, RequestError

NUM_SPECIAL = 256
MAX_SLICE = 400_000  # characters
MAX_RUN = 25_000  # characters of whitespace, or of anything else, without a break

_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LEAD = r"[^\r\n\p{L}\p{N}]?"
_CONTRACTION = r"(?i:'(?:s|t|re|ve|m|ll|d))?"
PATTERN = "|".join(
    [
        r"\p{Han}+",
        _LEAD + _UPPER + "*" + _LOWER + "+" + _CONTRACTION,
        _LEAD + _UPPER + "+" + _LOWER + "*" + _CONTRACTION,
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)
"""How text is cut into pieces before merging, in the dialect of Rust's regex (`&&` is intersection)."""

_RUNS = re.compile(r"\s+|\S+")
_CACHED_LENGTH = 64  # characters; tags, keys and names of a chat recur thousands of times


def slices(text: str) -> list[str]:
    """Cuts `text` so that no slice exceeds MAX_SLICE and no run inside one exceeds MAX_RUN characters."""
    parts = []
    for start in range(0, len(text), MAX_SLICE):
        part = text[start : start + MAX_SLICE]
        begin = 0
        if len(part) > MAX_RUN:
            for run in _RUNS.finditer(part):
                for cut in range(run.start() + MAX_RUN, run.end(), MAX_RUN):
                    parts.append(part[begin:cut])
                    begin = cut
        parts.append(part[begin:])
    return parts


class IncrementalDecoder:
    """Token ids to text, one at a time; holds back a character until its last byte is there.

    All results joined equal `Tokenizer.decode` of all ids. With `skip_special` special ids are silent.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = False) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        if self._skip_special and token_id >= self._tokenizer.n_base:
            return ""
        return self._utf8.decode(self._tokenizer.token_bytes(token_id))

    def flush(self) -> str:
        """The end of the text: an unfinished character becomes U+FFFD. The decoder is then as new."""
        rest = self._utf8.decode(b"", final=True)
        self._utf8.reset()
        return rest


class Tokenizer:
    """Base ids 0 to `n_base` - 1, special ids `n_base` to `n_base` + 255, `vocab_size` in all."""

    def __init__(self, ranks: dict[bytes, int], special_names: dict[int, str]) -> None:
        """`ranks`: bytes of a base token -> id. `special_names`: special id -> name; the rest are reserved.

        Raises CheckpointError where ids are missing, double or out of range.
        """
        self.n_base = len(ranks)
        self.vocab_size = self.n_base + NUM_SPECIAL
        _check_ranks(ranks)
        self.special = _special_ids(self.n_base, special_names)
        self._bytes = [b""] * self.vocab_size
        for token, rank in ranks.items():
            self._bytes[rank] = token
        for name, token_id in self.special.items():
            self._bytes[token_id] = name.encode(errors="replace")
        self._special_pattern = re.compile(
            "|".join(map(re.escape, sorted(self.special, key=len, reverse=True)))
        )
        self._bpe = tiktoken.Encoding("longspan", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={})
        self._encode_short = lru_cache(maxsize=65536)(lambda text: tuple(self._bpe.encode_ordinary(text)))

    @classmethod
    def from_dir(cls, path: str | Path) -> Tokenizer:
        """Reads `tiktoken.model` and `tokenizer_config.json`. Raises CheckpointError if one is bad."""
        directory = Path(path)
        return cls(
            _read_ranks(directory / "tiktoken.model"),
            _read_special_names(directory / "tokenizer_config.json"),
        )

    @classmethod
    def find(cls, path: str | Path) -> Tokenizer | None:
        """`from_dir`; None for a checkpoint without a tokenizer, which can still be asked with token ids."""
        return cls.from_dir(path) if (Path(path) / "tiktoken.model").exists() else None

    def check_vocab_size(self, vocab_size: int) -> None:
        """Raises CheckpointError unless the model has exactly one row for each id of this tokenizer."""
        if vocab_size != self.vocab_size:
            raise CheckpointError(
                f"config.json says vocab_size {vocab_size}, but the tokenizer has {self.vocab_size} ids "
                f"({self.n_base} in tiktoken.model and {NUM_SPECIAL} special).",
                remedy="Take tiktoken.model and config.json from the same checkpoint.",
            )

    def encode(self, text: str) -> list[int]:
        """Ids of ordinary text; what looks like a special token stays text."""
        if len(text) <= _CACHED_LENGTH:
            return list(self._encode_short(text))
        return [token_id for part in slices(text) for token_id in self._bpe.encode_ordinary(part)]

    def encode_segments(self, segments: Iterable[Segment]) -> list[int]:
        """Ids of a rendered prompt. Raises CheckpointError if this tokenizer lacks its control tokens."""
        ids: list[int] = []
        for segment in segments:
            if segment.special:
                ids += self._encode_special(segment.text)
            elif len(segment.text) <= _CACHED_LENGTH:
                ids += self._encode_short(segment.text)
            else:
                ids += self.encode(segment.text)
        return ids

    def decode(self, ids: Iterable[int], *, skip_special: bool = False) -> str:
        """Text of ids; bytes that are not UTF-8 become U+FFFD, special ids their names unless skipped."""
        tokens = (self.token_bytes(i) for i in ids if not skip_special or i < self.n_base)
        return b"".join(tokens).decode("utf-8", errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes of one id. Raises RequestError outside of the vocabulary."""
        if not 0 <= token_id < self.vocab_size:
            raise RequestError(
                f"Token id {token_id} is outside of the vocabulary.",
                remedy=f"Legal ids are 0 to {self.vocab_size - 1}.",
            )
        return self._bytes[token_id]

    def incremental(self, *, skip_special: bool = False) -> IncrementalDecoder:
        return IncrementalDecoder(self, skip_special=skip_special)

    def special_id(self, name: str) -> int:
        """Id of a special token. Raises CheckpointError if this tokenizer has none of that name."""
        if name not in self.special:
            raise CheckpointError(
                f"The tokenizer has no special token {name}, which the chat format of Kimi K3 needs.",
                remedy="Chat needs the tokenizer of Kimi K3; other checkpoints can serve completions.",
            )
        return self.special[name]

    def _encode_special(self, text: str) -> list[int]:
        if text in self.special:
            return [self.special[text]]
        if text in CONTROL_TOKENS:
            self.special_id(text)
        ids: list[int] = []
        end = 0
        for match in self._special_pattern.finditer(text):
            ids += [*self.encode(text[end : match.start()]), self.special[match[0]]]
            end = match.end()
        return ids + self.encode(text[end:])


def _check_ranks(ranks: dict[bytes, int]) -> None:
    found = set(ranks.values())
    missing = next((rank for rank in range(len(ranks)) if rank not in found), None)
    if missing is not None:
        raise CheckpointError(
            f"tiktoken.model lists {len(ranks)} tokens, but none of rank {missing}.",
            remedy="Ranks must count from 0 without a gap; fetch the file again.",
        )
    absent = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if absent:
        raise CheckpointError(
            f"tiktoken.model lacks {len(absent)} of the 256 single-byte tokens, the first is {absent[0]}.",
            remedy="Every byte needs a token of its own; fetch the file again.",
        )


def _special_ids(n_base: int, names: dict[int, str]) -> dict[str, int]:
    last = n_base + NUM_SPECIAL - 1
    special: dict[str, int] = {}
    for token_id in sorted({*names, *range(n_base, last + 1)}):
        name = names.get(token_id, f"<|reserved_token_{token_id}|>")
        if not n_base <= token_id <= last:
            raise CheckpointError(
                f"tokenizer_config.json gives special token {name!r} the id {token_id}.",
                remedy=f"With {n_base} tokens in tiktoken.model special ids are {n_base} to {last}.",
            )
        if not name or name in special:
            raise CheckpointError(
                f"tokenizer_config.json names two special ids {name!r}, or one not at all: id {token_id}.",
                remedy="Every special token needs a name of its own.",
            )
        special[name] = token_id
    return special


def _read_ranks(path: Path) -> dict[bytes, int]:
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(_read(path).splitlines(), start=1):
        if not line.strip():
            continue
        try:
            token, rank = line.split()
            key, value = base64.b64decode(token, validate=True), int(rank)
        except (ValueError, binascii.Error) as error:
            raise CheckpointError(
                f"{path}, line {number}: expected a base64 token and its rank, found {line[:80]!r}.",
                remedy="Fetch the file again.",
            ) from error
        if not key or key in ranks:
            raise CheckpointError(
                f"{path}, line {number}: token {key!r} is empty or was listed before.",
                remedy="Fetch the file again.",
            )
        ranks[key] = value
    return ranks


def _read_special_names(path: Path) -> dict[int, str]:
    try:
        added = json.loads(_read(path))["added_tokens_decoder"]
        names = {int(token_id): entry["content"] for token_id, entry in added.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{path}: expected a JSON object whose added_tokens_decoder maps ids to objects with a content.",
            remedy="Fetch the file again.",
        ) from error
    bad = next((token_id for token_id, name in names.items() if not isinstance(name, str)), None)
    if bad is not None:
        raise CheckpointError(f"{path}: the content of special token {bad} is not a string.")
    return names


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(
            f"Cannot read {path}: {error}.",
            remedy="A checkpoint directory needs tiktoken.model and tokenizer_config.json.",
        ) from error
