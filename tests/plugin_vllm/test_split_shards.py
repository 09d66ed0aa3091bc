"""A prefill/decode split, both sides of which deal tokens over ranks (DCP 2 with TP 2).

Four ranks and NIXL's threads, which never sleep, share two cores: leases and transfers have minutes.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
from support.cluster_cases import assert_same, make_prompts
from support.cluster_split import Split

BLOCK = 64
RANKS = ("--tensor-parallel-size", "2", "--decode-context-parallel-size", "2", "--block-size", str(BLOCK))
CORES = {"prefill": (0, 1), "decode": (1, 0)}


@pytest.fixture(scope="module")
def split(chatting: Path) -> Iterator[Split]:
    with ExitStack() as stack:
        servers = Split(chatting, stack, RANKS, CORES, lease_s=240, transfer_timeout_s=60)
        servers.revive()
        yield servers


def test_one_request_after_another_and_what_decode_has_cached(split: Split) -> None:
    """Lengths around a block of each rank; then prompts of which decode has blocks."""
    prompts = make_prompts(1, 2, BLOCK, BLOCK + 1, 2 * BLOCK, 2 * BLOCK + 1, 333)
    assert_same([split.complete(p) for p in prompts], split.reference(prompts))
    assert split.transferred() >= 2 * (len(prompts) - 1), "decode computed prompts itself"
    tail = make_prompts(30, seed=1)[0]
    again = [prompts[6], prompts[6][: 3 * BLOCK] + tail, prompts[6] + tail]
    split.check_partly_cached(again)
    split.wait_until_idle()


def test_requests_at_once(split: Split) -> None:
    prompts = make_prompts(3, 65, 128, 129, 200, 257, seed=2)
    before = split.transferred()
    with ThreadPoolExecutor(len(prompts)) as pool:
        assert_same(list(pool.map(split.complete, prompts)), split.reference(prompts))
    assert split.transferred() - before >= len(prompts)
    split.wait_until_idle()
