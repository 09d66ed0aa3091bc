"""From a batch of logits to one token per row. Rows are independent: batch mates never change a choice.

Order of operations: logit bias, penalties, masks, temperature, then the filters. Per row

    penalties    l > 0 ? l / repetition : l * repetition     tokens of prompt or output
                 l - frequency * count - presence            tokens of the output
    temperature  0 = greedy: the largest logit, ties to the lower token, and nothing below applies;
                 else (l - max l) / temperature: with the best at 0 no temperature overflows
    min_p        drops tokens with p < min_p * max p
    top_k        keeps the k most likely (0 = all), ties to the lower token
    top_p        keeps the fewest most likely whose mass reaches top_p (1 = all), ties to the lower token;
                 p is renormalised over what top_k left

Dropped tokens get -inf, and at least one token always stays. The choice is the inverse of the cumulative
distribution at one uniform number per row, so a seed and a step number fix it whatever else is in the
batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

# What each bit of a byte adds to a logit, the lowest first: 0 where it is set, else -inf.
_OF_BYTE = torch.where(torch.arange(256)[:, None] >> torch.arange(8) & 1 == 1, 0.0, -torch.inf)


@dataclass(frozen=True)
class TokenCounts:
    """Tokens that occur in each row's prompt or output, each (row, token) once."""

    rows: Tensor  # [N] int64
    tokens: Tensor  # [N] int64
    output_counts: Tensor  # [N] int64, 0 = in the prompt only


def apply_penalties(
    logits: Tensor, counts: TokenCounts, presence: Tensor, frequency: Tensor, repetition: Tensor
) -> Tensor:
    """logits [R, V] float32; presence, frequency, repetition [R] float32 (0, 0, 1 = none) -> new [R, V]."""
    rows, tokens, times = counts.rows, counts.tokens, counts.output_counts
    value = logits[rows, tokens]
    value = torch.where(value > 0, value / repetition[rows], value * repetition[rows])
    value = value - frequency[rows] * times - presence[rows] * (times > 0)
    out = logits.clone()
    out[rows, tokens] = value
    return out


def apply_masks(logits: Tensor, rows: Tensor, masks: Tensor) -> None:
    """Tokens of rows[i] that have no bit in masks[i] get -inf.

    logits [R, V] float32, changed in place; rows [M] int64, each once; masks [M, ceil(V / 32)] int32, the bit
    of the lowest token first.
    """
    for row, mask in zip(rows.tolist(), masks, strict=True):  # one at a time stays in the cache
        added = torch.nn.functional.embedding(mask.view(torch.uint8).int(), _OF_BYTE)
        logits[row] += added.flatten()[: logits.shape[1]]


def sample(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, uniforms: Tensor
) -> Tensor:
    """logits [R, V] float32; temperature, top_p, min_p [R] float32; top_k [R] int64; uniforms [R] float64.

    Returns tokens [R] int64. `uniforms` are in [0, 1); greedy rows read none of the filters.
    """
    tokens = logits.argmax(-1)  # the first of equals
    drawn = (temperature > 0).nonzero()[:, 0]
    if drawn.numel():
        rows = logits[drawn]
        rows = rows - rows.amax(-1, keepdim=True)
        rows = filter_logits(rows, temperature[drawn], top_k[drawn], top_p[drawn], min_p[drawn])
        tokens[drawn] = choose(rows, uniforms[drawn])
    return tokens


def filter_logits(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """logits [R, V] float32; temperature > 0, top_p, min_p [R], top_k [R] int64 -> scaled, dropped = -inf."""
    scaled = logits / temperature[:, None]
    vocab = logits.shape[1]

    if bool((min_p > 0).any()):
        floor = scaled.amax(-1) + torch.where(min_p > 0, min_p.log(), -torch.inf)
        scaled = torch.where(scaled < floor[:, None], -torch.inf, scaled)
    if bool(((top_k > 0) & (top_k < vocab)).any()) or bool((top_p < 1).any()):
        ordered, order = scaled.sort(dim=-1, descending=True, stable=True)
        limit = torch.where((top_k > 0) & (top_k < vocab), top_k, vocab)
        ordered = torch.where(torch.arange(vocab) < limit[:, None], ordered, -torch.inf)
        mass = torch.softmax(ordered.double(), -1)
        before = mass.cumsum(-1) - mass  # what the more likely tokens already hold
        dropped = (before >= top_p[:, None]) & (top_p < 1)[:, None]
        dropped[:, 0] = False
        ordered = torch.where(dropped, -torch.inf, ordered)
        scaled = torch.empty_like(scaled).scatter_(-1, order, ordered)
    return scaled


def choose(logits: Tensor, uniforms: Tensor) -> Tensor:
    """logits [R, V] after the filters, uniforms [R] float64 in [0, 1) -> tokens [R] int64.

    A token of logit -inf is never chosen. Rows must be finite or -inf with at least one finite entry.
    """
    mass = torch.softmax(logits.double(), -1)
    cumulative = mass.cumsum(-1)
    tokens = torch.searchsorted(cumulative, (uniforms * cumulative[:, -1])[:, None], right=True)[:, 0]
    last = logits.shape[1] - 1 - (mass.flip(-1) > 0).int().argmax(-1)  # rounding must not run past it
    return torch.minimum(tokens, last)


def uniforms(streams: np.ndarray, steps: np.ndarray) -> np.ndarray:
    """The numbers in [0, 1) of these steps of these streams, both uint64 [R] -> float64 [R].

    Two rounds of splitmix64: each number depends on its stream and step alone.
    """
    with np.errstate(over="ignore"):
        return (_splitmix64(_splitmix64(streams) + steps) >> np.uint64(11)) * 2.0**-53


def _splitmix64(x: np.ndarray) -> np.ndarray:
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
