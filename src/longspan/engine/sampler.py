"""Rows of logits -> one token each: logit_bias, penalties, constraint, min_tokens, temperature, min_p,
top_k, top_p, which gives what vLLM's order gives. min_tokens forbids the end, unless a constraint leaves
nothing else. Log-probabilities are of the unchanged logits.

The arithmetic is in `ops/sampling.py`; here is which row gets what. Rows never see each other.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence as Rows
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from longspan.engine.failures import non_finite_edits, nothing_left, unexpected
from longspan.engine.output import Logprob, TokenLogprobs
from longspan.engine.sequence import Sequence
from longspan.errors import LongspanError, RequestError
from longspan.ops.backend import Operators
from longspan.ops.sampling import TokenCounts, apply_masks, uniforms
from longspan.ops.top_k import top_k_indices

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Sampled:
    token_id: int
    logprobs: TokenLogprobs | None  # None if not asked for


class _Batch:
    """What stays the same from step to step while the same sequences decode."""

    def __init__(self, seqs: list[Sequence], vocab_size: int) -> None:
        self.seqs = seqs
        params = [seq.params for seq in seqs]
        self.is_plain = not any(_may_be_edited(seq) for seq in seqs)
        self.temperature = torch.tensor([p.temperature for p in params], dtype=torch.float32)
        self.top_k = torch.tensor([min(max(p.top_k, 0), vocab_size) for p in params], dtype=torch.int64)
        self.top_p = torch.tensor([p.top_p for p in params], dtype=torch.float32)
        self.min_p = torch.tensor([p.min_p for p in params], dtype=torch.float32)
        self._is_greedy = not any(p.temperature for p in params)
        self._streams = np.array([seq.stream for seq in seqs], dtype=np.uint64)

    def uniforms(self) -> Tensor:
        """[R] float64: the random number of each row for the token that is next."""
        if self._is_greedy:
            return torch.zeros(len(self.seqs), dtype=torch.float64)
        steps = np.array([seq.num_output_tokens for seq in self.seqs], dtype=np.uint64)
        return torch.from_numpy(uniforms(self._streams, steps))


class Sampler:
    """Remembers the batch of the last step, for the next one is mostly the same."""

    def __init__(self, ops: Operators, eos_token_ids: tuple[int, ...]) -> None:
        self._ops = ops
        self._eos_token_ids = eos_token_ids
        self._last: _Batch | None = None

    def sample(self, logits: Tensor, seqs: list[Sequence]) -> list[Sampled | LongspanError]:
        """logits [R, vocab] float32, finite, row r belongs to seqs[r]; not changed.

        A row gives an error if its constraint raised, nothing is left to choose from or anything else goes
        wrong with it.
        """
        try:
            return self._sample(logits, seqs)
        except Exception as error:
            if len(seqs) == 1:
                logger.exception("sampling failed")
                return [unexpected(error)]
        # Rows don't see each other, so alone only the one at fault fails again.
        return [self.sample(logits[row : row + 1], [seq])[0] for row, seq in enumerate(seqs)]

    def _sample(self, logits: Tensor, seqs: list[Sequence]) -> list[Sampled | LongspanError]:
        batch = self._last
        if batch is None or batch.seqs != seqs:
            batch = self._last = _Batch(seqs, logits.shape[1])
        masks = [None if batch.is_plain else _mask(seq) for seq in seqs]
        edited = logits if batch.is_plain else self._edit(logits, seqs, masks)
        chosen = self._ops.sample(
            edited, batch.temperature, batch.top_k, batch.top_p, batch.min_p, batch.uniforms()
        ).tolist()
        # Logits as they came are finite. NaN if there is one in the row.
        best = edited.amax(-1).tolist() if edited is not logits else [0.0] * len(seqs)
        results: list[Sampled | LongspanError] = []
        for row, (seq, mask, token_id) in enumerate(zip(seqs, masks, chosen, strict=True)):
            wanted = seq.params.logprobs
            if isinstance(mask, LongspanError):
                results.append(mask)
            elif best[row] == -math.inf:
                results.append(nothing_left())
            elif not math.isfinite(best[row]):
                results.append(non_finite_edits())
            elif wanted is None:
                results.append(Sampled(token_id, None))
            else:
                results.append(
                    Sampled(token_id, token_logprobs(logits[row : row + 1], [token_id], wanted)[0])
                )
        return results

    def _edit(
        self, logits: Tensor, seqs: list[Sequence], masks: Rows[Tensor | LongspanError | None]
    ) -> Tensor:
        edited = logits.clone()
        for row, seq in enumerate(seqs):
            if seq.params.logit_bias:
                tokens, bias = seq.logit_bias
                edited[row, tokens] += bias
        edited = self._penalise(edited, seqs)
        constrained = {row: mask for row, mask in enumerate(masks) if isinstance(mask, Tensor)}
        if constrained:
            apply_masks(edited, torch.tensor(list(constrained)), torch.stack(list(constrained.values())))
        for row, seq in enumerate(seqs):
            if seq.num_output_tokens < seq.params.min_tokens:
                ends = [*self._eos_token_ids, *(seq.params.stop_token_ids or ())]
                without = edited[row].index_fill(0, torch.tensor(ends), -torch.inf)
                if row not in constrained or without.amax() > -torch.inf:
                    edited[row] = without
        return edited

    def _penalise(self, logits: Tensor, seqs: list[Sequence]) -> Tensor:
        histories = {row: seq.history.tensors() for row, seq in enumerate(seqs) if seq.history}
        if not histories:
            return logits
        tokens, counts = map(torch.cat, zip(*histories.values(), strict=True))
        sizes = torch.tensor([len(tokens) for tokens, _ in histories.values()])
        rows = torch.repeat_interleave(torch.tensor(list(histories)), sizes)
        return self._ops.apply_penalties(
            logits,
            TokenCounts(rows, tokens, counts),
            torch.tensor([seq.params.presence_penalty for seq in seqs], dtype=torch.float32),
            torch.tensor([seq.params.frequency_penalty for seq in seqs], dtype=torch.float32),
            torch.tensor([seq.params.repetition_penalty for seq in seqs], dtype=torch.float32),
        )


def _mask(seq: Sequence) -> Tensor | LongspanError | None:
    """None: everything is allowed."""
    if seq.constraint is None:
        return None
    try:
        return seq.constraint.mask()
    except RequestError as error:
        return error
    except Exception as error:
        logger.exception("a constraint failed")
        return unexpected(error)


def _may_be_edited(seq: Sequence) -> bool:
    params = seq.params
    return bool(params.logit_bias or params.penalises or seq.constraint or params.min_tokens)


def token_logprobs(logits: Tensor, token_ids: Rows[int], top_n: int) -> list[TokenLogprobs]:
    """logits [R, vocab] float32 -> for row r the log-probability of token_ids[r], then the `top_n` likeliest.

    Equal ones rank by token id.
    """
    logprobs = torch.log_softmax(logits, -1)
    chosen = torch.tensor(token_ids)[:, None]
    value = logprobs.gather(1, chosen)
    before = (logprobs == value) & (torch.arange(logits.shape[1]) < chosen)
    ranks = ((logprobs > value) | before).sum(-1) + 1
    top = top_k_indices(logprobs, top_n)
    top_values = logprobs.gather(1, top)
    results = []
    for row, token_id in enumerate(token_ids):
        entry = {token_id: Logprob(value[row, 0].item(), int(ranks[row]))}
        best = sorted(zip((-top_values[row]).tolist(), top[row].tolist(), strict=True))
        for rank, (negated, other) in enumerate(best, start=1):
            entry.setdefault(other, Logprob(-negated, rank))
        results.append(entry)
    return results
