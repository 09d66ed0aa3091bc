"""Scheduled sequences -> `StepBatch` -> model -> chosen tokens. What touches bytes happens here, in order.

A step is prepared (metadata only) and run in two calls, so that it can be prepared while the one before runs.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from longspan.config import ModelConfig
from longspan.engine.batch_state import BatchState, LogitRows, fill_in
from longspan.engine.failures import non_finite, unexpected
from longspan.engine.output import TokenLogprobs
from longspan.engine.sampler import Sampled, Sampler, token_logprobs
from longspan.engine.scheduler import Scheduled
from longspan.errors import LongspanError
from longspan.memory.memory import Edit, Memory
from longspan.ops.backend import Operators
from longspan.ops.batch import LayerView, StepBatch

logger = logging.getLogger(__name__)


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
class Step:
    """A step that is ready to run, once the tokens that are being chosen are known."""

    scheduled: list[Scheduled]
    batch: StepBatch
    rows: list[LogitRows]


@dataclass(frozen=True)
class SequenceResult:
    """What a step gave one sequence."""

    item: Scheduled
    sampled: Sampled | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    error: LongspanError | None = None
    keeps_state: bool = False  # the state was copied to `item.state_slot`, and all below it is finite


@dataclass(frozen=True)
class StepResult:
    """What a step gave, and how long the model and the sampler took."""

    sequences: list[SequenceResult]
    seconds: float


class Runner:
    """Runs the model over what was scheduled. One step at a time, from any thread."""

    def __init__(self, model: Model, memory: Memory, state: BatchState) -> None:
        self._model = model
        self._memory = memory
        self._state = state
        self._sampler = Sampler(model.ops, model.config.eos_token_ids)

    def prepare(self, scheduled: list[Scheduled]) -> Step:
        batch, rows = self._state.batch(scheduled)
        return Step(scheduled, batch, rows)

    @torch.inference_mode()
    def run(self, step: Step, edits: list[Edit]) -> StepResult:
        """A failure is that of all these sequences, whose memory is then undefined.

        Raises only if an edit does: then nobody knows any more who holds what, and the engine must end.
        """
        began = time.perf_counter()
        for edit in edits:
            edit()
        try:
            fill_in(step.batch, step.scheduled)
            logits = self._model.step(step.batch, self._memory.views)
            results = self._take(step, logits)
        except Exception as error:
            logger.exception("a step failed")
            results = [SequenceResult(item, error=unexpected(error)) for item in step.scheduled]
        return StepResult(results, time.perf_counter() - began)

    def _take(self, step: Step, logits: Tensor) -> list[SequenceResult]:
        """What each sequence makes of its logits. From here on a failure is that of one sequence."""
        finite = _finite_rows(logits)
        results: dict[int, SequenceResult] = {}
        ready: list[int] = []
        prompts: dict[int, list[TokenLogprobs]] = {}
        for i, (item, rows) in enumerate(zip(step.scheduled, step.rows, strict=True)):
            try:
                if finite is not None and not all(finite[rows.first : rows.end]):
                    raise non_finite()
                if rows.num_prompt:
                    prompts[i] = self._prompt_logprobs(
                        item, logits[rows.first : rows.first + rows.num_prompt]
                    )
                if rows.samples:
                    ready.append(i)
            except Exception as error:
                if not isinstance(error, LongspanError):
                    logger.exception("the log-probabilities of a prompt failed")
                results[i] = SequenceResult(item, error=unexpected(error))
        for i, sampled in zip(ready, self._sample(step, logits, ready), strict=True):
            if isinstance(sampled, LongspanError):
                results[i] = SequenceResult(step.scheduled[i], error=sampled)
            else:
                kept = self._keep_state(step.scheduled[i])
                results[i] = SequenceResult(step.scheduled[i], sampled, prompts.get(i), keeps_state=kept)
        for i, item in enumerate(step.scheduled):
            if i not in results:
                results[i] = SequenceResult(item, None, prompts.get(i), keeps_state=self._keep_state(item))
        return [results[i] for i in range(len(step.scheduled))]

    def _prompt_logprobs(self, item: Scheduled, logits: Tensor) -> list[TokenLogprobs]:
        first = item.start + item.prompt_rows.start + 1
        targets = item.seq.tokens[first : first + len(item.prompt_rows)]
        return token_logprobs(logits, targets, item.seq.params.prompt_logprobs or 0)

    def _sample(self, step: Step, logits: Tensor, ready: list[int]) -> list[Sampled | LongspanError]:
        if not ready:
            return []
        rows = [step.rows[i].end - 1 for i in ready]
        chosen = logits if rows == list(range(len(logits))) else logits[rows]
        return self._sampler.sample(chosen, [step.scheduled[i].seq for i in ready])

    def _keep_state(self, item: Scheduled) -> bool:
        if item.state_slot is None or not self._memory.is_finite(item.memory.slot, item.new_pages):
            return False
        self._memory.copy_state(item.memory.slot, item.state_slot)
        return True


def _finite_rows(logits: Tensor) -> list[bool] | None:
    """Which rows hold numbers only; None: all. One pass, since a sum shows what isn't finite."""
    if bool(torch.isfinite(logits.sum(dim=1)).all()):
        return None
    return torch.isfinite(logits).all(dim=1).tolist()
