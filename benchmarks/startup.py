"""Seconds from the start of a process to the first token of a short prompt, weights in the page cache.

    python benchmarks/startup.py /tmp/small [--runs 5]

Each run is a process of its own: it imports, maps the checkpoint, makes the memory and generates one token of
an 8-token prompt. One run before, not counted, brings the weights into the page cache.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time

from rich.console import Console
from rich.table import Table

PROGRAM = """
import json, sys, time
began = time.perf_counter()
from longspan import LLM, SamplingParams
imported = time.perf_counter()
llm = LLM(sys.argv[1], max_model_len=4096, max_num_seqs=1)
loaded = time.perf_counter()
llm.generate([[5, 6, 7, 8, 9, 10, 11, 12]], SamplingParams(temperature=0, max_tokens=1, ignore_eos=True))
print(json.dumps([imported - began, loaded - imported, time.perf_counter() - loaded]))
"""


def run(model: str) -> list[float]:
    """Seconds of import, load, first token, and of the whole process."""
    began = time.perf_counter()
    ended = subprocess.run([sys.executable, "-c", PROGRAM, model], capture_output=True, text=True, check=True)
    return [*json.loads(ended.stdout.splitlines()[-1]), time.perf_counter() - began]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--runs", type=int, default=5)
    args = parser.parse_args()
    run(args.model)
    columns = zip(*(run(args.model) for _ in range(args.runs)), strict=True)
    table = Table("", "seconds", title=f"{args.model}, median of {args.runs}")
    for name, seconds in zip(("import", "load", "first token", "whole process"), columns, strict=True):
        table.add_row(name, f"{statistics.median(seconds):.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()
