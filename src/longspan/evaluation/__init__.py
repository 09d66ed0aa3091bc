"""Skills of the bundled checkpoint: seeded generators, and `longspan eval`, which measures them."""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from longspan.evaluation import runner

    runner.add_arguments(parser)


def main(args: argparse.Namespace) -> int:
    from longspan.evaluation import runner

    return runner.main(args)
