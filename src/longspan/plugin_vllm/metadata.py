"""A step as vLLM describes it, to the `StepBatch` of our operators.

vLLM keeps layers in groups with a block table each. For each group it calls a builder once a step; what the
builder returns reaches the model under the names of the group's layers.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from vllm.distributed import get_dcp_group
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
    MultipleOf,
)
from vllm.v1.attention.backends.utils import mamba_get_block_table_tensor
from vllm.v1.kv_cache_layout import KVCacheLayout

from longspan.ops.batch import StepBatch
from longspan.ops.shard import WHOLE, Shard


@dataclass(frozen=True)
class GroupStep:
    """What one group of layers needs of a step: all of a `StepBatch` but its tokens."""

    query_starts: Tensor  # [S+1] int64
    context_lens: Tensor  # [S] int64
    block_tables: Tensor  # [S, columns] int64
    slot_mapping: Tensor  # [T] int64
    state_slots: Tensor  # [S] int64
    shard: Shard

    @property
    def num_tokens(self) -> int:
        return int(self.query_starts[-1])

    def batch(self, token_ids: Tensor) -> StepBatch:
        """token_ids [T] int64."""
        return StepBatch(
            token_ids=token_ids,
            query_starts=self.query_starts,
            context_lens=self.context_lens,
            block_tables=self.block_tables,
            slot_mapping=self.slot_mapping,
            state_slots=self.state_slots,
            logit_rows=torch.empty(0, dtype=torch.int64),
            shard=self.shard,
        )


def no_tokens(shard: Shard) -> StepBatch:
    """The step of a rank that has nothing to do while others have."""
    none = torch.empty(0, dtype=torch.int64)
    step = GroupStep(torch.zeros(1, dtype=torch.int64), none, none.view(0, 0), none, none, shard)
    return step.batch(none)


class _Builder(AttentionMetadataBuilder[GroupStep]):
    """Common to both kinds of group."""

    def __init__(self, kv_cache_spec, layer_names, vllm_config, device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> GroupStep:
        common = common_attn_metadata
        seqs = common.num_reqs
        starts = common.query_start_loc_cpu[: seqs + 1].long()
        lengths = common.seq_lens[:seqs].long()
        block_tables, slots, states, shard = self._addresses(common, lengths)
        return GroupStep(starts, lengths - starts.diff(), block_tables, slots, states, shard)

    @abstractmethod
    def _addresses(
        self, common: CommonAttentionMetadata, lengths: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Shard]:
        """Block tables, slots of the tokens, states of the sequences, and which tokens are here."""


class MlaBuilder(_Builder):
    def __init__(self, kv_cache_spec, layer_names, vllm_config, device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        parallel = vllm_config.parallel_config
        self._shard = WHOLE
        if parallel.decode_context_parallel_size > 1:
            group = get_dcp_group()
            self._shard = Shard(group.rank_in_group, group.world_size, parallel.cp_kv_cache_interleave_size)

    def _addresses(
        self, common: CommonAttentionMetadata, lengths: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Shard]:
        # Copies: with asynchronous scheduling vLLM fills the same buffers for the next step.
        tables = common.block_table_tensor[: len(lengths)].long()
        slots = common.slot_mapping[: common.num_actual_tokens].clone()
        return tables, slots, torch.zeros_like(lengths), self._shard


class KdaBuilder(_Builder):
    def _addresses(
        self, common: CommonAttentionMetadata, lengths: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Shard]:
        mode = self.vllm_config.cache_config.mamba_cache_mode
        table = common.block_table_tensor[: len(lengths)]
        # vLLM has copied the state of the block before into the block that this step ends in.
        states = mamba_get_block_table_tensor(table, lengths.clone(), self.kv_cache_spec, mode)[:, 0].long()
        tables = torch.empty(len(lengths), 0, dtype=torch.int64)
        return tables, torch.empty(0, dtype=torch.int64), states, WHOLE


class _Backend(AttentionBackend):
    """What vLLM asks of a backend's class. It has no implementation: the model calls the operators itself."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.bfloat16, torch.float32]
    accept_output_buffer = False

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec=None) -> list[int | MultipleOf]:
        return [MultipleOf(1)]

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        # Blocks outermost: pages of several sizes lie side by side in a block, without padding.
        return (KVCacheLayout.BLNHC, KVCacheLayout.BLHNC)

    @staticmethod
    def get_kv_cache_shape(num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, *_, **__):
        return (num_blocks, num_kv_heads, block_size, head_size)


class MlaBackend(_Backend):
    @staticmethod
    def get_name() -> str:
        return "LONGSPAN_MLA"

    @staticmethod
    def get_builder_cls() -> type[MlaBuilder]:
        return MlaBuilder


class KdaBackend(_Backend):
    @staticmethod
    def get_name() -> str:
        return "LONGSPAN_KDA"

    @staticmethod
    def get_builder_cls() -> type[KdaBuilder]:
        return KdaBuilder

    @classmethod
    def is_ssm(cls) -> bool:
        return True
