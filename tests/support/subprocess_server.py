"""`longspan serve` as users run it: a process of its own, a real checkpoint, a real socket."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from openai import OpenAI

COMMAND = [sys.executable, "-c", "import sys; from longspan.cli import main; sys.exit(main())"]


@dataclass
class ServerProcess:
    """A server that is up. `welcome` is what it printed."""

    process: subprocess.Popen[str]
    url: str
    welcome: str

    def client(self, **options: Any) -> OpenAI:
        given = {"base_url": f"{self.url}/v1", "api_key": "none", "max_retries": 0, "timeout": 120} | options
        return OpenAI(**given)

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=120, **options)

    def post_and_leave(self, path: str, body: Any, after: float, missing: int = 0) -> None:
        """Sends a request but for its last `missing` bytes, and hangs up after so many seconds."""
        host, port = self.url.removeprefix("http://").split(":")
        data = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(
                f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data[: len(data) - missing]
            )
            time.sleep(after)

    def metric(self, name: str) -> float:
        text = httpx.get(f"{self.url}/metrics").text
        found = re.search(rf"^vllm:{name}\{{[^}}]*\}} (\S+)$", text, re.MULTILINE)
        assert found, text
        return float(found[1])

    def wait_until_idle(self) -> None:
        """Returns when nothing runs or waits and no page is held; fails if that does not happen."""
        names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        values: list[float] = []
        for _ in range(400):
            values = [self.metric(name) for name in names]
            if values == [0, 0, 0]:
                return
            time.sleep(0.05)
        raise AssertionError(f"still busy: {dict(zip(names, values, strict=True))}")

    @property
    def worker(self) -> int:
        """Process id of the engine's process: the child of the server's."""
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with suppress(OSError):  # it has ended meanwhile
                state, parent = stat.read_text().rpartition(")")[2].split()[:2]
                if int(parent) == self.process.pid and state != "Z":
                    return int(stat.parent.name)
        raise AssertionError("there is none")

    def stop(self, number: int = signal.SIGTERM) -> tuple[int, str]:
        """Sends a signal and waits -> (exit code, what stood on stderr)."""
        self.process.send_signal(number)
        _, errors = self.process.communicate(timeout=60)
        return self.process.returncode, errors


@contextmanager
def server_process(checkpoint: Path, *flags: str) -> Iterator[ServerProcess]:
    """Serves `checkpoint` on a free port until the block ends."""
    # stderr is read at the end only: many lines would fill the pipe and block the server.
    command = [*COMMAND, "serve", str(checkpoint), "--port", "0", "--log-level", "warning", *flags]
    # Small models and a shared machine: more threads would only wait for each other.
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )
    try:
        assert process.stdout
        welcome = ""
        for line in process.stdout:
            welcome += line
            if "curl" in line:
                break
        found = re.search(r"http://\S+:\d+", welcome)
        assert found, f"no server came up: {welcome}{process.communicate()[1]}"
        yield ServerProcess(process, found[0], welcome)
    finally:
        process.kill()
        process.communicate()
