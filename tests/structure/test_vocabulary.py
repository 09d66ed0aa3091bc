"""Compiling on threads: what a process does about it when it ends."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

LEAVES_AT_ONCE = """
import sys
from longspan.chat import Tokenizer
from longspan.structure import Vocabulary

Vocabulary(Tokenizer.from_dir(sys.argv[1]), (0,)).prepare()
sys.exit(7)
"""


def test_a_process_may_end_while_a_grammar_is_compiled(tiny_dir: Path) -> None:
    done = subprocess.run([sys.executable, "-c", LEAVES_AT_ONCE, str(tiny_dir)], timeout=60, check=False)
    assert done.returncode == 7
