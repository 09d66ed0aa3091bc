"""`longspan info`: what computes here and why, for bug reports and before a benchmark."""

from __future__ import annotations

import argparse
import json
import os
import platform
from pathlib import Path

from rich.console import Console
from rich.table import Table

from longspan import __version__


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")


def main(args: argparse.Namespace) -> int:
    found = collect()
    if args.json:
        print(json.dumps(found, indent=2))
        return 0
    table = Table(show_header=False, box=None, pad_edge=False)
    for name, value in found.items():
        table.add_row(name.replace("_", " "), str(value))
    Console(soft_wrap=True).print(table)
    return 0


def collect() -> dict[str, str | int]:
    """What to know about this installation and machine, in the order people ask."""
    import torch

    from longspan.memory.plan import available_memory, show_bytes
    from longspan.ops.backend import select_backend
    from longspan.ops.native.extension import built_for, choose
    from longspan.ops.native.threads import default_threads

    chosen = choose()
    return {
        "longspan": __version__,
        "backend": select_backend().name,
        "instruction_set": chosen.isa or "that of torch",
        "because": chosen.reason,
        "built_for": ", ".join(built_for()) or "nothing",
        "processor": processor_name(),
        "threads": f"{default_threads()} of {os.cpu_count()} processors",
        "free_memory": show_bytes(available_memory()),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "system": platform.platform(),
    }


def processor_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    try:
        lines = cpuinfo.read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
