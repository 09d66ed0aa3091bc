"""`longspan plan` without its process."""

from __future__ import annotations

import argparse

from longspan.planning import command

CLUSTER = ["--hardware", "atlas-800-a3", "--nodes", "8", "--topology", "4p4d"]
CASE = [*CLUSTER, "--context", "1M", "--scheme", "w4a8"]


def run(*arguments: object) -> int:
    """The exit code; it prints as the command does."""
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return command.main(parser.parse_args([str(a) for a in arguments]))
