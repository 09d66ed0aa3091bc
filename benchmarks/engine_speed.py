"""Tokens per second of a host of the model: one long prompt, and decoding at several batch sizes.

    python benchmarks/engine_speed.py models/k31-tiny [--dtype float32] [--prompt 2048] [--reply 64]
    .venv-vllm/bin/python benchmarks/engine_speed.py models/k31-tiny --host vllm    the same inside vLLM

Prompts are random token ids, so the reply is noise; its length is forced. Medians of `--runs` runs. Decode
speed is that of all sequences together; a run that generates one token only takes the prompts' time out.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import time
from collections.abc import Callable

from rich.console import Console
from rich.table import Table

from longspan import LLM, SamplingParams
from longspan.config import load_config

BATCHES = (1, 8, 32)
Generate = Callable[[list[list[int]], int], object]  # prompts, tokens of each reply


def embedded(model: str, dtype: str) -> Generate:
    llm = LLM(model, dtype=dtype, enable_prefix_caching=False)

    def generate(prompts: list[list[int]], reply: int) -> object:
        params = SamplingParams(temperature=0, max_tokens=reply, ignore_eos=True)
        return llm.generate(prompts, params, use_progress=False)

    return generate


def vllm(model: str, dtype: str) -> Generate:
    """In this process, as the embedded engine is."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    import vllm

    llm = vllm.LLM(
        model,
        dtype=dtype,
        max_model_len=8192,
        kv_cache_memory_bytes=1 << 30,
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
    )

    def generate(prompts: list[list[int]], reply: int) -> object:
        params = vllm.SamplingParams(temperature=0, max_tokens=reply, ignore_eos=True, detokenize=False)
        return llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)

    return generate


HOSTS = {"embedded": embedded, "vllm": vllm}


def seconds(generate: Generate, prompts: list[list[int]], reply: int) -> float:
    began = time.perf_counter()
    generate(prompts, reply)
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--host", default="embedded", choices=HOSTS)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--prompt", type=int, default=2048, help="tokens of the long prompt")
    parser.add_argument("--reply", type=int, default=64, help="tokens decoded by each sequence")
    parser.add_argument("--runs", type=int, default=5)
    args = parser.parse_args()

    generate = HOSTS[args.host](args.model, args.dtype)
    rng = random.Random(0)
    vocab = load_config(args.model).vocab_size

    def prompts(count: int, length: int) -> list[list[int]]:
        return [[rng.randrange(vocab) for _ in range(length)] for _ in range(count)]

    seconds(generate, prompts(1, 64), 4)  # warm-up
    long = prompts(1, args.prompt)
    prefill = statistics.median(seconds(generate, long, 1) for _ in range(args.runs))
    table = Table("", "tokens/s", title=f"{args.model}, {args.dtype}, {args.host}")
    table.add_row(f"prefill of {args.prompt} tokens", f"{args.prompt / prefill:,.0f}")
    for batch in BATCHES:
        short = prompts(batch, 16)
        start = statistics.median(seconds(generate, short, 1) for _ in range(args.runs))
        whole = statistics.median(seconds(generate, short, args.reply) for _ in range(args.runs))
        table.add_row(f"decode, batch {batch}", f"{batch * (args.reply - 1) / (whole - start):,.0f}")
    Console().print(table)


if __name__ == "__main__":
    main()
