"""Options of an engine and their command-line flags, shared by `serve` and `generate`. Needs no torch."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, fields
from typing import Self

from longspan.errors import CapacityError

ELEMENT_BYTES = {"bfloat16": 2, "float32": 4}


@dataclass(frozen=True)
class EngineOptions:
    """How much one engine may hold and do at a time. None lets `memory.plan` choose what fits."""

    dtype: str = "bfloat16"
    backend: str | None = None
    max_model_len: int | None = None  # tokens of one sequence, prompt and reply
    max_num_seqs: int | None = None  # sequences that run at once; each holds one KDA slot
    max_num_batched_tokens: int = 512  # tokens of one step: the prefill chunk
    page_size: int = 64  # tokens
    cache_gib: float | None = None  # pages and slots together
    seed: int | None = None  # of requests without a seed; None: a fresh one each

    def __post_init__(self) -> None:
        if self.dtype not in ELEMENT_BYTES:
            raise CapacityError(
                f"dtype is {self.dtype!r}.", remedy=f"Choose one of: {', '.join(ELEMENT_BYTES)}."
            )
        for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "page_size", "cache_gib"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise CapacityError(f"{name} is {value}.", remedy="It must be greater than 0.")
        if self.max_model_len == 1:
            raise CapacityError(
                "max_model_len is 1.", remedy="It must be at least 2: one token of prompt, one of reply."
            )

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> Self:
        return cls(**{field.name: getattr(args, field.name) for field in fields(cls)})


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that `EngineOptions.from_args` reads; names are vLLM's where it has them."""
    group = parser.add_argument_group("engine")
    default = EngineOptions()
    group.add_argument(
        "--dtype",
        choices=list(ELEMENT_BYTES),
        default=default.dtype,
        help="of activations and cache (default: %(default)s)",
    )
    group.add_argument(
        "--backend",
        metavar="NAME",
        default=default.backend,
        help="operator table; torch pins the reference (default: the best there is)",
    )
    group.add_argument(
        "--max-model-len",
        type=int,
        metavar="TOKENS",
        default=default.max_model_len,
        help="longest sequence, prompt and reply (default: what the model allows and the memory holds)",
    )
    group.add_argument(
        "--max-num-seqs",
        type=int,
        metavar="N",
        default=default.max_num_seqs,
        help="sequences that run at once (default: 64, or what the memory holds)",
    )
    group.add_argument(
        "--max-num-batched-tokens",
        type=int,
        metavar="TOKENS",
        default=default.max_num_batched_tokens,
        help="tokens of one step; long prompts are cut into chunks of this size (default: %(default)s)",
    )
    group.add_argument(
        "--block-size",
        "--page-size",
        dest="page_size",
        type=int,
        metavar="TOKENS",
        default=default.page_size,
        help="tokens of one cache page (default: %(default)s)",
    )
    group.add_argument(
        "--cache-gib",
        "--kv-cache-memory-gib",
        dest="cache_gib",
        type=float,
        metavar="GIB",
        default=default.cache_gib,
        help="memory for pages and KDA states (default: chosen from what is free)",
    )
    group.add_argument(
        "--seed",
        type=int,
        metavar="N",
        default=default.seed,
        help="seed of requests that bring none (default: a fresh one each)",
    )
