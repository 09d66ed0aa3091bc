"""`longspan plan`: flags, and what is printed, written and checked.

`--json` prints one object. Sizes are in bytes of one rank unless said otherwise, fields are only ever added:

- model, family, engine, scheme, context, topology, nodes, index_key_dtype: what was planned
- hardware: {name, title, numbers: {NAME: {value, reason, assumed}}}
- sides: a list of {role, nodes, split: {tensor, data, expert, context}, reasons,
  memory: {weights: {PART: bytes}, weights_total, latent_per_token, index_per_token, recurrent_per_sequence,
  conv_per_sequence, page_tokens, page_bytes, sequence, activations, usable, room},
  fits: {sequences, sequences_of_side, pages, max_num_seqs, step_tokens},
  decode_step: {memory, memory_alone, network_per_token: {KIND: bytes}, seconds, tokens_per_second}}
- handoff: {state, cache} of one request of the whole context, all ranks together; null without prefill nodes
- urls (in files only): {SCRIPT: addresses of the servers that it starts}
- engines: {NAME: {error, split, sequences_of_side, notes, not_to_start}} of all that run on this hardware, if
  several do; not_to_start: why no scripts are written

With `--check` it is a list of {where, point, status, found, remedy}.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from longspan.engine.options import add_index_key_argument
from longspan.errors import CapacityError, ConfigError
from longspan.planning.hardware import ENGINES, Hardware, bundled, load_hardware
from longspan.planning.models import DEFAULT_MODEL, PUBLISHED, load_model_config, name_and_directory
from longspan.planning.schemes import SCHEMES, published_scheme
from longspan.planning.topology import parse_hosts

_DEFAULTS: dict[str, Any] = {"model": DEFAULT_MODEL, "hardware": "epyc-2s", "nodes": 1, "topology": "plain"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        nargs="?",
        default=_DEFAULTS["model"],
        metavar="MODEL",
        help=f"{', '.join(PUBLISHED)}, a checkpoint directory or a config.json (default: %(default)s)",
    )
    group = parser.add_argument_group("what it runs on")
    group.add_argument(
        "--hardware",
        default=_DEFAULTS["hardware"],
        metavar="NAME",
        help=f"{', '.join(bundled())}, or a TOML file of your own (default: %(default)s)",
    )
    group.add_argument(
        "--nodes", type=_count, default=_DEFAULTS["nodes"], metavar="N", help="default: %(default)s"
    )
    group.add_argument(
        "--topology",
        default=_DEFAULTS["topology"],
        metavar="T",
        help="plain (every node does both), or prefill and decode nodes, as in 4p4d (default: %(default)s)",
    )
    group.add_argument(
        "--hosts",
        metavar="A,B",
        help="addresses of the nodes in the scripts of --output, those that prefill first",
    )
    group = parser.add_argument_group("what it shall do")
    group.add_argument(
        "--context",
        type=_tokens,
        metavar="N",
        help="tokens of the longest sequence, as in 128K or 1M (default: all)",
    )
    group.add_argument(
        "--scheme",
        choices=list(SCHEMES),
        help="of the weights (default: as published, mxfp4 for K3 and K3.1)",
    )
    add_index_key_argument(group)
    group.add_argument(
        "--engine",
        choices=ENGINES,
        help="whose layout of memory is shown (default: longspan where it is among the hardware's engines)",
    )
    group = parser.add_argument_group("what comes out")
    group.add_argument(
        "--output",
        type=Path,
        metavar="DIR",
        help="write the plan and the launch scripts of every engine here, in place of an earlier plan's",
    )
    form = group.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    form.add_argument(
        "--markdown", action="store_true", help="print every number as formula, inserted values and result"
    )
    group = parser.add_argument_group("before going live")
    group.add_argument(
        "--check",
        nargs="+",
        metavar="TARGET",
        help="go through the go-live list: a directory of --output, addresses of running servers, or both",
    )
    group.add_argument(
        "--accuracy",
        type=Path,
        metavar="FILE",
        help="report of the accuracy regression, for --check (default: accuracy.json)",
    )


def main(args: argparse.Namespace) -> int:
    """0, or 1 if a point of the go-live list fails. Raises ConfigError and CapacityError."""
    if args.check:
        _refuse_plan_arguments(args)
        from longspan.planning.check import check_targets, print_findings

        findings = check_targets(args.check, args.accuracy)
        if args.json:
            print(json.dumps([finding.as_json() for finding in findings], indent=2))
        else:
            print_findings(findings)
        return 1 if any(finding.status == "fail" for finding in findings) else 0
    return _plan(args)


def _plan(args: argparse.Namespace) -> int:
    from longspan.planning.derivation import derive
    from longspan.planning.plan import Plan, make_plan
    from longspan.planning.report import as_json, print_plan

    if args.accuracy:
        raise ConfigError("--accuracy is for --check.", remedy="Give --check too, or leave it out.")
    if args.hosts is not None and not args.output:
        raise ConfigError("--hosts is for scripts.", remedy="Give --output DIR too, or leave it out.")
    hosts = [] if args.hosts is None else parse_hosts(args.hosts, args.nodes)
    if args.output and args.output.exists() and not args.output.is_dir():
        raise ConfigError(f"--output {args.output} is a file.", remedy="Give a directory.")
    if args.output and args.index_key_dtype != "auto":
        raise CapacityError(
            f"No server that these scripts start keeps index keys in {args.index_key_dtype}.",
            remedy="Leave --output or --index-key-dtype out.",
        )
    hardware = load_hardware(args.hardware)
    config = load_model_config(args.model)
    context = args.context or config.max_position
    name, directory = name_and_directory(args.model)
    scheme = args.scheme or published_scheme(config).name
    hardware.require(config.family, scheme)  # refused whichever engine it is
    chosen = _engine(hardware, args.engine)

    def planned(engine: str) -> Plan:
        from longspan.planning.engines import load_engine

        return make_plan(
            name,
            config,
            hardware,
            load_engine(engine),
            nodes=args.nodes,
            context=context,
            scheme=scheme,
            topology=args.topology,
            index_key_dtype=args.index_key_dtype,
        )

    plan = planned(chosen)

    def each() -> Iterator[tuple[str, Plan | str]]:
        for engine in hardware.engines:
            try:
                yield engine, plan if engine == chosen else planned(engine)
            except CapacityError as error:
                yield engine, str(error)

    plans = list(each()) if args.output or not args.markdown else []
    others = plans if len(plans) > 1 else []
    written = _write(args.output, plans, hosts, directory) if args.output else []
    if args.json:
        print(json.dumps(as_json(plan, others), indent=2))
    elif args.markdown:
        print(derive(plan, args.model, args.hardware), end="")
    else:
        print_plan(plan, others)
    if written and not args.json and not args.markdown:
        folders = ", ".join(map(str, written))
        print(f"Scripts are in {folders}. Next: longspan plan --check {written[0]} ADDRESS...")
    return 0


def _refuse_plan_arguments(args: argparse.Namespace) -> None:
    """Raises ConfigError if anything but a check was asked for: it reads its plans from files."""
    planning = ("model", "hardware", "nodes", "topology", "hosts", "context", "scheme", "engine", "output")
    given = [name for name in planning if getattr(args, name) != _DEFAULTS.get(name)]
    given += ["index-key-dtype"] * (args.index_key_dtype != "auto") + ["markdown"] * args.markdown
    if given:
        shown = [str(args.model) if name == "model" else f"--{name}" for name in given]
        raise ConfigError(
            f"--check reads plans from files; {', '.join(shown)} would say nothing.",
            remedy="Leave --check out to plan, or the rest to check.",
        )


def _write(output: Path, plans: list, hosts: list[str], model_directory: str) -> list[Path]:
    """The folders written. Raises ConfigError, and CapacityError if no engine is to be started."""
    from longspan.planning.output import write_scripts
    from longspan.planning.recipe import make_recipe
    from longspan.planning.report import as_json

    found, refused = {}, []
    for engine, plan in plans:
        if isinstance(plan, str) or plan.not_to_start:
            refused.append(f"{engine}: {plan if isinstance(plan, str) else plan.not_to_start}")
            continue
        recipe = make_recipe(plan, hosts, model_directory)
        urls = {script.name: script.urls for script in recipe.scripts if script.role != "router"}
        found[engine] = recipe, as_json(plan) | {"urls": urls}
    if not found:
        raise CapacityError(
            f"No engine can be started so. {'; '.join(refused)}.", remedy="Shorten --context."
        )
    return write_scripts(output, found)


def _engine(hardware: Hardware, asked: str | None) -> str:
    """Raises CapacityError if the one asked for does not run there."""
    if asked and asked not in hardware.engines:
        raise CapacityError(
            f"{asked} does not run on {hardware.title}.", remedy=f"Choose {' or '.join(hardware.engines)}."
        )
    return asked or ("longspan" if "longspan" in hardware.engines else hardware.engines[0])


def _tokens(text: str) -> int:
    match = re.fullmatch(r"(\d+)([KM]?)", text.strip().upper())
    if not match or not int(match[1]):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of tokens such as 128K or 1M")
    return int(match[1]) * {"": 1, "K": 2**10, "M": 2**20}[match[2]]


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least 1")
    return int(text)
