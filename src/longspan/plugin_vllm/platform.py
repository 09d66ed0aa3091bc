"""vLLM's CPU platform, and for our model what it takes away given back.

For other models it is the parent, unchanged. It keeps a block size once resolved (0.32 forgets it after the
handshake of its processes, which files wrong states in the prefix cache), lets steps be scheduled
asynchronously, knows the slots of decode context parallel, and has a worker for requests with a seed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from vllm.platforms.cpu import CpuPlatform

from longspan.ops.shard import Shard
from longspan.plugin_vllm.policy import is_longspan

if TYPE_CHECKING:
    from vllm.config import VllmConfig

WORKER = "longspan.plugin_vllm.worker.LongspanCpuWorker"
SLOT_KERNEL = "vllm.v1.worker.block_table.ComputeSlotMappingKernel.kernel"


class LongspanCpuPlatform(CpuPlatform):
    @classmethod
    def check_and_update_config(cls, vllm_config: VllmConfig) -> None:
        if not is_longspan(vllm_config):
            super().check_and_update_config(vllm_config)
            return
        scheduler, cache = vllm_config.scheduler_config, vllm_config.cache_config
        model = vllm_config.model_config.model_arch_config
        asynchronous, block_size, mla = scheduler.async_scheduling, cache.block_size, model.is_deepseek_mla
        if vllm_config.parallel_config.worker_cls == "auto":
            vllm_config.parallel_config.worker_cls = WORKER
        model.is_deepseek_mla = False  # the parent's own MLA can neither cut prompts nor cache prefixes
        super().check_and_update_config(vllm_config)
        scheduler.async_scheduling, cache.block_size, model.is_deepseek_mla = asynchronous, block_size, mla

    @classmethod
    def update_block_size_for_backend(cls, vllm_config: VllmConfig) -> None:
        if not is_longspan(vllm_config):
            super().update_block_size_for_backend(vllm_config)
        elif vllm_config.cache_config.mamba_cache_mode == "align":
            vllm_config.cache_config.mamba_block_size = vllm_config.cache_config.block_size

    @classmethod
    def register_triton_kernel_overrides(cls) -> None:
        from vllm.triton_utils import HAS_TRITON
        from vllm.triton_utils.dispatcher import register_kernels

        super().register_triton_kernel_overrides()
        if not HAS_TRITON:
            register_kernels({SLOT_KERNEL: compute_slots})


def compute_slots(
    num_tokens: int,
    max_num_tokens: int,
    query_start_loc: Tensor,
    positions: Tensor,
    block_table: Tensor,
    block_table_stride: int,
    slot_mapping: Tensor,
    KV_CACHE_BLOCK_SIZE: int,
    TOTAL_CP_WORLD_SIZE: int = 1,
    TOTAL_CP_RANK: int = 0,
    CP_KV_CACHE_INTERLEAVE_SIZE: int = 1,
    PAD_ID: int = -1,
    BLOCK_SIZE: int = 1024,
) -> None:
    """Fills slot_mapping: block * block size + offset of each token that is here, PAD_ID for others."""
    shard = Shard(TOTAL_CP_RANK, TOTAL_CP_WORLD_SIZE, CP_KV_CACHE_INTERLEAVE_SIZE)
    positions = positions[:num_tokens]
    starts = query_start_loc.long()
    rows = torch.searchsorted(starts[1:], torch.arange(num_tokens), right=True)
    local = shard.local(positions)
    blocks = block_table[rows, local // KV_CACHE_BLOCK_SIZE].long()
    slots = blocks * KV_CACHE_BLOCK_SIZE + local % KV_CACHE_BLOCK_SIZE
    slot_mapping[:num_tokens] = torch.where(shard.owner(positions) == shard.rank, slots, PAD_ID)
    slot_mapping[num_tokens:] = PAD_ID
