"""Draws training.log: loss and indexer KL over tokens, and exact answers per skill. Needs matplotlib.

python -m train_tiny.plot models/k31-tiny/training.log models/k31-tiny/training.png
"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def main() -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    entries = [json.loads(line) for line in Path(sys.argv[1]).read_text().splitlines()]
    steps = [e for e in entries if "loss" in e]
    exact = [e for e in entries if "exact" in e]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 3.6), constrained_layout=True)
    language = [e for e in steps if e["mode"] != "warmup"]
    left.plot([e["tokens"] / 1e6 for e in language], [e["loss"] for e in language], label="language loss")
    indexer = [e for e in steps if e["mode"] != "dense"]
    left.plot([e["tokens"] / 1e6 for e in indexer], [e["kl"] for e in indexer], label="indexer KL")
    left.set(xlabel="million tokens", ylabel="nats", ylim=(0, 3))
    left.legend()
    for skill in exact[0]["exact"] if exact else ():
        right.plot([e["step"] for e in exact], [100 * e["exact"][skill] for e in exact], label=skill)
    right.set(xlabel="step", ylabel="exact answers, %", ylim=(0, 102))
    right.legend()
    figure.savefig(sys.argv[2], dpi=80)


if __name__ == "__main__":
    main()
