"""The MLA prologue and epilogue against what the machine can do at most.

    python benchmarks/mlapo.py [--shape mini] [--tokens 2048] [--layers 24]

Decode: one token through the layers of a model, one after another, so that no weight is in a cache; GB/s of
the weight bytes over what a read reaches. Prefill: one layer, `--tokens` rows; operations over the peak.
Best of a few runs, limits measured in between.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from longspan.ops.batch import MlaView
from longspan.ops.limits import machine_limits
from longspan.ops.mla_prologue import IndexerWeights, MlaWeights, QueryLora
from longspan.ops.native.mla import mla_epilogue, mla_prologue
from longspan.shapes import SHAPES

PAGE_SIZE = 64


def best_seconds(work: Callable[[], object], runs: int = 7) -> float:
    work()
    times = []
    for _ in range(runs):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return min(times)


def random_weights(shape: dict[str, Any]) -> MlaWeights:
    def w(*size: int) -> Tensor:
        return torch.empty(*size, dtype=torch.bfloat16).uniform_(-1, 1).mul_(size[-1] ** -0.5)

    hidden, heads, lora, rank = (
        shape[name] for name in ("hidden_size", "num_attention_heads", "q_lora_rank", "kv_lora_rank")
    )
    nope, rope, value = shape["qk_nope_head_dim"], shape["qk_rope_head_dim"], shape["v_head_dim"]
    index_heads, index_dim = shape["dsa_config"]["index_n_heads"], shape["dsa_config"]["index_head_dim"]
    return MlaWeights(
        query=QueryLora(w(lora, hidden), w(lora), w(heads * (nope + rope), lora)),
        kv_a=w(rank + rope, hidden),
        kv_a_norm=w(rank),
        up_key=w(heads, nope, rank),
        up_value=w(heads, value, rank),
        latent_norm_eps=1e-6,
        indexer=IndexerWeights(
            query=w(index_heads * index_dim, lora),
            key=w(index_dim, hidden),
            head_weight=w(index_heads, hidden),
            key_norm_weight=w(index_dim),
            key_norm_bias=w(index_dim),
            key_norm_eps=1e-6,
        ),
        gate=w(heads * value, hidden),
        output=w(hidden, heads * value),
    )


def sizes(w: MlaWeights) -> tuple[int, int]:
    """Elements of the weights that the prologue and the epilogue read."""
    assert isinstance(w.query, QueryLora) and w.indexer and w.gate is not None
    up_key = w.up_key.numel()
    before = (w.query.a, w.query.b, w.kv_a, w.indexer.query, w.indexer.key, w.indexer.head_weight)
    after = w.up_value.numel() + w.gate.numel() + w.output.numel()
    return sum(t.numel() for t in before) + up_key, after


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--shape", default="mini", choices=tuple(SHAPES))
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=24, help="of which one token passes all")
    args = parser.parse_args()

    shape = SHAPES[args.shape]
    layers = [random_weights(shape) for _ in range(args.layers)]
    heads, rank = layers[0].num_query_heads, layers[0].up_key.shape[2]
    num_pages = -(-args.tokens // PAGE_SIZE)
    view = MlaView(
        torch.empty(num_pages, PAGE_SIZE, layers[0].kv_a.shape[0], dtype=torch.bfloat16),
        torch.empty(num_pages, PAGE_SIZE, shape["dsa_config"]["index_head_dim"], dtype=torch.bfloat16),
    )
    x = torch.randn(args.tokens, shape["hidden_size"]).bfloat16()
    latent_out = torch.randn(args.tokens, heads, rank)
    slots = torch.arange(args.tokens)
    one = slice(0, 1)

    def decode(part: Callable[[MlaWeights], object]) -> float:
        return best_seconds(lambda: [part(w) for w in layers]) / len(layers)

    parts = {
        "prologue": lambda w, rows: mla_prologue(x[rows], w, view, slots[rows]),
        "epilogue": lambda w, rows: mla_epilogue(latent_out[rows], x[rows], w),
    }
    for (name, part), size in zip(parts.items(), sizes(layers[0]), strict=True):
        limits = machine_limits()
        limit = limits.read_bytes / 1e9
        seconds = decode(lambda w, part=part: part(w, one))
        speed = 2 * size / seconds / 1e9
        print(
            f"{name}, 1 token: {seconds * 1e6:.0f} us, {speed:.1f} of {limit:.1f} GB/s = {speed / limit:.2f}"
        )
        limit = limits.bf16_operations / 1e9
        seconds = best_seconds(lambda part=part: part(layers[0], slice(None)))
        speed = 2 * size * args.tokens / seconds / 1e9
        print(
            f"{name}, {args.tokens} tokens: {seconds * 1e3:.1f} ms, {speed:.0f} of {limit:.0f} GFLOP/s = "
            f"{speed / limit:.2f}"
        )


if __name__ == "__main__":
    main()
