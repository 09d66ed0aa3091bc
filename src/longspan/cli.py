"""The `longspan` command. A command is a module with `add_arguments(parser)` and `main(args) -> exit code`.

Only the module of the command asked for is imported, so `longspan inspect` does not wait for torch.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module

from longspan import __version__
from longspan.errors import LongspanError


@dataclass(frozen=True)
class Command:
    """One line of help, the module that does the work, and examples that can be pasted."""

    summary: str
    module: str
    examples: str


COMMANDS = {
    "serve": Command(
        "Serve a checkpoint over HTTP with OpenAI's API.",
        "longspan.serve.command",
        """\
  longspan serve models/k31-tiny
  longspan serve /data/kimi-linear --dtype float32 --port 9000 --served-model-name kimi
  LONGSPAN_API_KEY=secret longspan serve models/k31-tiny --host 0.0.0.0 --max-queue 64

endpoints:
  /v1/chat/completions  /v1/completions  /v1/responses  /v1/models  /tokenize  /detokenize  (OpenAI, vLLM)
  /v1/messages  /v1/messages/count_tokens  (Anthropic)
  /generate  /health_generate  /model_info  /server_info  /flush_cache  /abort_request  (SGLang)
  /  /health  /ping  /load  /metrics  /version  /docs""",
    ),
    "generate": Command(
        "Answer one question or continue one text on the terminal.",
        "longspan.generate",
        """\
  longspan generate models/k31-tiny --chat "What is 417 + 286?" --temperature 0
  longspan generate models/k31-tiny --prompt "In the beginning" --max-tokens 40 --seed 1
  echo "What is 417 + 286?" | longspan generate models/k31-tiny --chat - --no-thinking""",
    ),
    "top": Command(
        "Watch a running server in the terminal: speed, latencies, memory, queue.",
        "longspan.top.command",
        """\
  longspan top
  longspan top http://10.0.0.7:8000 --interval 2 --window 60
  longspan top --once --json

Works with vLLM's servers too. q or Ctrl-C leaves.""",
    ),
    "inspect": Command(
        "Show what a checkpoint holds, what is wrong with it and what it needs.",
        "longspan.inspect",
        """\
  longspan inspect models/k31-tiny
  longspan inspect config.json --context 1000000 --json""",
    ),
    "bench": Command(
        "Measure prefill and decode speed by depth, and how near the limits of the machine they come.",
        "longspan.bench.command",
        """\
  longspan bench models/k31-tiny
  longspan bench /data/kimi-k31 --depth 0,128K,1M --prefill-chunk 0 --index-key-dtype int8
  longspan bench /tmp/mini --batch 8 --json mini.json --plot mini.png

columns:
  tokens/s, ms/step   of the median step; a decode step gives one token to each sequence
  GB/s, of read       bytes the step must read, each once, against what this machine reads a second: weights,
                      the experts hit (E (1 - (1 - k/E)^T) of E for T tokens that choose k), cached index keys
                      and the latents attended to, KDA state read and written. Activations do not count.
  GFLOP/s             of the weights: 2 x active parameters x tokens
  attn., of peak      of scores, values, KDA and index; both together against the BF16 peak of this machine
                      (an int8 index against its int8 peak)

Memory is filled at random, so a depth costs no prefill to reach. The limits of the machine are measured
before and after; the median counts.""",
    ),
    "bench serve": Command(
        "Put a load on a running server and measure what its clients see. Any OpenAI-compatible server.",
        "longspan.bench.serving.command",
        """\
  longspan bench serve http://127.0.0.1:8000 --random-input-len 256 --random-output-len 64 --ignore-eos
  longspan bench serve --port 8000 --request-rate 1,2,4,8 --goodput ttft:200 tpot:50 --plot rates.png
  longspan bench serve --port 8000 --max-concurrency 1,4,16 --random-prefix-len 512 --num-prefixes 4
  longspan bench serve --port 8000 --endpoint /v1/chat/completions --multi-turn 4 --max-concurrency 8
  longspan bench serve --port 8000 --dataset-name trace --dataset-path trace.jsonl --speed 2 --json out.json

figures, of requests that were answered in full:
  TTFT, E2EL  from the time scheduled to the first chunk with text, to the last chunk: a request that had to
              wait in the client counts its wait (no coordinated omission). Rows `sent` leave it out.
  TPOT        (last chunk - first) / (output tokens - 1), a value a request
  ITL         between two chunks; 0 for those that came in one read
  hits        share of prompt tokens from the prefix cache: as `usage` says, else the server's counters

A rate of inf with a limit is a closed loop: so many users, each asking again when answered. Otherwise
arrivals are fixed beforehand, whatever the server does. Points of a sweep have the same lengths and arrivals,
and fresh text (a jsonl file's is always the same). Prompts are token ids of exact lengths where the server
has /tokenize and they can be sent (completions of one turn), else words, as many as its counts suggest.
`longspan bench ./serve` measures a model in a directory of this name.""",
    ),
    "make-checkpoint": Command(
        "Write a checkpoint of random weights, to measure and to test with.",
        "longspan.make_checkpoint",
        """\
  longspan make-checkpoint /tmp/mini --shape mini
  longspan make-checkpoint /tmp/k3-mini --shape mini --family k3 --seed 1
  longspan make-checkpoint /tmp/real-layer --shape real-layer
  longspan bench /tmp/real-layer""",
    ),
    "info": Command(
        "Show which operators compute here and why, and what the machine has.",
        "longspan.info",
        """\
  longspan info
  LONGSPAN_ISA=avx2 longspan info --json""",
    ),
    "plan": Command(
        "Plan a deployment: memory, bytes moved, the split over devices, launch scripts, the go-live list.",
        "longspan.planning.command",
        """\
  longspan plan --hardware atlas-800-a3 --nodes 8 --context 1M --scheme w4a8 --topology 4p4d
  longspan plan --hardware h200x8 --nodes 4 --topology 2p2d --output k31 \\
      --hosts 10.0.0.1,10.0.0.2,10.0.0.3,10.0.0.4
  longspan plan /data/kimi-linear --hardware epyc-2s --context 128K --json
  longspan plan --check k31/sglang http://10.0.0.1:8100 http://10.0.0.3:8200 --accuracy eval.json

what is planned:
  weights, caches and activations of each device; how many sequences of the whole context fit; the bytes that
  a decoded token moves through memory and network; the split (TP, DP, EP, DCP) that decodes fastest among
  those that fit, and why; scripts for every engine of the hardware, and routers.

Facts about hardware, with their sources, are in the package (planning/hardware.toml); those that nobody has
published are called assumed. A TOML file of the same form describes your own. Nothing is started, nothing
is measured.""",
    ),
    "cluster serve": Command(
        "Serve a checkpoint with vLLM, which spreads it over devices and hosts. Our model, vLLM's flags.",
        "longspan.plugin_vllm.cluster",
        """\
  longspan cluster serve models/k31-tiny --port 8000 --kv-cache-memory-bytes 1G
  longspan cluster serve /data/kimi-k31 --tensor-parallel-size 8 --decode-context-parallel-size 8
  longspan cluster serve /data/kimi-k31 --data-parallel-size 2 --enable-expert-parallel --max-model-len 131072
  longspan cluster serve /data/kimi-k31 --role prefill --port 8100
  longspan cluster serve models/k31-tiny --help

The model comes first; what is behind it goes to vLLM's server as it is, --help too. Without
--kv-cache-memory-bytes (of each rank) vLLM starts only where 92 % of the memory is free.
Needs pip install -e '.[vllm]' in the checkout. Endpoints and metrics are vLLM's. What is added to the flags
is printed; docs/cluster.md says why.""",
    ),
    "eval": Command(
        "Measure the skills of the bundled checkpoint on fresh data.",
        "longspan.evaluation",
        """\
  longspan eval models/k31-tiny""",
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code: 0 done, 2 refused with a message, 130 interrupted."""
    argv = _joined(sys.argv[1:] if argv is None else list(argv))
    chosen = argv[0] if argv else ""
    try:
        args = _parser(chosen).parse_args(argv)
        return import_module(COMMANDS[args.command].module).main(args)
    except LongspanError as error:
        print(f"longspan {chosen}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # Whoever read our output (head, less) has left; the flush at exit must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:  # a file that can't be written, a full disk
        print(f"longspan {chosen}: {error}", file=sys.stderr)
        return 2


def _joined(argv: list[str]) -> list[str]:
    """A command of two words is one argument; `cluster` alone, or with flags, stands for `cluster serve`."""
    two = " ".join(argv[:2])
    if two in COMMANDS:
        return [two, *argv[2:]]
    longer = [name for name in COMMANDS if argv and name.startswith(f"{argv[0]} ")]
    if not longer or argv[0] in COMMANDS:
        return argv
    word_follows = len(argv) > 1 and not argv[1].startswith("-")
    return [two, *argv[2:]] if word_follows else [longer[0], *argv[1:]]


def _parser(chosen: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="longspan",
        description="Inference engine for Kimi-Linear, Kimi K3 and Kimi K3.1 Pro.",
        epilog="Start with: longspan serve models/k31-tiny. More: longspan COMMAND --help.",
    )
    parser.add_argument("--version", action="version", version=f"longspan {__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", title="commands")
    for name, command in COMMANDS.items():
        subparser = subparsers.add_parser(
            name,
            help=command.summary,
            description=command.summary,
            epilog=f"examples:\n{command.examples}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        if name == chosen:
            import_module(command.module).add_arguments(subparser)
    return parser
