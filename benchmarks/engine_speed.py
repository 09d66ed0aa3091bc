"""Tokens per second of the embedded engine: one long prompt, and decoding at several batch sizes.

    python benchmarks/engine_speed.py models/k31-tiny [--dtype float32] [--prompt 2048] [--reply 64]

Prompts are random token ids, so the reply is noise; its length is forced. Medians of `--runs` runs. Decode
speed is that of all sequences together; a run that generates one token only takes the prompts' time out.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time

from rich.console import Console
from rich.table import Table

from longspan import LLM, SamplingParams

BATCHES = (1, 8, 32)


def seconds(llm: LLM, prompts: list[list[int]], reply: int) -> float:
    params = SamplingParams(temperature=0, max_tokens=reply, ignore_eos=True)
    began = time.perf_counter()
    llm.generate(prompts, params, use_progress=False)
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--prompt", type=int, default=2048, help="tokens of the long prompt")
    parser.add_argument("--reply", type=int, default=64, help="tokens decoded by each sequence")
    parser.add_argument("--runs", type=int, default=5)
    args = parser.parse_args()

    llm = LLM(args.model, dtype=args.dtype, enable_prefix_caching=False)
    rng = random.Random(0)
    vocab = llm.engine.config.vocab_size

    def prompts(count: int, length: int) -> list[list[int]]:
        return [[rng.randrange(vocab) for _ in range(length)] for _ in range(count)]

    seconds(llm, prompts(1, 64), 4)  # warm-up
    long = prompts(1, args.prompt)
    prefill = statistics.median(seconds(llm, long, 1) for _ in range(args.runs))
    table = Table("", "tokens/s", title=f"{args.model}, {args.dtype}")
    table.add_row(f"prefill of {args.prompt} tokens", f"{args.prompt / prefill:,.0f}")
    for batch in BATCHES:
        short = prompts(batch, 16)
        start = statistics.median(seconds(llm, short, 1) for _ in range(args.runs))
        whole = statistics.median(seconds(llm, short, args.reply) for _ in range(args.runs))
        table.add_row(f"decode, batch {batch}", f"{batch * (args.reply - 1) / (whole - start):,.0f}")
    Console().print(table)


if __name__ == "__main__":
    main()
