"""The engine's process dies under a real server: its clients are told, and the server recovers or leaves."""

from __future__ import annotations

import json
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.subprocess_server import ServerProcess, server_process

TEXT = "/v1/completions"
BODY = {"prompt": "In the beginning", "temperature": 0}
ENDLESS = BODY | {"max_tokens": 100_000, "ignore_eos": True}


def kill_in_mid_stream(server: ServerProcess) -> list[httpx.Response]:
    """The answers to three requests whose worker is killed while all three are generating."""
    with ThreadPoolExecutor(3) as pool:
        bodies: list[dict[str, Any]] = [
            ENDLESS,
            ENDLESS | {"stream": True},
            ENDLESS | {"stream": True, "n": 2},
        ]
        asked = [pool.submit(server.post, TEXT, body) for body in bodies]
        while server.metric("num_requests_running") < 4:
            time.sleep(0.02)
        begun = server.metric("generation_tokens_total")
        while server.metric("generation_tokens_total") < begun + 40:  # ten of each: all streams have begun
            time.sleep(0.02)
        os.kill(server.worker, signal.SIGKILL)
        return [answer.result() for answer in asked]


def check_told(answers: list[httpx.Response]) -> None:
    whole, *streams = answers
    errors = [whole.json()["error"]]
    for stream in streams:
        *begin, last, end = stream.text.split("\n\n")
        assert stream.status_code == 200 and begin and end == "" and "[DONE]" not in stream.text
        errors.append(json.loads(last.removeprefix("data: "))["error"])
    assert whole.status_code == 500
    for error in errors:
        assert "SIGKILL" in error["message"] and (error["type"], error["code"]) == ("server_error", 500)


def test_a_killed_engine_is_replaced_and_its_requests_are_told(tiny_dir: Path) -> None:
    with server_process(tiny_dir) as server:
        before = server.post(TEXT, BODY).json()["choices"]
        check_told(kill_in_mid_stream(server))
        health = httpx.get(f"{server.url}/health")
        refused = server.post(TEXT, BODY)
        for answer in (health, refused):
            assert answer.status_code == 503 and "being restarted" in answer.text
        assert refused.headers["Retry-After"]
        while httpx.get(f"{server.url}/health").status_code == 503:
            time.sleep(0.02)
        assert server.post(TEXT, BODY).json()["choices"] == before
        server.wait_until_idle()
        code, errors = server.stop()
    assert code == 0 and "killed by SIGKILL" in errors and "serves again" in errors
    assert "Traceback" not in errors


def test_told_to_exit_it_leaves_with_an_error_when_the_engine_dies(tiny_dir: Path) -> None:
    with server_process(tiny_dir, "--on-worker-death", "exit") as server:
        check_told(kill_in_mid_stream(server))
        assert server.process.wait(60) == 1
        assert server.process.stderr and "killed by SIGKILL" in server.process.stderr.read()


def test_a_killed_server_leaves_no_engine_behind(random_dir: Path) -> None:
    with server_process(random_dir) as server:
        worker = Path(f"/proc/{server.worker}")
        server.process.kill()
        for _ in range(1000):
            # A process that nobody waits for stays as a zombie.
            if not worker.exists() or (worker / "stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return
            time.sleep(0.01)
    pytest.fail("the engine is still there")
