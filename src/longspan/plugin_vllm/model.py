"""The class vLLM makes of our architecture: `longspan.model.Decoder`, driven by vLLM's metadata."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.mamba_utils import get_conv_copy_spec, get_temporal_copy_spec
from vllm.model_executor.models.interfaces import HasInnerState, IsHybrid

from longspan.memory.layout import allocate_views
from longspan.ops.backend import select_backend
from longspan.ops.batch import LayerView, StepBatch
from longspan.parallel.loader import load_share
from longspan.plugin_vllm.caches import KdaCache, MlaCache, state_dtypes, state_shapes
from longspan.plugin_vllm.metadata import GroupStep, no_tokens
from longspan.plugin_vllm.ranks import TrafficReport, make_layout, use_bound_cpus


class LongspanForCausalLM(nn.Module, HasInnerState, IsHybrid):
    """Kimi K3.1, K3 and Kimi-Linear."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        self._vllm_config = vllm_config
        self._dtype = vllm_config.model_config.dtype
        self.layout = make_layout(vllm_config.model_config.hf_config.model_config(), vllm_config)
        config = self.layout.local_config
        self._names = [f"{prefix}layers.{layer}.attention" for layer in range(config.num_layers)]
        self.caches: list[MlaCache | KdaCache] = [
            MlaCache(config, self._dtype)
            if config.is_full_attention(layer)
            else KdaCache(config, self._dtype)
            for layer in range(config.num_layers)
        ]
        context = vllm_config.compilation_config.static_forward_context
        for name, cache in zip(self._names, self.caches, strict=True):
            context[name] = cache
        self._report = TrafficReport(self.layout)
        self._idle_batch = no_tokens(self.layout.shard)
        self._idle_views = allocate_views(config, 0, 1, 0, self._dtype)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Maps the checkpoint's own files; the tensors that vLLM offers to read are left alone."""
        use_bound_cpus(select_backend())
        self.decoder = load_share(self._vllm_config.model_config.model, self.layout, self._dtype)

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        return self.decoder.ops.embed(input_ids.long(), self.decoder.weights.embed)

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: object = None,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor:
        """input_ids [T or more], all requests of the step end to end -> hidden [the same, hidden size]."""
        assert input_ids is not None, "the model takes token ids"
        batches, views, tokens = self._step(input_ids)
        hidden = self.decoder.hidden(batches, views, torch.arange(tokens))
        self._report.after_step()
        return nn.functional.pad(hidden, (0, 0, 0, len(input_ids) - tokens))

    def _step(self, input_ids: Tensor) -> tuple[list[StepBatch], list[LayerView], int]:
        """One batch and one view per layer, and the number of tokens.

        Without metadata (profiling, or a rank that idles while its data-parallel mates work) there is nothing
        to compute, but the layers still have to meet the other ranks.
        """
        steps = get_forward_context().attn_metadata
        assert not isinstance(steps, list), "micro-batches are a matter of GPUs"
        if not steps:
            return [self._idle_batch] * len(self.caches), list(self._idle_views), 0
        batches: dict[int, StepBatch] = {}
        per_layer = []
        for name in self._names:
            step = steps[name]
            assert isinstance(step, GroupStep)
            if id(step) not in batches:
                batches[id(step)] = step.batch(input_ids[: step.num_tokens].long())
            per_layer.append(batches[id(step)])
        views = [cache.view for cache in self.caches if cache.view]
        return per_layer, views, per_layer[0].num_tokens

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """[R, hidden size] -> [R, vocabulary] float32, on every rank."""
        return self.decoder.logits(hidden_states)

    @classmethod
    def get_mamba_state_shape_from_config(cls, vllm_config: VllmConfig):
        config = vllm_config.model_config.hf_config.model_config()
        heads = config.kda.num_heads // vllm_config.parallel_config.tensor_parallel_size
        return state_shapes(replace(config, kda=replace(config.kda, num_heads=heads)))

    @classmethod
    def get_mamba_state_dtype_from_config(cls, vllm_config: VllmConfig):
        return state_dtypes(vllm_config.model_config.dtype)

    @classmethod
    def get_mamba_state_copy_func(cls):
        return get_conv_copy_spec, get_temporal_copy_spec
