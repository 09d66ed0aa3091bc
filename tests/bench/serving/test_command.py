"""`longspan bench serve` against a server that does as it is told, and against ours."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.fake_openai import ID_BASE, FakeServer, event, fake_server, said
from support.scripted import ROOT, Reciter, ScriptedModel, running_server

from longspan.bench.serving.metrics import LATENCIES
from longspan.chat import Tokenizer
from longspan.cli import main

SMALL = ["--num-prompts=3", "--random-input-len=12", "--random-output-len=4", "--warmup=0"]


@pytest.fixture
def fake() -> Iterator[FakeServer]:
    with fake_server() as server:
        yield server


def measure(url: str, tmp_path: Path, *flags: str) -> dict[str, Any]:
    """The JSON of a run that had answers."""
    file = tmp_path / "out.json"
    assert main(["bench", "serve", url, *SMALL, *flags, "--json", str(file)]) == 0
    return json.loads(file.read_text())


def test_one_point_has_a_table_and_json_with_settings_and_records(
    fake: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = measure(fake.url, tmp_path, "--ignore-eos", "--api-key=secret", "--metric-percentiles=50,99.9")
    shown = capsys.readouterr().out
    assert f"fake at {fake.url}/v1/completions" in shown and "3 of 3 done" in shown
    rows = [line.split()[0] for line in shown.splitlines() if line.startswith(("T", "I", "E"))]
    assert list(dict.fromkeys(rows)) == ["TTFT", "TPOT", "ITL", "E2EL"]  # TTFT twice if the client was late
    assert "p99.9" in shown and "secret" not in json.dumps(report)
    assert report["settings"]["ignore_eos"] and report["settings"]["request_rate"] == ["inf"]
    assert (report["model"], report["endpoint"]) == ("fake", "/v1/completions")

    (point,) = report["points"]
    assert point["requests"] == {"planned": 3, "completed": 3, "errors": {}}
    assert point["tokens"] == {"prompt": 36, "output": 12}
    assert math.isclose(point["output_tokens_per_second"], 12 / point["duration"])
    assert math.isclose(point["total_tokens_per_second"], 48 / point["duration"])
    assert set(point["latencies"]) == set(LATENCIES)
    assert {"count", "mean", "median", "p50", "p99.9"} <= set(point["latencies"]["ttft"])
    assert point["cache_hit_rate"] == {"usage": None, "server": None} and point["goodput"] is None
    for record in point["records"]:
        times = [record["scheduled"], record["sent"], *record["chunks"], record["ended"]]
        assert times == sorted(times) and len(record["chunks"]) == 4
        assert (record["prompt_tokens"], record["output_tokens"], record["error"]) == (12, 4, None)
    assert {headers["authorization"] for headers in fake.headers} == {"Bearer secret"}


def test_prompts_are_ids_of_exact_length_where_the_server_tokenizes(fake: FakeServer, tmp_path: Path) -> None:
    measure(fake.url, tmp_path)
    prompts = [body["prompt"] for body in fake.bodies]
    assert [len(prompt) for prompt in prompts] == [12] * 3
    assert all(ID_BASE <= token < ID_BASE + 1000 for prompt in prompts for token in prompt)
    assert {(body["model"], body["max_tokens"], body["stream"]) for body in fake.bodies} == {
        ("fake", 4, True)
    }
    assert all("ignore_eos" not in body for body in fake.bodies)


@pytest.mark.parametrize("endpoint", ["/v1/completions", "/v1/chat/completions"])
def test_prompts_are_words_that_come_to_the_length_where_it_does_not(
    endpoint: str, fake: FakeServer, tmp_path: Path
) -> None:
    fake.tokenizes = False
    flags = "--endpoint", endpoint, "--random-input-len=100"
    (point,) = measure(fake.url, tmp_path, *flags)["points"]
    assert [record["prompt_tokens"] for record in point["records"]] == [100] * 3


def test_a_conversation_grows_by_its_real_answers(fake: FakeServer, tmp_path: Path) -> None:
    fake.stream = lambda body: said(["so", " it", " is"], 1)
    flags = "--multi-turn=3", "--max-concurrency=1", "--num-prompts=1", "--endpoint=/v1/chat/completions"
    (point,) = measure(fake.url, tmp_path, *flags)["points"]
    assert point["requests"]["planned"] == point["requests"]["completed"] == 3
    last = fake.bodies[-1]["messages"]
    assert [message["role"] for message in last] == ["user", "assistant"] * 2 + ["user"]
    assert [message["content"] for message in last[1::2]] == ["so it is"] * 2
    assert last[:-2] == fake.bodies[-2]["messages"]


def test_a_sweep_has_a_point_for_every_rate_with_every_limit(
    fake: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "sweep.png"
    flags = "--request-rate=200,inf", "--max-concurrency=1,2", "--goodput", "ttft:60000", "tpot:60000"
    report = measure(fake.url, tmp_path, *flags, "--plot", str(picture))
    loads = [(point["request_rate"], point["max_concurrency"]) for point in report["points"]]
    assert loads == [(200, 1), (200, 2), (None, 1), (None, 2)]
    assert all(math.isclose(p["goodput"], p["requests_per_second"]) for p in report["points"])
    shown = capsys.readouterr().out
    assert [line.split("  ")[0] for line in shown.splitlines() if " 3/3 " in line] == [
        "200/s, max 1", "200/s, max 2", "1 user", "2 users"]  # fmt: skip
    prompts = [tuple(body["prompt"]) for body in fake.bodies]
    assert len(set(prompts)) == len(prompts) == 12, "no point finds the prompts of another"
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_trace_is_replayed(fake: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": 30 * i, "input_length": 600, "output_length": 2, "hash_ids": [7, i]} for i in range(3)
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    flags = "--dataset-name=trace", "--dataset-path", str(path), "--speed=3", "--trace-length-scale=0.5"
    (point,) = measure(fake.url, tmp_path, *flags)["points"]
    assert sorted(round(record["scheduled"], 9) for record in point["records"]) == [0, 0.01, 0.02]
    assert {tuple(body["prompt"][:256]) for body in fake.bodies} == {tuple(fake.bodies[0]["prompt"][:256])}
    assert [len(body["prompt"]) for body in fake.bodies] == [300] * 3
    assert "trace.jsonl: 3 requests, 3 x as fast, lengths x 0.5" in capsys.readouterr().out


def test_hits_come_from_usage_and_from_the_counters_of_the_server(
    fake: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scrapes = iter([(100, 10), (136, 28)])

    def metrics() -> str:
        queries, hits = next(scrapes)
        return (
            "# TYPE vllm:prefix_cache_queries_total counter\n"
            f'vllm:prefix_cache_queries_total{{engine="0"}} {queries}\n'
            "# TYPE vllm:prefix_cache_hits_total counter\n"
            f'vllm:prefix_cache_hits_total{{engine="0"}} {hits}\n'
            "# TYPE other_total counter\nother_total 5\n"
        )

    fake.metrics = metrics
    fake.stream = lambda body: said(["x"], 12, cached=9)
    (point,) = measure(fake.url, tmp_path)["points"]
    assert point["cache_hit_rate"] == {"usage": 0.75, "server": 0.5}
    assert point["server_counters"] == {
        "vllm:prefix_cache_queries_total": 36,
        "vllm:prefix_cache_hits_total": 18,
    }
    assert "prefix cache: 75.0% of prompt tokens" in capsys.readouterr().out


def test_failures_are_counted_by_kind_and_the_rest_is_measured(
    fake: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refusal(body: dict[str, Any]) -> tuple[int, Any] | None:
        return (429, {"error": {"message": "queue is full"}}) if len(fake.bodies) == 2 else None

    fake.refusal = refusal
    (point,) = measure(fake.url, tmp_path, "--max-concurrency=1")["points"]
    assert point["requests"] == {"planned": 3, "completed": 2, "errors": {"HTTP 429": 1}}
    (failed,) = (record for record in point["records"] if record["error"])
    assert failed["message"] == "HTTP 429: queue is full"
    shown = capsys.readouterr().out
    assert "2 of 3 done" in shown and "1 HTTP 429" in shown and "queue is full" in shown


@pytest.mark.parametrize(
    ("writes", "kind"),
    [
        ([event({"choices": [{"text": "x"}]}), event({"error": {"message": "died"}})], "error in the stream"),
        ([event({"choices": [{"text": "x"}]})], "cut off"),
        ([b"<html>\n\n"], "cut off"),
        ([b"data: <html>\n\n"], "not JSON"),
    ],
)
def test_a_server_that_answers_nothing_gives_exit_code_1(
    writes: list[bytes], kind: str, fake: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.stream = lambda body: writes
    assert main(["bench", "serve", fake.url, *SMALL]) == 1
    assert f"3 {kind}" in capsys.readouterr().out


def test_a_connection_lost_in_mid_answer_is_a_failure(
    fake: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.hangs_up = True
    fake.stream = lambda body: [event({"choices": [{"text": "x"}]})]
    assert main(["bench", "serve", fake.url, *SMALL]) == 1
    assert "3 connection lost" in capsys.readouterr().out


def test_bytes_cut_anywhere_and_events_together_give_the_same_counts(
    fake: FakeServer, tmp_path: Path
) -> None:
    whole = b"".join(said(["a", "b", "c"], 12))
    for writes in ([whole], [whole[i : i + 1] for i in range(len(whole))]):
        fake.stream = lambda body, writes=writes: writes
        (point,) = measure(fake.url, tmp_path, "--num-prompts=1")["points"]
        (record,) = point["records"]
        assert (len(record["chunks"]), record["output_tokens"], record["finish_reason"]) == (3, 3, "length")


def test_without_usage_chunks_are_counted_and_that_is_said(
    fake: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.stream = lambda body: [*said(["a", "b"], 1)[:3], event(b"[DONE]")]
    (point,) = measure(fake.url, tmp_path)["points"]
    assert point["tokens"]["output"] == 6
    assert "sends no usage" in capsys.readouterr().out


def test_a_warm_up_that_fails_ends_the_run_with_the_words_of_the_server(
    fake: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.refusal = lambda body: (400, {"error": {"message": "Unknown field `ignore_eos`."}})
    assert main(["bench", "serve", fake.url, "--ignore-eos", "--num-prompts", "3"]) == 2
    assert "Unknown field `ignore_eos`" in capsys.readouterr().err
    assert len(fake.bodies) == 1


@pytest.mark.parametrize("where", ["{url}/v1", "--base-url={url}", "--base-url={url}/v1/", "--port={port}"])
def test_the_server_can_be_named_in_all_usual_ways(where: str, fake: FakeServer) -> None:
    flag = where.format(url=fake.url, port=fake.url.rsplit(":")[-1])
    assert main(["bench", "serve", *SMALL, flag, "--model", "other", "--extra-body", '{"top_k": 1}']) == 0
    assert {(body["model"], body["top_k"]) for body in fake.bodies} == {("other", 1)}


def test_a_model_must_be_named_where_the_server_names_none(
    fake: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "serve", fake.url, *SMALL, "--model", "none"]) == 2
    assert "fake, other" in capsys.readouterr().err
    fake.models = None
    assert main(["bench", "serve", fake.url, *SMALL]) == 2
    assert "--model" in capsys.readouterr().err
    assert main(["bench", "serve", fake.url, *SMALL, "--model", "any"]) == 0


def test_lengths_beyond_the_context_are_refused_before_any_request(
    fake: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--random-input-len=2000", "--random-output-len=50", "--random-prefix-len=2047"]
    assert main(["bench", "serve", fake.url, *flags]) == 2
    shown = capsys.readouterr().err
    assert "4097" in shown and "4096" in shown and fake.bodies == []


@pytest.mark.parametrize("url", ["http://127.0.0.1:9", "127.0.0.1:9"])
def test_a_server_that_is_not_there_is_told_in_a_line(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "serve", url, *SMALL]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("longspan bench serve: http://127.0.0.1:9 can't be reached")
    assert "Traceback" not in shown


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--base-url", "http://x"], "--base-url"),
        (["--dataset-name", "trace"], "--dataset-path"),
        (["--dataset-path", "x"], "--dataset-name"),
        (["--dataset-name=trace", "--dataset-path=x", "--multi-turn=2"], "--multi-turn"),
        (["--dataset-name=trace", "--dataset-path=x", "--request-rate=2"], "--speed"),
        (["--dataset-name=trace", "--dataset-path=/nowhere/x"], "/nowhere/x"),
        (["--json", "/nowhere/out.json"], "/nowhere"),
    ],
)
def test_what_makes_no_sense_is_refused_before_the_server_is_asked(
    flags: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "serve", "http://127.0.0.1:9", *flags]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    "flag",
    ["--num-prompts=0", "--request-rate=0", "--request-rate=1,x", "--burstiness=nan", "--max-concurrency=",
     "--random-range-ratio=1", "--goodput=ttft", "--goodput=itl:3", "--goodput=ttft:0", "--seed=-1",
     "--percentile-metrics=ttfb", "--metric-percentiles=101", "--extra-body=[]",
     '--extra-body={"stream":false}', '--extra-body={"n":2}', "--speed=inf", "--timeout=0",
     "--endpoint=/v1/x"],
)  # fmt: skip
def test_what_is_no_value_of_a_flag_is_refused_with_the_usage(
    flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["bench", "serve", flag])
    assert flag.split("=")[0] in capsys.readouterr().err


def test_without_aiohttp_it_says_how_to_get_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    assert main(["bench", "serve"]) == 2
    assert "pip install 'longspan[bench]'" in capsys.readouterr().err


@pytest.mark.parametrize("endpoint", ["/v1/completions", "/v1/chat/completions"])
def test_our_own_server_is_measured_on_both_endpoints(endpoint: str, tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_dir(ROOT / "models/k31-tiny")
    reciter = Reciter(tokenizer)
    with running_server(ScriptedModel(tokenizer, reciter), tokenizer) as server:
        reciter.say("one two three four five six")
        flags = "--endpoint", endpoint, "--random-input-len=100", "--request-rate=50"
        (point,) = measure(server.url, tmp_path, *flags)["points"]
        server.wait_until_idle()
    assert point["requests"] == {"planned": 3, "completed": 3, "errors": {}}
    assert point["tokens"]["output"] == 12 and point["latencies"]["itl"]["count"] > 0
    assert point["server_counters"]["vllm:generation_tokens_total"] == 12
    if endpoint == "/v1/completions":
        assert point["tokens"]["prompt"] == 300
    else:
        assert 250 <= point["tokens"]["prompt"] <= 350
