"""Text and tokenizer: everything training needs, into one folder.

python -m train_tiny.prepare RUN_DIR MODEL_DIR
"""

from __future__ import annotations

import sys
from pathlib import Path

from longspan.evaluation.text import Text

from . import tokenizer
from .data import tokenizer_texts


def main() -> None:
    run, model = Path(sys.argv[1]), Path(sys.argv[2])
    text = Text.read(run / "train.txt")
    counts = tokenizer.count_pieces(tokenizer_texts(text))
    tokens = tokenizer.train(counts)
    tokenizer.write(tokens, model)
    print(f"{len(tokens)} tokens from {sum(counts.values())} pieces of {len(counts)} kinds")


if __name__ == "__main__":
    main()
