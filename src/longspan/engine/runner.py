"""Scheduled sequences -> `StepBatch` -> model -> rows of logits, each with its owner."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from longspan.config import ModelConfig
from longspan.engine.scheduler import Scheduled
from longspan.engine.sequence import Sequence
from longspan.memory.memory import Memory
from longspan.ops.backend import Operators
from longspan.ops.batch import LayerView, StepBatch


class Model(Protocol):
    """What an engine needs of `Decoder`."""

    @property
    def config(self) -> ModelConfig: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def ops(self) -> Operators: ...

    def step(self, batch: StepBatch, views: tuple[LayerView, ...]) -> Tensor:
        """Logits [R, vocab] float32 of `batch.logit_rows`."""
        ...


@dataclass(frozen=True)
class SequenceLogits:
    """What one step gave one sequence. All float32; the tensors are views of the step's logits."""

    seq: Sequence
    prompt: Tensor  # [P, vocab]: predictions of the next P prompt tokens whose log-probabilities are wanted
    next_token: Tensor | None  # [vocab], None while the prompt is unfinished
    finite: bool


class Runner:
    """Runs the model over what was scheduled and moves each sequence's memory on by its tokens."""

    def __init__(self, model: Model, memory: Memory) -> None:
        self._model = model
        self._memory = memory

    def run(self, scheduled: list[Scheduled]) -> list[SequenceLogits]:
        """One step. On any exception the memory of all these sequences is undefined."""
        wanted = [_wanted_rows(item) for item in scheduled]
        logits = self._model.step(self._batch(scheduled, wanted), self._memory.views)
        finite = torch.isfinite(logits).all(dim=1).tolist()
        results = []
        row = 0
        for item, (rows, samples) in zip(scheduled, wanted, strict=True):
            assert item.seq.memory
            item.seq.memory.num_tokens += item.num_tokens
            end = row + len(rows)
            num_prompt = len(rows) - samples
            next_token = logits[end - 1] if samples else None
            results.append(
                SequenceLogits(item.seq, logits[row : row + num_prompt], next_token, all(finite[row:end]))
            )
            row = end
        return results

    def _batch(self, scheduled: list[Scheduled], wanted: list[tuple[list[int], bool]]) -> StepBatch:
        token_ids: list[int] = []
        query_starts = [0]
        logit_rows: list[int] = []
        slot_mapping: list[Tensor] = []
        width = max(len(item.seq.memory.pages) for item in scheduled if item.seq.memory)
        block_tables = torch.zeros(len(scheduled), width, dtype=torch.int64)
        context_lens, state_slots = [], []
        for s, (item, (rows, _)) in enumerate(zip(scheduled, wanted, strict=True)):
            memory = item.seq.memory
            assert memory
            start, end = memory.num_tokens, memory.num_tokens + item.num_tokens
            token_ids += item.seq.tokens[start:end]
            logit_rows += [query_starts[-1] + row for row in rows]
            query_starts.append(query_starts[-1] + item.num_tokens)
            context_lens.append(start)
            state_slots.append(memory.slot)
            block_tables[s, : len(memory.pages)] = torch.tensor(memory.pages, dtype=torch.int64)
            positions = torch.arange(start, end)
            page_size = self._memory.page_size
            slot_mapping.append(block_tables[s, positions // page_size] * page_size + positions % page_size)
        return StepBatch(
            token_ids=torch.tensor(token_ids, dtype=torch.int64),
            query_starts=torch.tensor(query_starts, dtype=torch.int64),
            context_lens=torch.tensor(context_lens, dtype=torch.int64),
            block_tables=block_tables,
            slot_mapping=torch.cat(slot_mapping),
            state_slots=torch.tensor(state_slots, dtype=torch.int64),
            logit_rows=torch.tensor(logit_rows, dtype=torch.int64),
        )


def _wanted_rows(item: Scheduled) -> tuple[list[int], bool]:
    """Rows of this chunk whose logits are wanted, and whether the last of them is to be sampled from."""
    seq, count = item.seq, item.num_tokens
    rows: list[int] = []
    if seq.prompt_logprobs is not None:
        # The row of position p predicts token p + 1; recomputed positions have theirs already.
        first = len(seq.prompt_logprobs) - 1 - seq.num_computed
        last = seq.num_prompt_tokens - 1 - seq.num_computed
        rows = list(range(max(first, 0), min(last, count)))
    samples = count == seq.num_uncomputed
    if samples:
        rows.append(count - 1)
    return rows, samples
