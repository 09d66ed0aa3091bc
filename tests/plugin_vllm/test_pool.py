"""Two servers that share prefixes through a Mooncake Store: exact, and alive without it."""

from __future__ import annotations

import json
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
from support.cluster_cases import assert_same, embedded_answers, make_prompts
from support.cluster_servers import SMALL, running, vllm_server

pytest.importorskip("mooncake.store", exc_type=ImportError)  # it needs libibverbs1, libnuma1 and libcurl4

MASTER_PORT, PORTS = 18590, (18593, 18594)
CONNECTOR = {"kv_connector": "MooncakeStoreConnector", "kv_role": "kv_both"}
MAX_TOKENS = 8


def test_a_prefix_that_another_server_computed(chatting: Path, tmp_path: Path) -> None:
    first, tail = make_prompts(300, 40)
    prompts = [first, first[:200] + tail, first + tail]
    lost = make_prompts(150, seed=1)
    want = embedded_answers(chatting, prompts + lost, MAX_TOKENS)
    settings = tmp_path / "mooncake.json"
    settings.write_text(
        json.dumps(
            {
                "metadata_server": "P2PHANDSHAKE",
                "master_server_address": f"127.0.0.1:{MASTER_PORT}",
                "protocol": "tcp",
                "global_segment_size": "128MB",
                "local_buffer_size": "64MB",
            }
        )
    )
    # Servers agree on the keys of blocks only if they hash alike.
    environment = {
        "MOONCAKE_CONFIG_PATH": str(settings),
        "VLLM_HOST_IP": "127.0.0.1",
        "PYTHONHASHSEED": "0",
    }
    flags = (*SMALL, "--block-size", "64", "--kv-transfer-config", json.dumps(CONNECTOR))
    with ExitStack() as stack:
        master = stack.enter_context(running(master_command(), f"http://127.0.0.1:{MASTER_PORT + 1}"))
        one, other = (
            stack.enter_context(
                vllm_server(chatting, port, *flags, cores=(i,), environment=environment, deadline_s=None)
            )
            for i, port in enumerate(PORTS)
        )
        for server in (one, other):
            server.wait_for_health()
        assert_same([one.complete(p, MAX_TOKENS) for p in prompts], want[:3])
        wait_until_stored(master.url)
        assert_same([other.complete(p, MAX_TOKENS) for p in prompts], want[:3])
        assert other.metric("external_prefix_cache_hits_total") >= 256, "nothing came from the pool"
        master.kill()
        assert_same([other.complete(p, MAX_TOKENS) for p in prompts[:1] + lost], want[:1] + want[3:])
        for server in (one, other):
            server.wait_until_idle(60)


def master_command() -> list[str]:
    return [
        str(Path(sys.executable).parent / "mooncake_master"),
        *("--rpc_address", "127.0.0.1", "--rpc_port", str(MASTER_PORT)),
        *("--metrics_host", "127.0.0.1", "--metrics_port", str(MASTER_PORT + 1)),
    ]


def wait_until_stored(url: str) -> None:
    """Returns when there are keys, and no more have come for a second."""
    until, before = time.monotonic() + 60, None
    while (keys := httpx.get(f"{url}/get_all_keys").text.split()) != before or not keys:
        assert time.monotonic() < until, "nothing was stored"
        before = keys
        time.sleep(1)
