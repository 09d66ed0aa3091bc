"""Paged memory: token p of a sequence lives at [block_table[p // page_size], p % page_size].

`pages` is [num_pages, page_size, n] with any strides. Only rows that were written are ever handed out: what
lies in the rest of a page, or in a page of somebody else, may be NaN.
"""

from __future__ import annotations

from torch import Tensor


def write_rows(pages: Tensor, slot_mapping: Tensor, rows: Tensor) -> None:
    """Puts rows [T, ...] at slot_mapping [T] = page * page_size + offset, but those with a slot below 0."""
    size, here = pages.shape[1], slot_mapping >= 0
    slots = slot_mapping[here]
    pages[slots // size, slots % size] = rows[here].to(pages.dtype)


def read_span(pages: Tensor, block_table: Tensor, begin: int, end: int) -> Tensor:
    """Tokens begin:end of the sequence whose pages are block_table [max_pages] -> copy [end - begin, ...]."""
    size = pages.shape[1]
    first, last = begin // size, -(-end // size)
    whole = pages[block_table[first:last]].flatten(0, 1)
    return whole[begin - first * size : end - first * size]


def read_rows(pages: Tensor, block_tables: Tensor, seqs: Tensor, positions: Tensor) -> Tensor:
    """Token positions[r, j] of sequence seqs[r] -> copy [rows, k, n]. Positions must have been written."""
    size = pages.shape[1]
    page = block_tables[seqs[:, None], positions // size]
    return pages[page, positions % size]
