"""A model without weights whose next token depends on all that its memory says it has seen."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from longspan.config import ModelConfig
from longspan.ops.backend import TORCH
from longspan.ops.batch import KdaView, LayerView, MlaView, QuantizedKeys, StepBatch

MODULUS = 9973  # keeps every number exact in float32


class FakeModel:
    """Token ids live in the pages, a running hash of them in the slot; logits are a function of both.

    So a page or a slot of somebody else, a token written twice or not at all, changes the answer. `hook` sees
    the logits of each step, may change them and may raise.
    """

    def __init__(self, config: ModelConfig, hook: Callable[[StepBatch, Tensor], None] | None = None) -> None:
        self.config = config
        self.dtype = torch.float32
        self.ops = TORCH
        self.hook = hook
        self.batches: list[StepBatch] = []

    def step(self, batch: StepBatch, views: Sequence[LayerView]) -> Tensor:
        self.batches.append(batch)
        latent = next(view.latent for view in views if isinstance(view, MlaView))[..., 0]
        state = next(view.state for view in views if isinstance(view, KdaView))[:, 0, 0, 0]
        size = latent.shape[1]
        before = state[batch.state_slots].tolist()
        self._write_zeros(batch, views, size)
        latent[batch.slot_mapping // size, batch.slot_mapping % size] = batch.token_ids.float()
        running = []
        for s, (begin, end, context) in enumerate(batch.sequences):
            slot = batch.state_slots[s]
            value = before[s] if context else 0.0
            for token in batch.token_ids[begin:end].tolist():
                value = (value * 31 + token + 1) % MODULUS
                running.append(value)
            state[slot] = value
        logits = torch.empty(len(batch.logit_rows), self.config.vocab_size)
        for i, row in enumerate(batch.logit_rows.tolist()):
            logits[i] = self._logits(batch, latent, running, row)
        if self.hook:
            self.hook(batch, logits)
        return logits

    def _write_zeros(self, batch: StepBatch, views: Sequence[LayerView], size: int) -> None:
        """Like a real model it leaves numbers in all of its rows and slots."""
        for view in views:
            if isinstance(view, KdaView):
                view.state[batch.state_slots] = view.conv[batch.state_slots] = 0.0
                continue
            keys = view.index_key.scale if isinstance(view.index_key, QuantizedKeys) else view.index_key
            for tensor in (view.latent, keys):
                if tensor is not None:
                    tensor[batch.slot_mapping // size, batch.slot_mapping % size] = 0.0

    def _logits(self, batch: StepBatch, latent: Tensor, running: list[float], row: int) -> Tensor:
        table = batch.block_tables[batch.row_seqs[row]]
        positions = torch.arange(int(batch.row_positions[row]) + 1)
        seen = latent[table[positions // latent.shape[1]], positions % latent.shape[1]]
        return fake_logits(seen, running[row], self.config.vocab_size)


def fake_logits(tokens: Tensor, running: float, vocab_size: int) -> Tensor:
    """Spread over -6 to 6, different for every history; NaN if a NaN was read."""
    mixed = ((tokens + 1) * (torch.arange(len(tokens)) % 89 + 1)).sum() % MODULUS * 7 + running
    return torch.sin((torch.arange(vocab_size) + 1) * (mixed % MODULUS + 1) * 0.618) * 6
