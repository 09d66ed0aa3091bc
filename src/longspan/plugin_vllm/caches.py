"""The memory of one layer as vLLM allocates it: what it is told, and our view on the bytes it hands back.

vLLM finds caches under a name in its static forward context; they compute nothing. Its blocks are
side by side, layer after layer (layout BLNHC), so pages of any size share a block without padding:

    full attention   one page = [block_size latents | block_size index keys], each dense
    KDA              one page = [window of the short convolution | recurrent state]

The convolution window is [taps, channels], or [channels, taps] where a connector asks for it
(VLLM_SSM_CONV_STATE_LAYOUT=DS, which NIXL sets); channels are q | k | v of the rank's heads.
"""

from __future__ import annotations

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
from vllm.v1.attention.backend import AttentionBackend
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.kv_cache_interface import KVCacheSpec, MLAAttentionSpec

from longspan.config import ModelConfig
from longspan.ops.batch import KdaView, MlaView
from longspan.plugin_vllm.metadata import KdaBackend, MlaBackend


class MlaCache(AttentionLayerBase):
    """Latents and index keys of one layer, of all tokens on every tensor rank, or with DCP of a share."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        self._latent = config.mla.kv_lora_rank + config.mla.qk_rope_head_dim
        self._key = config.indexer.head_dim if config.indexer else 0
        self._dtype = dtype
        self.view: MlaView | None = None

    def get_attn_backend(self) -> type[AttentionBackend]:
        return MlaBackend

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> KVCacheSpec:
        return MLAAttentionSpec(
            block_size=vllm_config.cache_config.block_size,
            num_kv_heads=1,
            head_size=self._latent + self._key,
            dtype=self._dtype,
            max_tp_shards=1,
        )

    def bind_kv_cache(self, kv_cache: Tensor) -> None:
        """kv_cache [blocks, 1, block_size, latent + key], a block of it dense."""
        self.kv_cache = kv_cache
        blocks, _, size, width = kv_cache.shape
        begin, stride = kv_cache.storage_offset(), kv_cache.stride(0)
        dense = (1, blocks) if blocks == 1 else (kv_cache.stride(2), width)
        assert dense[0] == dense[1], f"a block of {kv_cache.stride()} is not dense"
        keys = begin + size * self._latent
        self.view = MlaView(
            latent=kv_cache.as_strided((blocks, size, self._latent), (stride, self._latent, 1), begin),
            index_key=kv_cache.as_strided((blocks, size, self._key), (stride, self._key, 1), keys)
            if self._key
            else None,
        )


class KdaCache(MambaBase):
    """Recurrent state and convolution window of one layer, of this rank's heads."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        self._shapes = state_shapes(config)
        self._dtypes = state_dtypes(dtype)
        self.view: KdaView | None = None

    def get_state_shape(self) -> tuple[tuple[int, ...], ...]:
        return self._shapes

    def get_state_dtype(self) -> tuple[torch.dtype, ...]:
        return self._dtypes

    @property
    def mamba_type(self) -> MambaAttentionBackendEnum:
        # Connectors know two-part states by this tag, and refuse tags of others.
        return MambaAttentionBackendEnum.GDN_ATTN

    def get_attn_backend(self) -> type[AttentionBackend]:
        return KdaBackend

    def bind_kv_cache(self, kv_cache: Tensor) -> None:
        super().bind_kv_cache(kv_cache)
        conv, state = self.kv_cache
        self.view = KdaView(state=state, conv=conv.transpose(1, 2) if is_conv_state_dim_first() else conv)


def state_shapes(config: ModelConfig) -> tuple[tuple[int, int], tuple[int, int, int]]:
    """Window and recurrent state of one slot. `config` is that of the rank."""
    kda = config.kda
    taps, channels = kda.conv_kernel_size - 1, 3 * kda.num_heads * kda.head_dim
    window = (channels, taps) if is_conv_state_dim_first() else (taps, channels)
    return window, (kda.num_heads, kda.head_dim, kda.head_dim)


def state_dtypes(dtype: torch.dtype) -> tuple[torch.dtype, torch.dtype]:
    return dtype, torch.float32
