"""A moment of an engine, for metrics and views. Plain numbers: it crosses from the engine's process."""

from __future__ import annotations

from dataclasses import dataclass, field

from longspan.memory.use import MemoryUse

STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""Steps are counted by how many tokens they compute: at most so many, and a last class for more."""


@dataclass(frozen=True)
class EngineStats:
    """The counters (from `num_preemptions` on) only ever grow; recomputed tokens count once."""

    num_running: int = 0  # sequences that hold memory
    num_waiting: int = 0
    num_swapped: int = 0  # of the waiting, those whose state is in the host pool
    cache_usage: float = 0.0  # share of the arena that running sequences hold, 1 = all
    memory: MemoryUse = field(default_factory=MemoryUse)
    num_checkpoints: int = 0  # of the prefix cache
    num_preemptions: int = 0
    num_swaps: int = 0
    num_evictions: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    prefix_queries: int = 0  # prompt tokens looked up in the prefix cache
    prefix_hits: int = 0  # prompt tokens taken from it
    num_steps: int = 0
    step_tokens: tuple[int, ...] = (0,) * (len(STEP_TOKENS) + 1)  # steps in each class of STEP_TOKENS
    num_step_tokens: int = 0  # that steps computed, recomputed ones included
    step_seconds: float = 0.0  # from step to step while there was work
    model_seconds: float = 0.0  # of these in the model and the sampler
