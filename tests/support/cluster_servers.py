"""vLLM's server with our model as users run it: processes of its own, real sockets on 127.0.0.1.

Whatever a test does, no process outlives its block: servers run in a process group that is killed as one.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from support.cluster_cases import NEW_TOKENS, Answer

CORES = sorted(os.sched_getaffinity(0))
PR_SET_PDEATHSIG = 1
SMALL = ("--dtype", "float32", "--max-model-len", "1024", "--kv-cache-memory-bytes", str(64 << 20))


@dataclass
class Running:
    """A process that answers on `url`, with all its children in one process group."""

    process: subprocess.Popen[bytes]
    url: str
    log_file: Path

    def log(self, last: int = 8000) -> str:
        """The end of what it printed."""
        return self.log_file.read_text(errors="replace")[-last:]

    def kill(self) -> None:
        """Kills the whole group at once, as a machine that loses power."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def wait_for_health(self, deadline_s: float = 240) -> None:
        """Returns when /health answers 200; fails with the log if the process ends or time is up."""
        until = time.monotonic() + deadline_s
        while time.monotonic() < until and self.process.poll() is None:
            with suppress(httpx.TransportError):
                if httpx.get(f"{self.url}/health", timeout=5).status_code == 200:
                    return
            time.sleep(0.2)
        raise AssertionError(f"{self.url} did not come up (exit code {self.process.poll()}):\n{self.log()}")

    def post(self, path: str, body: Any, timeout: float = 120) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=timeout)

    def complete(self, prompt: list[int], max_tokens: int = NEW_TOKENS, **options: Any) -> Answer:
        """The greedy answer to a prompt of token ids."""
        return read_answer(self.post("/v1/completions", completion(prompt, max_tokens, **options)))

    def metric(self, name: str) -> float:
        """The sum of a metric of vLLM over its engines."""
        text = httpx.get(f"{self.url}/metrics", timeout=30).text
        found = re.findall(rf"^vllm:{name}(?:\{{[^}}]*\}})? (\S+)$", text, re.MULTILINE)
        assert found, f"no metric {name} in:\n{text}"
        return sum(map(float, found))

    def wait_until_idle(self, deadline_s: float = 30) -> None:
        """Returns when nothing runs or waits and no block is held; fails if that does not happen in time."""
        names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        until = time.monotonic() + deadline_s
        while any(values := [self.metric(name) for name in names]):
            assert time.monotonic() < until, f"still busy: {dict(zip(names, values, strict=True))}"
            time.sleep(0.1)


def die_with_parent() -> None:
    """For a child before it becomes a server: it ends with the tests, however those end (Linux)."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


@contextmanager
def running(
    command: Sequence[str],
    url: str,
    environment: Mapping[str, str] | None = None,
    deadline_s: float | None = 240,
) -> Iterator[Running]:
    """Starts a server; its process group is killed at the end of the block.

    Waits for its /health, but not with a `deadline_s` of None: then several come up at once, and the block
    waits for each.
    """
    with tempfile.TemporaryDirectory() as directory:
        log_file = Path(directory) / "log"
        with log_file.open("wb") as log:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=os.environ | {"PYTHONUNBUFFERED": "1"} | dict(environment or {}),
                # A group, not a session: Linux shares cores out by session, and starves one beside a
                # server that spins (NIXL's threads, vLLM's queues) on the same core.
                process_group=0,
                preexec_fn=die_with_parent,
            )
        server = Running(process, url, log_file)
        try:
            if deadline_s is not None:
                server.wait_for_health(deadline_s)
            yield server
        finally:
            server.kill()


def vllm_server(
    checkpoint: Path,
    port: int,
    *flags: str,
    cores: Sequence[int] = (0,),
    environment: Mapping[str, str] | None = None,
    deadline_s: float | None = 240,
) -> AbstractContextManager[Running]:
    """A server of vLLM on `port`: the rank i is bound to the core cores[i], modulo what this machine has."""
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(checkpoint)]
    command += ["--served-model-name", "k31", "--host", "127.0.0.1", "--port", str(port), *flags]
    bind = "|".join(str(CORES[core % len(CORES)]) for core in cores)
    settings = {
        "VLLM_CPU_OMP_THREADS_BIND": bind,
        "VLLM_LOGGING_LEVEL": "INFO",
        "VLLM_NO_USAGE_STATS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }
    return running(command, f"http://127.0.0.1:{port}", settings | dict(environment or {}), deadline_s)


def completion(prompt: list[int], max_tokens: int = NEW_TOKENS, **options: Any) -> dict[str, Any]:
    """The body of a greedy completion that returns token ids and their log-probabilities."""
    body = {"model": "k31", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    return body | {"logprobs": 0, "return_token_ids": True} | options


def read_answer(response: httpx.Response) -> Answer:
    assert response.status_code == 200, f"{response.status_code}: {response.text}"
    choice = response.json()["choices"][0]
    return Answer(choice["token_ids"], choice["logprobs"]["token_logprobs"])


def read_events(response: httpx.Response) -> list[dict[str, Any]]:
    """The events of a streamed answer."""
    lines = [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]
