"""Rows of logits -> one token each, in vLLM's order: logit_bias, min_tokens, penalties, constraint,
temperature, min_p, top_k, top_p. Log-probabilities are of the unchanged logits.

The arithmetic is in `ops/sampling.py`; here is which row gets what. Rows never see each other.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence as Rows
from dataclasses import dataclass

import torch
from torch import Tensor

from longspan.engine.failures import non_finite_edits, nothing_left, unexpected
from longspan.engine.output import Logprob, TokenLogprobs
from longspan.engine.sequence import Sequence
from longspan.errors import LongspanError
from longspan.ops.backend import Operators
from longspan.ops.sampling import TokenCounts, uniform
from longspan.ops.top_k import top_k_indices

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Sampled:
    token_id: int
    logprobs: TokenLogprobs | None  # None if not asked for


@dataclass(frozen=True)
class _Limits:
    """What a constraint says about the next token."""

    allowed: Rows[int] | None = None  # None: all but `forbidden`
    forbidden: Rows[int] = ()


class Sampler:
    def __init__(self, ops: Operators, eos_token_ids: tuple[int, ...]) -> None:
        self._ops = ops
        self._eos_token_ids = eos_token_ids

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
        limits = [_limits(seq) for seq in seqs]
        edited = self._edit(logits, seqs, limits)
        chosen = self._choose(edited, seqs)
        # Logits as they came are finite. NaN if there is one in the row.
        best = edited.amax(-1).tolist() if edited is not logits else [0.0] * len(seqs)
        results: list[Sampled | LongspanError] = []
        for row, (seq, limit, token_id) in enumerate(zip(seqs, limits, chosen, strict=True)):
            wanted = seq.params.logprobs
            if isinstance(limit, LongspanError):
                results.append(limit)
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

    def _edit(self, logits: Tensor, seqs: list[Sequence], limits: list[_Limits | LongspanError]) -> Tensor:
        if not any(map(_is_edited, seqs)):
            return logits
        edited = logits.clone()
        for row, (seq, limit) in enumerate(zip(seqs, limits, strict=True)):
            params = seq.params
            if params.logit_bias:
                tokens, bias = seq.logit_bias
                edited[row, tokens] += bias
            # A constraint that leaves only the end knows better than min_tokens.
            free = isinstance(limit, _Limits) and limit.allowed is None
            if free and seq.num_output_tokens < params.min_tokens:
                edited[row, [*self._eos_token_ids, *(params.stop_token_ids or ())]] = -torch.inf
        edited = self._penalise(edited, seqs)
        for row, limit in enumerate(limits):
            if isinstance(limit, LongspanError):
                continue
            if limit.allowed is not None:
                kept = torch.full_like(edited[row], -torch.inf)
                kept[list(limit.allowed)] = edited[row, list(limit.allowed)]
                edited[row] = kept
            elif limit.forbidden:
                edited[row, list(limit.forbidden)] = -torch.inf
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

    def _choose(self, logits: Tensor, seqs: list[Sequence]) -> list[int]:
        params = [seq.params for seq in seqs]
        tokens = self._ops.sample(
            logits,
            torch.tensor([p.temperature for p in params], dtype=torch.float32),
            torch.tensor([min(max(p.top_k, 0), logits.shape[1]) for p in params], dtype=torch.int64),
            torch.tensor([p.top_p for p in params], dtype=torch.float32),
            torch.tensor([p.min_p for p in params], dtype=torch.float32),
            torch.tensor([uniform(s.stream, s.num_output_tokens) for s in seqs], dtype=torch.float64),
        )
        return tokens.tolist()


def _limits(seq: Sequence) -> _Limits | LongspanError:
    if seq.constraint is None:
        return _Limits()
    try:
        allowed = seq.constraint.allowed()
        return _Limits(allowed, seq.constraint.forbidden() if allowed is None else ())
    except Exception as error:
        logger.exception("a constraint failed")
        return unexpected(error)


def _is_edited(seq: Sequence) -> bool:
    params = seq.params
    too_short = seq.num_output_tokens < params.min_tokens
    return bool(params.logit_bias or params.penalises or seq.constraint or too_short)


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
