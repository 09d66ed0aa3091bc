"""Who holds the memory of an engine. Plain numbers: they cross from the engine's process."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class MemoryUse:
    """Who holds the bytes of the arena; what is left of `total_bytes` is free."""

    total_bytes: int = 0
    page_bytes_running: int = 0
    page_bytes_cached: int = 0  # of the prefix cache alone, given up when somebody needs them
    state_bytes_running: int = 0
    state_bytes_cached: int = 0
    swap_bytes: int = 0  # in the host pool, of preempted sequences
    swap_total_bytes: int = 0
