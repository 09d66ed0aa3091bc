"""Matrix products with the published [out, in] weights. No linear layer of the text model has a bias.

    linear(x; W)  = round( W x )        operands as stored, accumulated in float32, rounded to the dtype of x
    lm_head(x; W) = W x                 the same product kept in float32: two logits never tie by rounding
    embed(i; W)   = row i of W

`lm_head` widens LM_HEAD_BLOCK rows of W at a time, so a bfloat16 head is never held twice. T = 0 gives [0,
out].
"""

from __future__ import annotations

import torch
from torch import Tensor

LM_HEAD_BLOCK = 16384  # vocabulary rows widened at once


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x [..., in], weight [out, in] -> [..., out]."""
    return torch.nn.functional.linear(x, weight)


def embed(token_ids: Tensor, weight: Tensor) -> Tensor:
    """token_ids [T] int64, weight [vocab, hidden] -> [T, hidden]."""
    return weight[token_ids]


def lm_head(x: Tensor, weight: Tensor) -> Tensor:
    """x [T, hidden], weight [vocab, hidden] -> [T, vocab] float32."""
    logits = torch.empty(x.shape[0], weight.shape[0])
    wide = x.float()
    for begin in range(0, weight.shape[0], LM_HEAD_BLOCK):
        block = weight[begin : begin + LM_HEAD_BLOCK].float()
        torch.mm(wide, block.T, out=logits[:, begin : begin + LM_HEAD_BLOCK])
    return logits
