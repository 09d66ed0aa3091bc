"""A rank dies in the middle of a request: the client is told, nothing wrong is said, nothing stays behind."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import httpx
import pytest
from support.cluster_cases import make_prompts
from support.cluster_servers import SMALL, Running, completion, vllm_server

PORT = 18611
LIMIT_S = 60
BROKEN_OFF = "the connection ended"


@pytest.mark.parametrize("flags", [(), ("--decode-context-parallel-size", "2")], ids=["TP 2", "DCP 2"])
def test_its_requests_end_with_an_error_and_the_server_ends(chatting, flags: tuple[str, ...]) -> None:
    prompt = make_prompts(40)[0]
    flags = (*SMALL, "--tensor-parallel-size", "2", *flags)
    with vllm_server(chatting, PORT, *flags, cores=(0, 1)) as server:
        victim = ranks_of(server)[1]
        seen: list[str] = []
        reader = threading.Thread(target=stream, args=(server, prompt, seen))
        reader.start()
        until = time.monotonic() + LIMIT_S
        while len(seen) < 3:
            assert time.monotonic() < until, "no answer began"
            time.sleep(0.01)
        os.kill(victim, signal.SIGKILL)
        reader.join(LIMIT_S)
        assert not reader.is_alive(), "the client hangs"
        assert any('"error"' in event or event == BROKEN_OFF for event in seen[-2:]), seen[-2:]
        assert not any('"finish_reason":"' in event for event in seen), "a cut answer looks whole"
        assert server.process.wait(LIMIT_S) is not None, "the server goes on without a rank"
        assert not still_running(server), "processes stay behind"


def stream(server: Running, prompt: list[int], seen: list[str]) -> None:
    """The events of a long answer, and how it ended if it was cut off."""
    body = completion(prompt, 900, stream=True)
    try:
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=LIMIT_S) as response:
            seen.extend(line.removeprefix("data: ") for line in response.iter_lines() if line)
    except httpx.TransportError:
        seen.append(BROKEN_OFF)


def ranks_of(server: Running) -> list[int]:
    """Process ids of the workers, by rank."""
    names = {pid: Path(f"/proc/{pid}/comm").read_text() for pid in group_of(server)}
    return [pid for pid, name in sorted(names.items(), key=lambda item: item[1]) if "Worker" in name]


def group_of(server: Running) -> list[int]:
    """The processes of the server's process group that still run."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[2]) == server.process.pid and fields[0] != "Z":
                found.append(int(entry.name))
    return found


def still_running(server: Running) -> list[int]:
    """What of the server is left, after a while to end in."""
    until = time.monotonic() + 15
    while (left := group_of(server)) and time.monotonic() < until:
        time.sleep(0.2)
    return left
