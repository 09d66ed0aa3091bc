"""Scripts as bash runs them, with stubs for servers: what they export, and that nothing outlives them."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longspan.planning.scripts import Command, Script, or_default

TIMEOUT = 20.0  # seconds; nothing here takes one


def servers(folder: Path, *does: str) -> Path:
    """A script of one server for each of these lines of bash, which run after the server has said its pid."""
    commands = []
    for n, line in enumerate(does):
        server = folder / f"server{n}"
        server.write_text(f"#!/usr/bin/env bash\necho $$ > {folder}/{n}.pid.new\n")
        server.write_text(server.read_text() + f"mv {folder}/{n}.pid.new {folder}/{n}.pid\n{line}\n")
        server.chmod(0o755)
        commands.append(Command((str(server),), (("--rank", str(n)),), {"RANK": str(n)}))
    script = folder / "server-0.sh"
    script.write_text(Script(script.name, "server", "Stubs.", tuple(commands)).text())
    return script


def started(folder: Path, count: int) -> list[int]:
    """Process ids of all servers, once they run."""
    end = time.monotonic() + TIMEOUT
    while len(found := list(folder.glob("*.pid"))) < count:
        assert time.monotonic() < end, "a server did not start"
        time.sleep(0.01)
    return [int(file.read_text()) for file in found]


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP], ids=lambda sent: sent.name)
def test_a_script_that_is_told_to_end_takes_its_servers_with_it(
    sent: signal.Signals, count: int, tmp_path: Path
) -> None:
    script = servers(tmp_path, *["exec sleep 60"] * count)
    # A shell that was started with a signal ignored, as jobs in the background are, can't trap it.
    process = subprocess.Popen(["bash", script], preexec_fn=lambda: signal.signal(sent, signal.SIG_DFL))
    pids = started(tmp_path, count)
    process.send_signal(sent)
    assert process.wait(TIMEOUT) in (-sent, 128 + sent)
    assert not any(map(alive, pids))


@pytest.mark.parametrize(
    ("does", "code"),
    [
        (["exit 7"], 7),
        (["exit 7", "exec sleep 60"], 7),
        (["exec sleep 60", "exit 9"], 9),
        (["exit 3"] * 3, 3),
    ],
)
def test_the_end_of_one_server_ends_all_with_its_exit_code(
    does: list[str], code: int, tmp_path: Path
) -> None:
    script = servers(tmp_path, *does)
    assert subprocess.run(["bash", script], timeout=TIMEOUT).returncode == code
    assert not any(map(alive, started(tmp_path, 1)))


@settings(deadline=None)
@given(st.text())
def test_no_line_of_a_comment_is_one_of_the_script(comment: str) -> None:
    command = (Command(("true",), ()),)
    plain, commented = (Script("a.sh", "server", text, command).text() for text in ("", comment))
    lines = [line for line in commented.split("\n") if not line.startswith("#")]
    assert lines == [line for line in plain.split("\n") if not line.startswith("#")]


@settings(max_examples=30, deadline=None)
@given(st.text(st.characters(codec="utf-8", exclude_categories=("Cc", "Cs")), min_size=1))
def test_a_default_arrives_as_it_is_whatever_it_contains(path: str) -> None:
    command = Command(("printf", "%s", "$MODEL_PATH"), ())
    text = Script("a.sh", "server", "", (command,), {"MODEL_PATH": or_default("MODEL_PATH", path)}).text()
    environment = {"PATH": os.environ["PATH"]}
    assert subprocess.run(["bash", "-c", text], env=environment, capture_output=True).stdout == path.encode()
    environment["MODEL_PATH"] = "/own"
    assert subprocess.run(["bash", "-c", text], env=environment, capture_output=True).stdout == b"/own"
