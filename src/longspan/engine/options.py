"""Options of an engine and their command-line flags, shared by `serve` and `generate`. Needs no torch."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any, Self

from longspan.engine.request import MAX_COUNT, SEED
from longspan.errors import CapacityError
from longspan.memory.sizes import INDEX_KEY_DTYPES
from longspan.token_ids import shown

ELEMENT_BYTES = {"bfloat16": 2, "float32": 4}
MAX_THREADS = 1024
AUTO_DTYPE = "bfloat16"  # that of all published checkpoints
DTYPE_CHOICES = ("auto", *ELEMENT_BYTES)


@dataclass(frozen=True)
class EngineOptions:
    """How much one engine may hold and do at a time. None lets `memory.plan` choose what fits.

    Raises CapacityError for a value outside its legal range.
    """

    dtype: str = AUTO_DTYPE  # "auto" becomes this
    backend: str | None = None
    max_model_len: int | None = None  # tokens of one sequence, prompt and reply
    max_num_seqs: int | None = None  # sequences that run at once; each holds one KDA slot
    max_num_batched_tokens: int = 512  # tokens of one step: the prefill chunk
    page_size: int = 64  # tokens
    cache_gib: float | None = None  # pages and states together
    enable_prefix_caching: bool = True
    snapshot_interval: int | None = None  # tokens of a prompt from one kept state to the next
    swap_gib: float | None = None  # of the host pool for preempted sequences
    max_itl_ms: float = 500  # decoding sequences wait no longer for prompts of others; 0: no bound
    # A step is prepared while the one before it runs; None: if a processor is left beside the operators.
    async_scheduling: bool | None = None
    index_key_dtype: str = "auto"  # the model's dtype, or "int8"
    threads: int | None = None  # of the operators; None: one for each core the process may use
    cpus: tuple[int, ...] = ()  # processors they stay on, one each; empty: wherever the process may run
    seed: int | None = None  # of requests without a seed; None: a fresh one each

    def __post_init__(self) -> None:
        dtype = str(self.dtype).removeprefix("torch.")
        if dtype not in DTYPE_CHOICES:
            raise _illegal("dtype", self.dtype, f"one of {', '.join(DTYPE_CHOICES)}")
        object.__setattr__(self, "dtype", AUTO_DTYPE if dtype == "auto" else dtype)
        if self.index_key_dtype not in INDEX_KEY_DTYPES:
            raise _illegal("index_key_dtype", self.index_key_dtype, f"one of {', '.join(INDEX_KEY_DTYPES)}")
        if self.backend is not None and not isinstance(self.backend, str):
            raise _illegal("backend", self.backend, "the name of an operator table")
        self._check_integer("max_model_len", 2, MAX_COUNT)  # one token of prompt, one of reply
        self._check_integer("max_num_seqs", 1, MAX_COUNT)
        self._check_integer("max_num_batched_tokens", 1, MAX_COUNT, optional=False)
        self._check_integer("page_size", 1, MAX_COUNT, optional=False)
        self._check_integer("seed", *SEED)
        self._check_integer("threads", 1, MAX_THREADS)
        object.__setattr__(self, "cpus", parse_cpus(self.cpus))
        self._check_integer("snapshot_interval", 1, MAX_COUNT)
        self._check_number("cache_gib", low_is_legal=False)
        self._check_number("swap_gib")
        self._check_number("max_itl_ms", optional=False)
        if not isinstance(self.enable_prefix_caching, bool):
            raise _illegal("enable_prefix_caching", self.enable_prefix_caching, "True or False")
        if not isinstance(self.async_scheduling, bool | None):
            raise _illegal("async_scheduling", self.async_scheduling, "True, False or None")

    def _check_number(self, name: str, low_is_legal: bool = True, optional: bool = True) -> None:
        value = getattr(self, name)
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if optional and value is None:
            return
        if not (number and 0 <= value < MAX_COUNT) or (value == 0 and not low_is_legal):
            low = "at least 0" if low_is_legal else "greater than 0"
            raise _illegal(name, value, f"a number {low} and below {MAX_COUNT}")

    def _check_integer(self, name: str, low: int, high: int, optional: bool = True) -> None:
        value = getattr(self, name)
        integer = isinstance(value, int) and not isinstance(value, bool)
        if not (optional and value is None) and not (integer and low <= value <= high):
            raise _illegal(name, value, f"an integer from {low} to {high}")

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> Self:
        return cls(**{field.name: getattr(args, field.name) for field in fields(cls)})


def _illegal(name: str, value: Any, legal: str) -> CapacityError:
    return CapacityError(f"{name} is {shown(value)}.", remedy=f"Legal is {legal}.")


def parse_cpus(cpus: str | Iterable[int]) -> tuple[int, ...]:
    """Numbers of processors, given as such or like "0,2-5". Raises CapacityError."""
    numbers: list[int] = []
    parts = cpus.split(",") if isinstance(cpus, str) and cpus else cpus
    for part in parts:
        found = re.fullmatch(r"(\d{1,4})(?:-(\d{1,4}))?", str(part))
        first, last = (int(found[1]), int(found[2] or found[1])) if found else (1, 0)
        if first > last or isinstance(part, bool):
            raise _illegal("cpus", cpus, "a list like 0,2-5")
        numbers += range(first, last + 1)
    return tuple(numbers)


def add_index_key_argument(group: argparse._ArgumentGroup) -> None:
    """Adds --index-key-dtype, which every command that sizes or makes caches has."""
    group.add_argument(
        "--index-key-dtype",
        choices=list(INDEX_KEY_DTYPES),
        default=EngineOptions.index_key_dtype,
        help="of the sparse indexer's cached keys; int8 takes about half (default: %(default)s)",
    )


def add_thread_arguments(group: argparse._ArgumentGroup) -> None:
    """Adds --threads and --cpus, which every command that computes has."""
    group.add_argument(
        "--threads",
        type=int,
        metavar="N",
        help="threads of the operators (default: one for each core the process may use)",
    )
    group.add_argument(
        "--cpus",
        default="",
        metavar="LIST",
        help="keep each thread beside the calling one on a processor of its own, like 0,2-5 "
        "(default: the system moves them)",
    )


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that `EngineOptions.from_args` reads; names are vLLM's where it has them."""
    group = parser.add_argument_group("engine")
    default = EngineOptions()
    group.add_argument(
        "--dtype",
        choices=list(DTYPE_CHOICES),
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
        help="memory for pages and KDA states, of running sequences and of the prefix cache (default: chosen "
        "from what is free)",
    )
    group.add_argument(
        "--enable-prefix-caching",
        action=argparse.BooleanOptionalAction,
        default=default.enable_prefix_caching,
        help="go on from prompts and replies that begin alike (default: yes)",
    )
    group.add_argument(
        "--snapshot-interval",
        type=int,
        metavar="TOKENS",
        default=default.snapshot_interval,
        help="prompt tokens from one kept KDA state to the next (default: as many as weigh as much as a "
        "state, at least 512)",
    )
    group.add_argument(
        "--swap-gib",
        type=float,
        metavar="GIB",
        default=default.swap_gib,
        help="host memory for the state of preempted sequences; 0 computes them again (default: a quarter of "
        "the cache, if there is room)",
    )
    group.add_argument(
        "--max-itl-ms",
        type=float,
        metavar="MS",
        default=default.max_itl_ms,
        help="prompts are cut so small that nobody who is decoding waits longer for a step, as far as steps "
        "of 64 tokens allow; 0: no bound (default: %(default)s)",
    )
    group.add_argument(
        "--async-scheduling",
        action=argparse.BooleanOptionalAction,
        default=default.async_scheduling,
        help="prepare a step while the one before it runs (default: if a processor is left beside --threads)",
    )
    add_index_key_argument(group)
    add_thread_arguments(group)
    group.add_argument(
        "--seed",
        type=int,
        metavar="N",
        default=default.seed,
        help="seed of requests that bring none (default: a fresh one each)",
    )
