"""`longspan top` on the scripted server, on what vLLM's server says, and on what is neither."""

from __future__ import annotations

import io
import json
import os
import pty
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from math import inf
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from support.scripted import ROOT, Reciter, Running, ScriptedModel, running_server
from support.subprocess_server import COMMAND

from longspan.chat import Tokenizer
from longspan.cli import main
from longspan.engine.stats import EngineStats, MemoryUse
from longspan.errors import LongspanError
from longspan.serve.metrics import Metrics
from longspan.top.figures import GENERATED, History, compare, quantile
from longspan.top.scrape import Snapshot, Source, parse
from longspan.top.view import bar, duration, frame, number, percent, size, sparks

TEXT = "/v1/completions"

# As vLLM writes them, for two engines of one server.
VLLM = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="qwen"} 3.0
vllm:num_requests_running{engine="1",model_name="qwen"} 1.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="qwen"} 2.0
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="qwen"} 0.25
# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total{engine="0",model_name="qwen"} 100.0
vllm:generation_tokens_total{engine="1",model_name="qwen"} 50.0
# TYPE vllm:generation_tokens_created gauge
vllm:generation_tokens_created{engine="0",model_name="qwen"} 1.7e+09
# TYPE vllm:request_success_total counter
vllm:request_success_total{engine="0",finished_reason="stop",model_name="qwen"} 7.0
vllm:request_success_total{engine="0",finished_reason="abort",model_name="qwen"} 0.0
# TYPE vllm:time_to_first_token_seconds histogram
vllm:time_to_first_token_seconds_bucket{engine="0",le="0.1",model_name="qwen"} 4.0
vllm:time_to_first_token_seconds_bucket{engine="0",le="0.2",model_name="qwen"} 8.0
vllm:time_to_first_token_seconds_bucket{engine="0",le="+Inf",model_name="qwen"} 8.0
vllm:time_to_first_token_seconds_count{engine="0",model_name="qwen"} 8.0
vllm:time_to_first_token_seconds_sum{engine="0",model_name="qwen"} 1.0
"""


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    tokenizer = Tokenizer.from_dir(ROOT / "models/k31-tiny")
    with running_server(ScriptedModel(tokenizer, Reciter(tokenizer)), tokenizer) as running:
        running.say("Fine words.")
        yield running


class Answering(HTTPServer):
    """Answers every request with the status and text that it has just now; keeps the headers that came."""

    def __init__(self, text: str = VLLM, status: int = 200) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.text, self.status = text, status
        self.paths: list[str] = []
        self.keys: list[str | None] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: Answering

    def do_GET(self) -> None:
        self.server.paths.append(self.path)
        self.server.keys.append(self.headers.get("Authorization"))
        self.send_response(self.server.status)
        self.end_headers()
        self.wfile.write(self.server.text.encode())

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def answering(text: str = VLLM, status: int = 200) -> Iterator[Answering]:
    with Answering(text, status) as found:
        thread = threading.Thread(target=found.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield found
        finally:
            found.shutdown()
            thread.join()


def drawn(snapshots: list[Snapshot], trouble: str = "") -> str:
    """The frame as plain text."""
    history = History(10)
    for snapshot in snapshots:
        history.add(snapshot)
    stream = io.StringIO()
    console = Console(file=stream, width=80, force_terminal=False)
    console.print(frame("http://x", history.figures(), history.rates(GENERATED), trouble))
    return stream.getvalue()


def test_once_tells_what_was_served_in_between(
    server: Running, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = {"prompt": [1, 2, 3], "n": 2, "max_tokens": 4, "ignore_eos": True}
    monkeypatch.setattr("longspan.top.command.time.sleep", lambda _: server.post(TEXT, asked))
    assert main(["top", server.url, "--once", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    seconds = found["seconds"]
    assert found["url"] == server.url and found["models"] == ["tiny"]
    assert (found["running"], found["waiting"], found["swapped"], found["cache_usage"]) == (0, 0, 0, 0)
    for name, count in (("generation_tokens", 8), ("prompt_tokens", 6), ("requests", 2), ("preemptions", 0)):
        assert found[f"{name}_per_second"] * seconds == pytest.approx(count), name
    assert found["latency"].keys() == {"ttft", "itl", "queue", "e2e"}
    for values in found["latency"].values():
        assert 0 <= values["p50"] <= values["p90"] <= values["p99"]
    assert found["totals"]["requests"] == {"length": 2}
    assert main(["top", server.url.removeprefix("http://"), "--once"]) == 0
    shown = capsys.readouterr().out
    assert "tiny" in shown and "tokens/s" in shown and "first token" in shown and "\x1b" not in shown


def test_a_server_of_vllm_is_shown_without_what_it_does_not_say() -> None:
    old = replace(parse(VLLM), taken=10.0)
    text = VLLM.replace("} 100.0", "} 180.0").replace(
        '"0.2",model_name="qwen"} 8.0', '"0.2",model_name="qwen"} 18.0'
    )
    new = replace(
        parse(text.replace('+Inf",model_name="qwen"} 8.0', '+Inf",model_name="qwen"} 18.0')), taken=14.0
    )
    found = compare(old, new).as_json("http://x")
    assert found == {
        "url": "http://x",
        "models": ["qwen"],
        "seconds": 4.0,
        "running": 4,
        "waiting": 2,
        "cache_usage": 0.25,
        "generation_tokens_per_second": 20,
        "requests_per_second": 0,
        "latency": {
            "ttft": {"p50": pytest.approx(0.15), "p90": pytest.approx(0.19), "p99": pytest.approx(0.199)}
        },
        "totals": {"generation_tokens": 230, "requests": {"stop": 7}, "rejected": {}},
    }
    shown = drawn([old, new])
    assert "25% held by requests" in shown and "20 tokens/s" in shown
    assert not any(word in shown for word in ("swapped", "prompts", "host pool", "steps", "None", "nan"))


def test_all_that_our_server_says_is_shown() -> None:
    memory = MemoryUse(
        1000 * 2**20, 400 * 2**20, 300 * 2**20, 200 * 2**20, 50 * 2**20, 64 * 2**20, 256 * 2**20
    )
    before = EngineStats(memory=memory)
    after = replace(
        before,
        num_running=5,
        num_waiting=4,
        num_swapped=3,
        num_preemptions=8,
        num_swaps=6,
        num_evictions=2,
        generation_tokens=1234,
        prompt_tokens=5000,
        prefix_queries=5000,
        prefix_hits=2500,
        num_steps=100,
        step_tokens=(100, *before.step_tokens[1:]),
        num_step_tokens=3734,
        step_seconds=1.0,
        model_seconds=0.955,
    )
    stats = before
    metrics = Metrics("tiny", lambda: stats, {})
    old = replace(parse(metrics.render().decode()), taken=0.0)
    stats = after
    new = replace(parse(metrics.render().decode()), taken=2.0)
    shown = drawn([old, new])
    for words in (
        "617 tokens/s",
        "2,500 tokens/s   50% from the prefix cache",
        "5 running, 4 waiting, 3 swapped",
        "50/s, 37.3 tokens each, 95.5% of their time in the model",
        "4 preemptions/s, 3 swaps/s, 1 evictions/s",
        "of 1000.0 MiB",
        "█" * 16 + "▓" * 12 + "▒" * 8 + "░" * 2 + "·" * 2,
        "█ pages running 40%  ▓ pages cached 30%",
        "▒ states running 20%  ░ states cached 5%  · free 5%",
        "64.0 MiB of 256.0 MiB",
        "8 preemptions, 6 swaps, 2 evictions",
    ):
        assert words in shown, shown


def test_a_restart_forgets_what_came_before() -> None:
    history = History(10)
    for taken, tokens in ((0.0, "900.0"), (1.0, "1000.0"), (2.0, "10.0"), (3.0, "40.0")):
        history.add(replace(parse(VLLM.replace("} 100.0", f"}} {tokens}")), taken=taken))
    assert history.figures().rates["generation_tokens"] == 30
    assert history.rates(GENERATED) == [30]


@given(gaps=st.lists(st.floats(0.1, 7), min_size=1, max_size=30), window=st.floats(0.5, 20))
def test_the_window_is_the_shortest_that_is_long_enough(gaps: list[float], window: float) -> None:
    history, times = History(window), [0.0]
    for gap in gaps:
        times.append(times[-1] + gap)
    for taken in times:
        history.add(Snapshot({}, taken))
    enough = [times[-1] - taken for taken in times[:-1] if times[-1] - taken >= window]
    assert history.figures().seconds == pytest.approx(min(enough, default=times[-1]))


def histogram(values: list[float], bounds: list[float]) -> dict[float, float]:
    return {bound: float(sum(value <= bound for value in values)) for bound in [*bounds, inf]}


@given(
    earlier=st.lists(st.floats(0, 12), max_size=20),
    values=st.lists(st.floats(0, 12), min_size=1, max_size=50),
    bounds=st.lists(st.floats(0.1, 10), max_size=8, unique=True).map(sorted),
    share=st.floats(0.01, 1),
)
def test_a_quantile_is_in_the_bucket_of_the_true_one(
    earlier: list[float], values: list[float], bounds: list[float], share: float
) -> None:
    old, new = histogram(earlier, bounds), histogram([*earlier, *values], bounds)
    found = quantile(share, old, new)
    assert found is not None
    rank = share * len(values)
    true = next(value for i, value in enumerate(sorted(values), 1) if i >= rank - 1e-9)
    lower = max([bound for bound in bounds if bound < true], default=0.0)
    upper = min([bound for bound in bounds if bound >= true], default=lower)
    assert lower - 1e-9 <= found <= upper + 1e-9
    assert found <= (quantile(1.0, old, new) or 0) + 1e-9


@given(
    values=st.lists(st.floats(0, 12), max_size=20),
    bounds=st.lists(st.floats(0.1, 10), max_size=4, unique=True),
)
def test_nothing_new_has_no_quantile(values: list[float], bounds: list[float]) -> None:
    counts = histogram(values, sorted(bounds))
    assert quantile(0.5, counts, counts) is None
    assert quantile(0.5, counts, {}) is None


@pytest.mark.parametrize(
    ("status", "text", "says"),
    [
        (401, "", "--api-key"),
        (403, "", "--api-key"),
        (404, "", "has no /metrics"),
        (503, "", "HTTP 503"),
        (200, "", "no metrics of Longspan or vLLM"),
        (200, "<html>", "no metrics of Longspan or vLLM"),
        (200, "up 1\n", "no metrics of Longspan or vLLM"),
        (200, 'vllm:num_requests_running{a="} 1', "no metrics of Longspan or vLLM"),
        (200, "vllm:num_requests_running one", "no metrics of Longspan or vLLM"),
    ],
)
def test_what_is_no_such_server_is_told_in_a_line(
    status: int, text: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with answering(text, status) as other:
        assert main(["top", other.url]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("longspan top: ") and says in captured.err
    assert captured.err.count("\n") == 1 and captured.out == ""


@given(text=st.text(max_size=200))
def test_any_answer_is_metrics_or_is_refused(text: str) -> None:
    with pytest.raises(LongspanError):
        parse(text)
    try:
        snapshot = parse(VLLM + text)
    except LongspanError:
        return
    assert snapshot.value("vllm:num_requests_waiting") is not None


def test_nothing_at_all_answers(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:  # a port on which nobody listens
        taken.bind(("127.0.0.1", 0))
        assert main(["top", f"127.0.0.1:{taken.getsockname()[1]}", "--once"]) == 2
    assert "Nothing answers at http://127.0.0.1:" in capsys.readouterr().err


@pytest.mark.parametrize(
    "url", ["", "ftp://x", "http://", "http://x:port", "http://x:99999", "a b", "http://x\n"]
)
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(LongspanError, match="is no address"):
        Source(url)


@pytest.mark.parametrize("ending", ["", "/", "/v1", "/v1/", "/metrics"])
def test_the_address_may_be_that_of_the_api(ending: str) -> None:
    with answering() as other:
        source = Source(other.url + ending, api_key="s3cret")
        assert source.read().value("vllm:num_requests_running") == 4
        assert (other.paths, other.keys) == (["/metrics"], ["Bearer s3cret"])
        Source(other.url).read()
        assert other.keys[-1] is None


@pytest.mark.parametrize("flags", [["--interval", "0"], ["--window", "nan"], ["--interval", "1e9"]])
def test_times_have_limits(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", *flags]) == 2
    assert flags[0] in capsys.readouterr().err


def test_a_pipe_gets_frame_after_frame_until_the_server_has_gone() -> None:
    with answering() as other:
        command = [*COMMAND, "top", other.url, "--json", "--interval", "0.05"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert process.stdout
        frames = [json.loads(process.stdout.readline()) for _ in range(3)]
        assert [found["running"] for found in frames] == [4, 4, 4]
        other.status = 503
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 2 and "HTTP 503" in errors


def test_it_does_not_wait_for_torch() -> None:
    program = (
        "import sys; from longspan.cli import main; main(sys.argv[1:]); sys.exit('torch' in sys.modules)"
    )
    with answering() as other:
        command = [sys.executable, "-c", program, "top", other.url, "--once", "--interval", "0.05"]
        assert subprocess.run(command, capture_output=True, timeout=120, check=False).returncode == 0


@pytest.mark.parametrize("key", [b"q", b"\x03"])
def test_on_a_terminal_it_lives_through_trouble_and_leaves_when_asked(key: bytes) -> None:
    keyboard, terminal = pty.openpty()
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "100", "LINES": "30"}
    with answering() as other:
        process = subprocess.Popen(
            [*COMMAND, "top", other.url, "--interval", "0.05"],
            stdin=terminal,
            stdout=terminal,
            stderr=terminal,
            env=environment,
            start_new_session=True,
            preexec_fn=lambda: _take(terminal),
        )
        os.close(terminal)
        shown = b""

        def until(words: bytes) -> None:
            nonlocal shown
            shown = b""
            while words not in shown:
                shown += os.read(keyboard, 4096)

        until(b"4 running")
        other.status = 503
        until(b"HTTP 503")
        other.status = 200
        other.text = VLLM.replace("} 3.0", "} 8.0")
        until(b"9 running")
        os.write(keyboard, key)
        while process.poll() is None:
            _drain(keyboard)
        os.close(keyboard)
    assert process.returncode == 0


def _take(terminal: int) -> None:
    """Makes it the controlling terminal, so that Ctrl-C becomes a signal."""
    import fcntl
    import termios

    fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)


def _drain(keyboard: int) -> None:
    """Reads what is there: a process that ends waits for its terminal to take its last words."""
    import select

    if select.select([keyboard], [], [], 0.05)[0]:
        try:
            os.read(keyboard, 4096)
        except OSError:  # Linux' way to say that the other side is closed
            return


def test_numbers_sizes_and_times_are_short() -> None:
    assert [number(x) for x in (0, 3, 0.123, 9.876, 45.67, 789.4, 12345.6)] == [
        "0", "3", "0.12", "9.88", "45.7", "789", "12,346",
    ]  # fmt: skip
    assert [size(x) for x in (0, 1023, 1536, 3 * 2**30, 5 * 2**50)] == [
        "0 B", "1023 B", "1.5 KiB", "3.0 GiB", "5120.0 TiB",
    ]  # fmt: skip
    assert [duration(x) for x in (0.00123, 0.05, 1.5, 75)] == ["1.23 ms", "50 ms", "1.50 s", "75 s"]
    assert [percent(x) for x in (0, 0.001, 0.01, 0.5, 1)] == ["0%", "<1%", "1%", "50%", "100%"]
    assert (sparks([]), sparks([0, 0]), sparks([0, 1, 2])) == ("", "", "▁▅█")


@given(shares=st.lists(st.floats(0, 1), max_size=6))
def test_a_bar_is_as_long_as_its_shares(shares: list[float]) -> None:
    strip = bar([(share, "x", "red") for share in shares])
    assert len(strip) == min(round(sum(shares) * 40), 40)
