"""What a rank received from its peers, by kind: the report behind "candidates and outputs only".

    sums         all-reduced layer outputs; a ring brings 2 (R - 1) / R of the tensor to every rank
    embeddings   the same of token embeddings
    logits       the vocabulary shards of other ranks
    experts      tokens dispatched to experts, and what the experts made of them
    candidates   (score, position) pairs of the sparse indexer
    outputs      partial attention outputs with their log-sum-exp

Groups count bytes; operators count the rows (tokens of one layer) that they were for, so bytes per token and
layer is one division. Bytes that a host's own all-reduce moves are counted as a ring's.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

Kind = Literal["sums", "embeddings", "logits", "experts", "candidates", "outputs"]
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass
class Traffic:
    """Totals since the start or the last `clear`."""

    nbytes: dict[Kind, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))
    rows: dict[Kind, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))

    def add(self, kind: Kind, nbytes: int) -> None:
        self.nbytes[kind] += nbytes

    def serve(self, kind: Kind, rows: int) -> None:
        """What was or will be added is for `rows` more."""
        self.rows[kind] += rows

    def per_row(self, kind: Kind) -> float:
        """Bytes received for each token and layer."""
        return self.nbytes[kind] / max(1, self.rows[kind])

    def clear(self) -> None:
        for kind in KINDS:
            self.nbytes[kind] = self.rows[kind] = 0

    def __str__(self) -> str:
        """A table: kind, bytes, tokens x layers, bytes for each of them."""
        lines = [f"{'received':<12}{'bytes':>16}{'token-layers':>16}{'bytes each':>14}"]
        lines += [
            f"{kind:<12}{self.nbytes[kind]:>16,}{self.rows[kind]:>16,}{self.per_row(kind):>14,.1f}"
            for kind in KINDS
            if self.rows[kind]
        ]
        return "\n".join(lines)
