"""Steps of a model over memory that is filled at random, so that any depth costs no prefill to reach.

Latents, index keys and convolution windows are normal, as after the norms; KDA states are small. Each
sequence has its own pages, in scrambled order. A step is repeated where it stands: it overwrites the rows it
wrote before, and the depth stays what it is. Tokens are random and differ from step to step, so different
experts are hit.
"""

from __future__ import annotations

import math
import statistics
import time
from dataclasses import dataclass

import torch

from longspan.bench.workload import Step
from longspan.config import ModelConfig
from longspan.errors import NonFiniteError
from longspan.formats.progress import track
from longspan.memory.layout import allocate_views
from longspan.model.decoder import Decoder
from longspan.ops.batch import KdaView, LayerView, QuantizedKeys, StepBatch

PAGE_SIZE = 64
_STATE_DEVIATION = 0.05
_KEY_SCALE = 3 / 127  # codes of int8 keys of deviation about one
_ENOUGH_SECONDS = 2.0
_STEPS = range(3, 51)  # that are measured where their number is left open


@dataclass(frozen=True)
class Timing:
    """Of one step, in seconds."""

    median: float
    fastest: float
    slowest: float
    steps: int


class Bench:
    """A model with memory for `sequences` sequences of up to `tokens` tokens each."""

    def __init__(
        self, model: Decoder, sequences: int, tokens: int, index_key_dtype: str = "auto", seed: int = 0
    ) -> None:
        self._model = model
        self._tokens = tokens
        self._noise = torch.Generator().manual_seed(seed)
        pages = -(-tokens // PAGE_SIZE)
        self._views = allocate_views(
            model.config, sequences * pages, PAGE_SIZE, sequences, model.dtype, index_key_dtype
        )
        order = torch.randperm(sequences * pages, generator=self._noise)
        self._block_tables = order.view(sequences, pages)
        for view in track(self._views, "Filling memory"):
            _fill(view, self._noise)

    def warm_up(self) -> None:
        """Touches all weights, so that no measurement pays for reading them from disk."""
        self._run(Step(1, min(warm_up_tokens(self._model.config), self._tokens), 0))

    def time(self, step: Step, count: int | None = None) -> Timing:
        """`count` steps after one that is not counted; None: as many as fit in two seconds, 3 to 50.

        Raises NonFiniteError if the model gives anything but numbers.
        """
        self._run(step)
        seconds: list[float] = []
        while len(seconds) < (count or _STEPS.stop - 1):
            if count is None and len(seconds) >= _STEPS.start and sum(seconds) > _ENOUGH_SECONDS:
                break
            seconds.append(self._run(step))
        return Timing(statistics.median(seconds), min(seconds), max(seconds), len(seconds))

    def _run(self, step: Step) -> float:
        batch = self._batch(step)
        began = time.perf_counter()
        logits = self._model.step(batch, self._views)
        ended = time.perf_counter()
        if not torch.isfinite(logits).all():
            raise NonFiniteError(
                f"A step of {step.tokens} tokens at depth {step.context} gave NaN or infinity.",
                remedy="See whether --backend torch or --dtype float32 gives numbers.",
            )
        return ended - began

    def _batch(self, step: Step) -> StepBatch:
        sequences, rows = step.sequences, step.rows
        positions = torch.arange(step.context, step.context + rows)
        tables = self._block_tables[:sequences]
        return StepBatch(
            token_ids=torch.randint(self._model.config.vocab_size, (step.tokens,), generator=self._noise),
            query_starts=torch.arange(sequences + 1) * rows,
            context_lens=torch.full((sequences,), step.context),
            block_tables=tables,
            slot_mapping=(tables[:, positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE).flatten(),
            state_slots=torch.arange(sequences),
            logit_rows=torch.arange(1, sequences + 1) * rows - 1,
        )


def warm_up_tokens(config: ModelConfig) -> int:
    """Tokens that leave 0.05 experts of a layer untouched on average, as many choices are even."""
    experts, idle = config.moe.num_experts, 1 - config.moe.top_k / config.moe.num_experts
    return math.ceil(math.log(0.05 / experts) / math.log(idle)) if idle else 1


def _fill(view: LayerView, noise: torch.Generator) -> None:
    if isinstance(view, KdaView):
        view.state.normal_(0, _STATE_DEVIATION, generator=noise)
        view.conv.normal_(generator=noise)
        return
    view.latent.normal_(generator=noise)
    if isinstance(view.index_key, QuantizedKeys):
        view.index_key.codes.random_(1, 256, generator=noise)  # 0 would be -128, which no key has
        view.index_key.scale.uniform_(_KEY_SCALE / 2, _KEY_SCALE, generator=noise)
    elif view.index_key is not None:
        view.index_key.normal_(generator=noise)
