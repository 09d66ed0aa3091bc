"""The real server as a process, on random weights: clients, hang-ups, limits, start and end."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from support.subprocess_server import ServerProcess, server_process

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
USER: Any = [{"role": "user", "content": "Hello"}]
MODEL = "random"


def pasted(server: ServerProcess, **environment: str) -> tuple[str, dict[str, str], Any]:
    """What the shell makes of the line that was printed: address, headers and body for curl."""
    line = next(line for line in server.welcome.splitlines() if "curl" in line)
    program = f'curl() {{ printf "%s\\n" "$@"; }}; {line}'
    shell = subprocess.run(["sh", "-c", program], env=environment, capture_output=True, text=True, check=True)
    url, *words = shell.stdout.splitlines()
    values = dict(enumerate(words))
    headers = dict(values[i + 1].split(": ") for i in values if values[i] == "-H")
    body = next(values[i + 1] for i in values if values[i] == "-d")
    return url, headers, json.loads(body)


def test_the_printed_curl_line_is_answered(random_server: ServerProcess) -> None:
    url, headers, body = pasted(random_server)
    answer = httpx.post(url, headers=headers, json=body | {"max_tokens": 3}, timeout=60)
    assert answer.json()["usage"]["completion_tokens"] == 3


def test_a_wrong_body_of_some_megabytes_keeps_nobody_waiting(random_server: ServerProcess) -> None:
    with ThreadPoolExecutor(2) as pool, httpx.Client(base_url=random_server.url) as client:
        answers = [
            pool.submit(random_server.post, TEXT, {"prompt": [item] * 1_000_000}) for item in (1.5, "a", [])
        ]
        polls = 0
        while not all(answer.done() for answer in answers):
            assert client.get("/health").status_code == 200
            polls += 1
    assert {answer.result().status_code for answer in answers} == {400}
    assert polls > 10


def test_a_stream_says_the_same_as_the_whole_answer_with_the_same_usage(random_server: ServerProcess) -> None:
    body: Any = {"model": MODEL, "messages": USER, "seed": 5, "max_tokens": 20, "n": 2}
    whole = random_server.client().chat.completions.create(**body)
    stream = random_server.client().chat.completions.create(
        **body, stream=True, stream_options={"include_usage": True}
    )
    texts: dict[int, list[str]] = {0: ["", ""], 1: ["", ""]}
    reasons, usage = {}, None
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            delta = choice.delta.model_dump()
            texts[choice.index][0] += delta.get("reasoning_content") or ""
            texts[choice.index][1] += delta.get("content") or ""
            reasons[choice.index] = choice.finish_reason
    for choice in whole.choices:
        message = choice.message.model_dump()
        assert texts[choice.index] == [message.get("reasoning_content") or "", message["content"] or ""]
        assert reasons[choice.index] == choice.finish_reason
    assert texts[0] != texts[1]
    assert usage == whole.usage and usage
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


def test_a_seeded_answer_does_not_depend_on_the_company(random_server: ServerProcess) -> None:
    def ask(seed: int) -> str:
        body: Any = {"model": MODEL, "prompt": "In the beginning", "seed": seed, "max_tokens": 12}
        return random_server.client().completions.create(**body).choices[0].text

    alone = [ask(seed) for seed in range(4)]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(ask, range(4))) == alone
    assert len(set(alone)) == 4


def test_a_storm_of_hang_ups_leaves_nothing_behind_and_nothing_in_the_log(random_dir: Path) -> None:
    with server_process(random_dir, "--max-num-seqs", "8", "--log-level", "info") as server:

        def drop(number: int) -> None:
            # Before the first token, in the middle, and around the last one; streamed and not.
            body = {"prompt": "x", "ignore_eos": True, "stream": number % 4 < 2}
            body |= {"max_tokens": 2} if number % 2 else {"max_tokens": 3000, "n": 2}
            server.post_and_leave(TEXT, body, after=number / 200)

        with ThreadPoolExecutor(12) as pool:
            list(pool.map(drop, range(100)))
        server.post_and_leave(TEXT, {"prompt": "x"}, after=0, missing=5)
        server.wait_until_idle()
        assert httpx.get(f"{server.url}/health").status_code == 200
        assert server.post(TEXT, {"prompt": "x", "max_tokens": 2}).status_code == 200
        code, log = server.stop()
        # Those of two tokens may have been answered before their client had left.
        finished = [
            line for line in log.splitlines() if " request id=" in line and "output_tokens=2 " in line
        ]
        assert code == 0 and log.splitlines() == finished and 1 <= len(finished) <= 51


def test_health_answers_while_a_large_chat_is_encoded(random_server: ServerProcess) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"k": "v"}'}}
    turn = [
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "a" * 400},
    ]
    with ThreadPoolExecutor(1) as pool, httpx.Client(base_url=random_server.url) as client:
        answer = pool.submit(random_server.post, "/tokenize", {"messages": turn * 4000})
        polls = 0
        while not answer.done():
            assert client.get("/health").status_code == 200
            polls += 1
    assert answer.result().json()["count"] > 100_000
    assert polls > 3


def test_a_bad_request_is_refused_and_the_next_is_served(random_server: ServerProcess) -> None:
    client = random_server.client()
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.chat.completions.create(model=MODEL, messages=USER, extra_body={"temprature": 1})
    with pytest.raises(openai.BadRequestError, match="4095 tokens or fewer"):
        client.completions.create(model=MODEL, prompt=[5] * 4096)
    with pytest.raises(openai.NotFoundError, match=MODEL):
        client.completions.create(model="gpt-4", prompt="x")
    assert client.completions.create(model=MODEL, prompt="x", max_tokens=1).usage


def test_keys_names_and_queue_limits_are_flags(random_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LONGSPAN_API_KEY", "s3cret")
    flags = (
        "--served-model-name kimi k --max-queue 0 --max-num-seqs 2 --max-body-mib 0.001 --drain-seconds 0.1"
    )
    with server_process(random_dir, *flags.split()) as server:
        _, headers, _ = pasted(server, LONGSPAN_API_KEY="s3cret")
        assert headers["Authorization"] == "Bearer s3cret" and "s3cret" not in server.welcome
        with pytest.raises(openai.AuthenticationError):
            server.client().models.list()
        client = server.client(api_key="s3cret")
        assert [model.id for model in client.models.list()] == ["kimi", "k"]
        with pytest.raises(openai.APIStatusError) as caught:
            client.completions.create(model="k", prompt="x" * 2000)
        assert caught.value.status_code == 413
        body: Any = {"model": "k", "prompt": "x", "max_tokens": 3000, "extra_body": {"ignore_eos": True}}
        with ThreadPoolExecutor(2) as pool:
            running = [pool.submit(client.completions.create, **body) for _ in range(2)]
            while server.metric("num_requests_running") < 2:
                time.sleep(0.02)
            with pytest.raises(openai.RateLimitError):
                client.completions.create(model="k", prompt="x")
            assert server.stop()[0] == 0
            for answer in running:
                with pytest.raises(openai.InternalServerError, match="shutting down"):
                    answer.result()


def test_a_key_given_as_a_flag_is_not_printed_and_not_taken_from_elsewhere(random_dir: Path) -> None:
    with server_process(random_dir, "--api-key", " s3crét ") as server:
        url, headers, body = pasted(server)
        assert headers["Authorization"] == "Bearer YOUR_KEY" and "s3cr" not in server.welcome
        right = headers["Authorization"].replace("YOUR_KEY", "s3crét").encode()
        body = body | {"max_tokens": 1}
        assert httpx.post(url, headers=headers, json=body).status_code == 401
        assert httpx.post(url, headers={b"Authorization": right}, json=body, timeout=60).status_code == 200


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_in_order_and_long_requests_are_told(random_dir: Path, number: int) -> None:
    with server_process(random_dir, "--drain-seconds", "0.5") as server, ThreadPoolExecutor(1) as pool:
        body = {"prompt": "x", "max_tokens": 4000, "ignore_eos": True, "stream": True}
        stream = pool.submit(server.post, TEXT, body)
        while server.metric("num_requests_running") < 1:
            time.sleep(0.02)
        code, errors = server.stop(number)
        last = stream.result().text.strip().split("\n\n")[-1]
        assert "shutting down" in json.loads(last.removeprefix("data: "))["error"]["message"]
    assert code == 0
    assert "Traceback" not in errors
