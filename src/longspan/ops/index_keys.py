"""Index keys in pages: in the model's dtype as they are, or int8 with one scale for each key.

    scale = max_i |x_i| / 127        q_i = x_i / scale, rounded half to even        x ~ scale * q

All of it in float32. A row of zeros has scale 0 and q 0; a row with a NaN or an infinity has a scale that is
not finite, so every score it takes part in shows it. Pages hold q + 128 as uint8 in quads of dimensions
(`QuantizedKeys`); dimensions beyond the last are q = 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from longspan.ops.batch import QUAD, ZERO_CODE, QuantizedKeys
from longspan.ops.pages import read_span, write_rows

LARGEST = 127


def quantize_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """rows [..., n] -> q [..., n] int8 within +-127 and scale [...] float32."""
    wide = rows.float()
    scale = wide.abs().amax(-1) / LARGEST
    # No number: 0 / 0, inf / inf, anything by NaN. Infinite or above 127: by a scale rounded as a denormal.
    q = torch.nan_to_num(wide / scale[..., None], nan=0.0, posinf=0.0, neginf=0.0).round()
    return q.clamp(-LARGEST, LARGEST).to(torch.int8), scale


def write_index_keys(pages: Tensor | QuantizedKeys, slot_mapping: Tensor, keys: Tensor) -> None:
    """Puts keys [T, Di] at slot_mapping [T], quantised where the pages are."""
    if isinstance(pages, Tensor):
        write_rows(pages, slot_mapping, keys)
        return
    q, scale = quantize_rows(keys)
    q = torch.nn.functional.pad(q, (0, -keys.shape[1] % QUAD))
    codes = (q.short() + ZERO_CODE).to(torch.uint8).unflatten(1, (-1, QUAD))
    write_rows(pages.codes.transpose(1, 2), slot_mapping, codes)
    write_rows(pages.scale, slot_mapping, scale)


def read_quantized(
    pages: QuantizedKeys, block_table: Tensor, begin: int, end: int, dim: int
) -> tuple[Tensor, Tensor]:
    """Tokens begin:end of a sequence -> q [end - begin, dim] and scale [end - begin], both float32."""
    codes = read_span(pages.codes.transpose(1, 2), block_table, begin, end)
    q = codes.flatten(1)[:, :dim].float() - ZERO_CODE
    return q, read_span(pages.scale, block_table, begin, end)
