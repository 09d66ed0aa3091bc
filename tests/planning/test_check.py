"""The go-live list: what passes, and every way to fail it."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from support.plan_command import CASE, run

from longspan.errors import ConfigError
from longspan.planning.check import Finding, check_server, check_targets

HOSTS = ",".join(f"10.0.0.{n}" for n in range(1, 9))
METRICS = """\
vllm:num_requests_running 0
vllm:time_to_first_token_seconds_count 0
vllm:kv_cache_usage_perc 0
vllm:prefix_cache_hits_total 0
"""


@pytest.fixture
def launch(tmp_path: Path) -> Path:
    """Scripts of all engines for the eight-node case, with real addresses."""
    assert run(*CASE, "--json", "--hosts", HOSTS, "--output", tmp_path) == 0
    return tmp_path


def findings_of(directory: Path, accuracy: Path | None = None) -> dict[str, Finding]:
    return {finding.point: finding for finding in check_targets([str(directory)], accuracy)}


def edit(directory: Path, pattern: str, change: Callable[[str], str]) -> None:
    for file in directory.glob(pattern):
        file.write_text(change(file.read_text()))


@pytest.mark.parametrize("engine", ["longspan", "vllm-ascend", "sglang"])
def test_fresh_scripts_pass_all_but_what_only_people_and_servers_know(engine: str, launch: Path) -> None:
    findings = findings_of(launch / engine)
    unknown = {point for point, finding in findings.items() if finding.status == "unknown"}
    assert unknown == {"accuracy regression", "health and metrics"}
    assert {f.status for point, f in findings.items() if point not in unknown} == {"pass"}
    assert all(findings[point].remedy for point in unknown)


def test_a_directory_of_engines_is_checked_engine_by_engine(launch: Path) -> None:
    findings = check_targets([str(launch)])
    assert len({finding.where for finding in findings}) == 4  # and the servers nobody named


def test_placeholders_fail(tmp_path: Path) -> None:
    case = ["--hardware", "h200x8", "--nodes", "4", "--topology", "2p2d", "--json"]
    run(*case, "--output", tmp_path)
    finding = findings_of(tmp_path / "sglang")["addresses"]
    assert finding.status == "fail" and "--hosts" in finding.remedy


DCP = "DCP for long contexts"


def drop(flag: str) -> Callable[[str], str]:
    return lambda text: re.sub(rf"^    {flag}.*\n", "", text, flags=re.M)


def put(old: str, new: str) -> Callable[[str], str]:
    def change(text: str) -> str:
        assert old in text
        return text.replace(old, new)

    return change


@pytest.mark.parametrize(
    ("engine", "pattern", "change", "point"),
    [
        ("longspan", "decode-2.sh", drop("--decode-context-parallel-size"), "DCP for long contexts"),
        ("longspan", "decode-2.sh", drop("--decode-context-parallel-size"), "roles"),
        ("sglang", "*-?.sh", drop("--dcp-size"), "DCP for long contexts"),
        ("longspan", "prefill-0.sh", drop("--enable-prefix-caching"), "prefix cache"),
        (
            "vllm-ascend",
            "prefill-0.sh",
            put("--mamba-cache-mode align", "--mamba-cache-mode none"),
            "prefix cache",
        ),
        ("sglang", "decode-0.sh", put("--trust-remote-code", "--disable-radix-cache"), "prefix cache"),
        (
            "sglang",
            "prefill-*.sh",
            put("--chunked-prefill-size", "--chunked-prefill-size -1 --x"),
            "chunked prefill",
        ),
        ("longspan", "decode-0.sh", put("--enable-chunked", "--no-enable-chunked"), "chunked prefill"),
        ("longspan", "prefill-1.sh", put("--role prefill", "--role decode"), "roles"),
        ("longspan", "prefill-1.sh", drop("--role"), "roles"),
        ("vllm-ascend", "prefill-1.sh", put("kv_producer", "kv_consumer"), "roles"),
        ("sglang", "decode-1.sh", put("mode decode", "mode prefill"), "roles"),
        ("longspan", "prefill-1.sh", put("--data-parallel-rank 1", "--data-parallel-rank 0"), "addresses"),
        ("longspan", "decode-0.sh", put("--port 8200", "--port 8100"), "addresses"),
        ("vllm-ascend", "decode-0.sh", put("--port 8201", "--port 8200"), "addresses"),
        ("sglang", "prefill-0.sh", put("8998", "8999"), "addresses"),
        ("longspan", "decode-0.sh", put("--block-size 64", "--block-size 32"), "roles"),
        ("longspan", "decode-*.sh", put("--block-size 64", "--block-size 32"), "roles"),
        ("longspan", "decode-0.sh", drop("--enable-expert-parallel"), "roles"),
        ("vllm-ascend", "decode-0.sh", put("--data-parallel-size 8", "--data-parallel-size 2"), "roles"),
        ("longspan", "decode-0.sh", put("-len 1048576", "-len 4096"), "context"),
        ("sglang", "*-?.sh", put("-length 1048576", "-length 262144"), "context"),
        ("longspan", "*-?.sh", put("context-parallel-size 16", "context-parallel-size 32"), DCP),
        ("longspan", "*-?.sh", put("context-parallel-size 16", "context-parallel-size 0"), DCP),
        ("longspan", "*-?.sh", put("context-parallel-size 16", "context-parallel-size 8"), DCP),
        ("sglang", "*-?.sh", put("--dcp-size 4", "--dcp-size 16"), DCP),
        ("longspan", "prefill-1.sh", put("address 10.0.0.1", "address 10.0.0.9"), "addresses"),
        ("longspan", "workers.json", put("10.0.0.7", "10.0.0.9"), "addresses"),
        ("sglang", "router.sh", put("10.0.0.5", "10.0.0.9"), "addresses"),
        ("vllm-ascend", "router.sh", put("10.0.0.8", "10.0.0.9"), "addresses"),
        ("vllm-ascend", "prefill-0.sh", put("36000", "30000"), "addresses"),
        ("vllm-ascend", "prefill-0.sh", drop("--quantization"), "weights fit the hardware"),
        ("sglang", "*-?.sh", drop("--enable-metrics"), "metrics"),
        ("longspan", "plan.json", put('"k3.1"', '"k4"'), ""),
        ("longspan", "plan.json", put('"w4a8"', '"mxfp4"'), "weights fit the hardware"),
    ],
)
def test_each_point_fails_for_its_own_reason(
    engine: str, pattern: str, change: Callable[[str], str], point: str, launch: Path
) -> None:
    edit(launch / engine, pattern, change)
    findings = findings_of(launch / engine)
    failed = {name for name, finding in findings.items() if finding.status == "fail"}
    if not point:
        assert not failed
        return
    assert point in failed
    assert findings[point].remedy
    assert len(failed) <= 2


def test_flags_are_read_in_all_spellings_that_vllm_takes(launch: Path) -> None:
    def respell(text: str) -> str:
        text = text.replace("--tensor-parallel-size", "-tp").replace("--data-parallel-rank", "-dpn")
        text = re.sub(r"--decode-context-parallel-size (\d+)", r"--decode_context_parallel_size=\1", text)
        return text.replace("--mamba-cache-mode align", "--mamba_cache_mode=align")

    edit(launch / "longspan", "*-?.sh", respell)
    assert not [f for f in findings_of(launch / "longspan").values() if f.status == "fail"]


def test_dcp_may_be_off_where_the_plan_found_that_a_rank_holds_the_context(tmp_path: Path) -> None:
    run("kimi-linear", "--hosts", "10.0.0.1", "--json", "--output", tmp_path)
    finding = findings_of(tmp_path)[DCP]
    assert finding.status == "pass" and "as planned" in finding.found


@pytest.mark.parametrize("context", [1, 64, 2048])
def test_what_a_plan_of_a_short_context_writes_passes(context: int, tmp_path: Path) -> None:
    run("kimi-linear", "--context", context, "--hosts", "10.0.0.1", "--json", "--output", tmp_path)
    assert not [f for f in findings_of(tmp_path).values() if f.status == "fail"]


def test_a_missing_script_fails(launch: Path) -> None:
    (launch / "longspan" / "decode-3.sh").unlink()
    assert findings_of(launch / "longspan")["roles"].found == "3 decode scripts for 4 nodes"


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
        ({"rows": [{"skill": "add", "exact": "99"}]}, "unknown"),
        ({"score": 91.0, "baseline": 92.0, "tolerance": "1"}, "unknown"),
        ({"note": "fine"}, "unknown"),
        ([], "unknown"),
        ("{", "fail"),
    ],
)
def test_accuracy_reports(report: object, status: str, launch: Path) -> None:
    text = report if isinstance(report, str) else json.dumps(report)
    (launch / "longspan" / "accuracy.json").write_text(text)
    assert findings_of(launch / "longspan")["accuracy regression"].status == status
    other = launch / "report.json"
    other.write_text(text)
    assert findings_of(launch / "sglang", other)["accuracy regression"].status == status


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


def test_the_exit_code_says_whether_to_go_live(launch: Path, capsys) -> None:
    with server(GOOD) as url:
        assert run("--check", launch / "longspan", url) == 0
        (launch / "longspan" / "accuracy.json").write_text('{"passed": false}')
        assert run("--check", launch / "longspan", url) == 1
        assert "1 fail" in capsys.readouterr().out
        assert run("--check", url, "--json") == 0
        rows = json.loads(capsys.readouterr().out)
    assert {row["status"] for row in rows} == {"pass"}


def test_what_is_no_launch_directory_is_refused(tmp_path: Path, launch: Path) -> None:
    with pytest.raises(ConfigError, match="is no directory"):
        check_targets([str(tmp_path / "none")])
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(ConfigError, match=r"has no plan\.json"):
        check_targets([str(empty)])
    file = launch / "longspan" / "plan.json"
    plan = json.loads(file.read_text())
    for text in ("{}", "[]", "{", json.dumps(dict.fromkeys(plan)), json.dumps(plan | {"engine": "tgi"})):
        file.write_text(text)
        with pytest.raises(ConfigError, match="it lacks engine"):
            check_targets([str(launch / "longspan")])
    for field in ({"hardware": {}}, {"sides": [{}]}, {"urls": {"a": 1}}):
        file.write_text(json.dumps(plan | field))
        with pytest.raises(ConfigError, match=f"it lacks {next(iter(field))}"):
            check_targets([str(launch / "longspan")])


@pytest.mark.parametrize("target", ["ftp://10.0.0.1", "http://", "http:///v1", "localhost:8000"])
def test_what_is_no_address_is_refused(target: str) -> None:
    with pytest.raises(ConfigError, match="no http:// address"):
        check_targets([target])
