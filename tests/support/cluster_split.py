"""A prefill and a decode server of vLLM with NIXL between them, and requests that pass through both.

A prompt goes to the prefill server first, then with what that answered (`kv_transfer_params`) to the decode
server, which reads the memory of the prompt and recomputes its last token. A router does the same.
"""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from support.cluster_cases import Answer, assert_same, embedded_answers
from support.cluster_servers import SMALL, Running, completion, read_answer, vllm_server

MAX_TOKENS = 8
PORTS = {"prefill": 18560, "decode": 18570}
ROLES = {"prefill": "kv_producer", "decode": "kv_consumer"}


@dataclass
class Split:
    """Both servers. Those that a test has killed are started again by `revive`."""

    checkpoint: Path
    stack: ExitStack
    flags: tuple[str, ...] = ()
    cores: dict[str, tuple[int, ...]] = field(default_factory=lambda: {"prefill": (0,), "decode": (1,)})
    lease_s: int = 15
    transfer_timeout_s: int = 5
    servers: dict[str, Running] = field(default_factory=dict)

    @property
    def prefill(self) -> Running:
        return self.servers["prefill"]

    @property
    def decode(self) -> Running:
        return self.servers["decode"]

    def start(self, role: str, *flags: str) -> None:
        config = {
            "kv_connector": "NixlConnector",
            "kv_role": ROLES[role],
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {
                "kv_lease_duration": self.lease_s,
                "transfer_timeout": self.transfer_timeout_s,
            },
        }
        settings = {
            "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(PORTS[role] + 1),
        }
        server = vllm_server(
            self.checkpoint,
            PORTS[role],
            *SMALL,
            "--kv-transfer-config",
            json.dumps(config),
            *self.flags,
            *flags,
            cores=self.cores[role],
            environment=settings,
            deadline_s=None,
        )
        self.servers[role] = self.stack.enter_context(server)

    def revive(self) -> None:
        for role in ROLES:
            if role not in self.servers or self.servers[role].process.poll() is not None:
                self.start(role)
        for server in self.servers.values():
            server.wait_for_health()

    def fill(self, body: dict[str, Any]) -> dict[str, Any]:
        """Sends a request to the prefill server -> the request that the decode server is to get."""
        remote = {"do_remote_decode": True, "do_remote_prefill": False}
        response = self.prefill.post(
            "/v1/completions", body | {"max_tokens": 1, "stream": False, "kv_transfer_params": remote}
        )
        assert response.status_code == 200, response.text
        return body | {"kv_transfer_params": response.json()["kv_transfer_params"]}

    def complete(self, prompt: list[int]) -> Answer:
        body = self.fill(completion(prompt, MAX_TOKENS))
        return read_answer(self.decode.post("/v1/completions", body))

    def transferred(self) -> float:
        """Transfers from the prefill server since decode started: one a request and rank."""
        return self.decode.metric("nixl_bytes_transferred_count")

    def wait_until_idle(self) -> None:
        for server in self.servers.values():
            server.wait_until_idle(self.lease_s + 20)

    def check_partly_cached(self, prompts: list[list[int]]) -> None:
        """Asserts exact answers to prompts of which decode has some blocks, and gets others."""
        before, cached = self.transferred(), self.decode.metric("prefix_cache_hits_total")
        assert_same([self.complete(p) for p in prompts], self.reference(prompts))
        assert self.decode.metric("prefix_cache_hits_total") > cached, "nothing came from decode's own cache"
        assert self.transferred() > before

    def reference(self, prompts: list[list[int]]) -> list[Answer]:
        """What the embedded engine answers."""
        return embedded_answers(self.checkpoint, prompts, MAX_TOKENS)
