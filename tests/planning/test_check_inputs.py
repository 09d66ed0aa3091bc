"""The go-live list: reports, running servers, and inputs that can't be read."""

from __future__ import annotations

import json
import re
import shutil
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.plan_command import run

from longspan.errors import ConfigError
from longspan.planning.check import check_targets
from longspan.planning.check_server import check_server
from longspan.planning.finding import Finding

METRICS = """\
vllm:num_requests_running 0
vllm:time_to_first_token_seconds_count 0
vllm:kv_cache_usage_perc 0
vllm:prefix_cache_hits_total 0
"""


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Scripts of one node."""
    directory = tmp_path_factory.mktemp("plan")
    assert run("kimi-linear", "--hosts", "10.0.0.1", "--json", "--output", directory) == 0
    return directory / "longspan"


@pytest.fixture
def launch(written: Path, tmp_path: Path) -> Path:
    """A copy of them to spoil."""
    return shutil.copytree(written, tmp_path / "plan")


def accuracy_of(targets: list[str], accuracy: Path | None) -> Finding:
    return next(f for f in check_targets(targets, accuracy) if f.point == "accuracy regression")


@pytest.mark.parametrize(
    ("report", "status"),
    [
        ({"passed": True}, "pass"),
        ({"passed": False}, "fail"),
        ({"score": 92.4, "baseline": 92.0}, "pass"),
        ({"score": 91.0, "baseline": 92.0}, "fail"),
        ({"score": 91.0, "baseline": 92.0, "tolerance": 1}, "pass"),
        ({"rows": [{"skill": "add", "exact": 99.0}, {"skill": "english", "exact": None}]}, "pass"),
        ({"rows": [{"skill": "add", "exact": 99.0}, {"skill": "copy", "exact": 12.0}]}, "fail"),
        ({"rows": []}, "unknown"),
        ({"rows": None}, "unknown"),
        ({"rows": [{"exact": 12.0}]}, "fail"),
        ({"rows": [{"skill": "add", "exact": "99"}]}, "fail"),
        ({"score": 91.0, "baseline": 92.0, "tolerance": "1"}, "fail"),
        ({"note": "fine"}, "unknown"),
        ({"score": 10**400, "baseline": 92.0}, "fail"),
        ({"rows": [{"skill": ["add"], "exact": 99.0}]}, "fail"),
        ({"rows": {"add": 99.0}}, "fail"),
        ({"rows": [99.0]}, "fail"),
        ({"passed": "yes"}, "fail"),
        ([], "fail"),
        ("{", "fail"),
        ("[" * 10000, "fail"),
        (b"\xff", "fail"),
    ],
)
def test_accuracy_reports(report: object, status: str, launch: Path) -> None:
    text = report if isinstance(report, str | bytes) else json.dumps(report)
    text = text if isinstance(text, bytes) else text.encode()
    (launch / "accuracy.json").write_bytes(text)
    assert accuracy_of([str(launch)], None).status == status
    other = launch / "report.json"
    other.write_bytes(text)
    assert accuracy_of([str(launch)], other).status == status


@contextmanager
def server(answers: dict[str, tuple[int, str]]) -> Iterator[str]:
    """Answers GET by path; all else is 404."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, text = answers.get(self.path, (404, ""))
            self.send_response(status)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_: object) -> None:
            pass

    running = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=running.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{running.server_port}"
    finally:
        running.shutdown()
        running.server_close()


def models(length: int | None) -> tuple[int, str]:
    return 200, json.dumps({"data": [{"id": "kimi", "max_model_len": length}]})


GOOD = {"/health": (200, ""), "/v1/models": models(2**20), "/metrics": (200, METRICS)}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, {"health": "pass", "model": "pass", "metrics": "pass"}),
        ({"/health": (503, "")}, {"health": "fail", "model": "pass", "metrics": "pass"}),
        ({"/v1/models": models(4096)}, {"health": "pass", "model": "fail", "metrics": "pass"}),
        ({"/v1/models": models(None)}, {"health": "pass", "model": "unknown", "metrics": "pass"}),
        ({"/v1/models": (200, "no")}, {"health": "pass", "model": "fail", "metrics": "pass"}),
        ({"/metrics": (404, "")}, {"health": "pass", "model": "pass", "metrics": "fail"}),
        (
            {"/v1/models": (200, '{"data": [{"id": 1}]}')},
            {"health": "pass", "model": "fail", "metrics": "pass"},
        ),
        ({"/v1/models": (200, '{"data": []}')}, {"health": "pass", "model": "fail", "metrics": "pass"}),
        ({"/v1/models": (200, "[" * 10000)}, {"health": "pass", "model": "fail", "metrics": "pass"}),
        ({"/metrics": (200, "up 1")}, {"health": "pass", "model": "pass", "metrics": "fail"}),
    ],
)
def test_a_running_server_is_asked(changes: dict, expected: dict[str, str]) -> None:
    with server(GOOD | changes) as url:
        for address in (url, f"{url}/v1", f"{url}/"):
            assert {f.point: f.status for f in check_server(address, 2**20)} == expected


def test_a_server_that_does_not_answer_fails_once() -> None:
    with server(GOOD) as url:
        pass
    assert [(f.point, f.status) for f in check_server(url)] == [("health", "fail")]


@pytest.mark.parametrize(
    "answer", [b"SSH-2.0-OpenSSH_9.2\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nup", b""]
)
def test_what_does_not_speak_http_fails_once(answer: bytes) -> None:
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with listener.accept()[0] as peer:
            peer.recv(1000)
            peer.sendall(answer)

    thread = threading.Thread(target=serve)
    thread.start()
    with listener:
        findings = list(check_server(f"http://127.0.0.1:{listener.getsockname()[1]}"))
        thread.join()
    assert [(f.point, f.status) for f in findings] == [("health", "fail")]
    assert findings[0].found == "what answers does not speak HTTP"


def test_the_exit_code_says_whether_to_go_live(launch: Path, capsys) -> None:
    with server(GOOD) as url:
        assert run("--check", launch, url) == 0
        (launch / "accuracy.json").write_text('{"passed": false}')
        assert run("--check", launch, url) == 1
        assert "1 fail" in capsys.readouterr().out
        assert run("--check", url, "--json") == 0
        rows = json.loads(capsys.readouterr().out)
    assert {row["status"] for row in rows} == {"pass"}


def test_what_is_no_launch_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is no directory"):
        check_targets([str(tmp_path / "none")])
    with pytest.raises(ConfigError, match=r"has no plan\.json"):
        check_targets([str(tmp_path)])


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "[" * 10000, b"\xff\xfe"])
def test_what_is_no_plan_is_refused(text: str | bytes, launch: Path) -> None:
    (launch / "plan.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError, match="is no plan: "):
        check_targets([str(launch)])


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("engine",), "tgi"),
        (("engine",), ["longspan"]),
        (("scheme",), None),
        (("context",), "1M"),
        (("context",), 0),
        (("context",), True),
        (("hardware",), {}),
        (("hardware", "name"), []),
        (("sides",), []),
        (("sides", 0), {}),
        (("sides", 0, "role"), "both"),
        (("sides", 0, "nodes"), "4"),
        (("sides", 0, "fits"), []),
        (("sides", 0, "split"), []),
        (("sides", 0, "split", "tensor"), 1.5),
        (("sides", 0, "nodes"), 2),
        (("urls",), []),
        (("urls",), {}),
        (("urls",), {"x": ["http://10.0.0.1:8000"]}),
        (("urls",), {"server-0.sh": [3]}),
        (("urls",), {"server-0.sh": 1}),
        (("urls",), {"server-0.sh": ["10.0.0.1:8000"]}),
    ],
    ids=str,
)
def test_a_field_of_a_plan_of_another_type_is_named(place: tuple, value: object, launch: Path) -> None:
    plan = json.loads((launch / "plan.json").read_text())
    *parents, last = place
    parent = plan
    for key in parents:
        parent = parent[key]
    parent[last] = value
    (launch / "plan.json").write_text(json.dumps(plan))
    name = "sides" if value == 2 else ".".join(map(str, place))
    with pytest.raises(ConfigError, match=re.escape(name)) as caught:
        check_targets([str(launch)])
    assert "\n" not in str(caught.value) and "--output" in caught.value.remedy


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=4), inner, max_size=2),
    max_leaves=4,
)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_whatever_a_field_of_a_plan_holds_it_is_checked_or_refused(
    written: Path, data: st.DataObject
) -> None:
    plan = json.loads((written / "plan.json").read_text())
    plan[data.draw(st.sampled_from(sorted(plan)))] = data.draw(ANYTHING)
    with TemporaryDirectory() as directory:
        Path(directory, "plan.json").write_text(json.dumps(plan))
        try:
            findings = check_targets([directory])
        except ConfigError as error:
            assert error.remedy and "is no plan" in str(error)
        else:
            assert "server-0.sh is missing" in {f.found for f in findings}


@pytest.mark.parametrize("name", ["server-0.sh", "router.sh"])
def test_a_script_that_is_not_utf8_is_refused(name: str, launch: Path) -> None:
    (launch / name).write_bytes(b"exec vllm \xff --port 8000")
    with pytest.raises(ConfigError, match=f"{name} is not UTF-8"):
        check_targets([str(launch)])


@pytest.mark.parametrize("target", ["http://127.0.0.1:abc", "http://[::1:80", "http://:80", "http://a:99999"])
def test_addresses_whose_port_or_host_can_not_be_read_are_refused(target: str) -> None:
    with pytest.raises(ConfigError, match="is no address"):
        check_targets([target])


@pytest.mark.parametrize("target", ["ftp://10.0.0.1", "http://", "http:///v1", "localhost:8000"])
def test_what_is_no_address_is_refused(target: str) -> None:
    with pytest.raises(ConfigError, match="no http:// address"):
        check_targets([target])
