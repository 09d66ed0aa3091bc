"""`longspan serve` as a process, and what the system says of it and its children."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import httpx

COMMAND = [sys.executable, "-c", "import sys; from longspan.cli import main; sys.exit(main())", "serve"]
_START_SECONDS = 120


@dataclass(frozen=True)
class Usage:
    """What all processes of a server hold together."""

    rss_bytes: int
    files: int
    threads: int
    processes: int


@dataclass
class Server:
    """A server that is up. Its stderr goes to `log`."""

    process: subprocess.Popen[str]
    url: str
    log: IO[str]

    @property
    def pids(self) -> list[int]:
        """The server and all that it started."""
        parents = dict(_parents())
        found = [self.process.pid]
        for pid in found:
            found += [child for child, parent in parents.items() if parent == pid]
        return found

    def usage(self) -> Usage:
        rss = files = threads = processes = 0
        for pid in self.pids:
            with suppress(OSError, KeyError):  # it may end while it is looked at
                status = _status(pid)
                files += len(os.listdir(f"/proc/{pid}/fd"))
                rss += int(status["VmRSS"].split()[0]) * 1024
                threads += int(status["Threads"])
                processes += 1
        return Usage(rss, files, threads, processes)

    def worker(self) -> int | None:
        """The child that computes: the largest one, if there is any of size."""
        sizes = {}
        for pid in self.pids[1:]:
            with suppress(OSError, KeyError):
                sizes[pid] = int(_status(pid)["VmRSS"].split()[0])
        largest = max(sizes, key=lambda pid: sizes[pid], default=None)
        return largest if largest and sizes[largest] > 64 * 1024 else None

    def metrics(self) -> dict[str, float]:
        """{name: value summed over its labels, and name{labels}: value} of /metrics."""
        values: dict[str, float] = {}
        for line in httpx.get(f"{self.url}/metrics", timeout=60).text.splitlines():
            if found := re.match(r"([a-z_]+:?[a-z0-9_:]+)(\{.*\})? (\S+)$", line):
                for name in {found[1], found[1] + (found[2] or "")}:
                    values[name] = values.get(name, 0.0) + float(found[3])
        return values

    def stop(self) -> int:
        """Asks it to stop, as an operator would -> exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)

    def errors(self) -> str:
        self.log.flush()
        return Path(self.log.name).read_text(errors="replace")


def _parents() -> Iterator[tuple[int, int]]:
    for name in os.listdir("/proc"):
        if name.isdigit():
            with suppress(OSError, ValueError, IndexError):
                # The command's name may hold anything but ends at the last parenthesis.
                yield int(name), int(Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[1])


def _status(pid: int) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {key: value.strip() for key, _, value in (line.partition(":") for line in lines)}


@contextmanager
def serving(model: Path, *flags: str) -> Iterator[Server]:
    """Serves `model` on a free port of this machine until the block ends."""
    with tempfile.NamedTemporaryFile("w+", prefix="soak-", suffix=".log") as log:
        command = [*COMMAND, str(model), "--port", "0", *flags]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        try:
            yield Server(process, _url(process, log), log)
        finally:
            children = Server(process, "", log).pids[1:]
            process.kill()
            process.wait()
            for pid in children:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def _url(process: subprocess.Popen[str], log: IO[str]) -> str:
    """Where it listens, by what it prints. Raises RuntimeError if it does not come up."""
    assert process.stdout
    deadline = time.monotonic() + _START_SECONDS
    for line in process.stdout:
        if found := re.search(r"Serving on (http://\S+)", line):
            return found[1]
        if time.monotonic() > deadline:
            break
    raise RuntimeError(f"no server came up: {Path(log.name).read_text()[-2000:]}")
