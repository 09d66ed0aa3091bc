"""A prefill server whose pages are not those of decode is refused before a byte is moved."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import NixlPullConnectorWorker

from longspan.errors import ConfigError
from longspan.plugin_vllm.nixl import LongspanNixlWorker

PEER = {"block_size": 64, "block_lens": [10240, 6400, 10240, 6400], "ssm_sizes": (2304, 4096)}


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> LongspanNixlWorker:
    monkeypatch.setattr(NixlPullConnectorWorker, "_validate_remote_agent_handshake", lambda *_: None)
    worker = object.__new__(LongspanNixlWorker)
    worker.block_size, worker.block_len_per_layer = PEER["block_size"], PEER["block_lens"]
    worker.dcp_size = 2
    worker._mamba_ssm_size = PEER["ssm_sizes"]
    worker._region_is_mla = [True, False, True, False]
    return worker


def test_equal_pages_are_taken(worker: LongspanNixlWorker) -> None:
    worker._validate_remote_agent_handshake(SimpleNamespace(**PEER), 2, 2)


@pytest.mark.parametrize(
    "change",
    [
        {"block_size": 32},
        {"block_lens": [5120, 6400, 5120, 6400]},
        {"block_lens": [10240, 6400]},
        {"ssm_sizes": (1152, 2048)},
    ],
    ids=["block size", "page", "a layer is missing", "tensor ranks"],
)
def test_others_are_refused_with_both_sizes_named(worker: LongspanNixlWorker, change) -> None:
    with pytest.raises(ConfigError, match="The pages of the prefill server are") as refused:
        worker._validate_remote_agent_handshake(SimpleNamespace(**PEER | change), 2, 2)
    assert "64 tokens a block" in str(refused.value)


def test_tokens_dealt_over_other_ranks_are_refused(worker: LongspanNixlWorker) -> None:
    with pytest.raises(ConfigError, match=r"over 1 ranks;.* over 2 ranks\..*--decode-context-parallel-size"):
        worker._validate_remote_agent_handshake(SimpleNamespace(**PEER), 2, 1)
