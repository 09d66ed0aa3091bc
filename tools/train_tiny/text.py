"""The King James Version from Debian's `bible-kjv`: one verse a line, a book held out for `longspan eval`.

apt-get install bible-kjv && python -m train_tiny.text runs/tiny
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

HELD_OUT = "Rom"  # Romans: never trained on, bundled with the checkpoint


def verses() -> list[tuple[str, str]]:
    """(book, verse) in order, as the `bible` program prints them (`Ge1:1 In the beginning ...`)."""
    printed = subprocess.run(
        ["bible", "-f", "gen1:1-rev22:21"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=True,
    )
    found = re.findall(r"^(\d?[A-Za-z]+)\d+:\d+ (.*)$", printed.stdout, re.M)
    return [(book, re.sub(r"[<>{}\[\]]", "", verse).strip()) for book, verse in found]


def main() -> None:
    target = Path(sys.argv[1])
    target.mkdir(parents=True, exist_ok=True)
    all_verses = verses()
    for name, wanted in (("train.txt", False), ("heldout.txt", True)):
        lines = [verse for book, verse in all_verses if (book == HELD_OUT) == wanted]
        (target / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
        print(f"{name}: {len(lines)} verses")


if __name__ == "__main__":
    main()
