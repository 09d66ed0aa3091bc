"""Keys, sizes, queues, hang-ups, failures and the end of the server."""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from support.scripted import ROOT, Hold, Reciter, Running, ScriptedModel, running_server

from longspan.chat import Tokenizer
from longspan.errors import CapacityError, CheckpointError
from longspan.serve.connection import Connection
from longspan.serve.server import bind

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
USER = {"messages": [{"role": "user", "content": "x"}]}
ENDLESS = {"prompt": "x", "max_tokens": 4000, "ignore_eos": True}


@pytest.fixture
def own_server(tokenizer: Tokenizer, request: pytest.FixtureRequest) -> Iterator[Running]:
    """A server of the test's own, with the options it is parametrised with."""
    model = ScriptedModel(tokenizer, Reciter(tokenizer))
    with running_server(model, tokenizer, **getattr(request, "param", {})) as server:
        yield server


@pytest.mark.parametrize("own_server", [{"api_key": "s3cret"}], indirect=True)
def test_a_key_opens_everything_and_probes_need_none(own_server: Running) -> None:
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "s3cret"}):
        for path in (CHAT, TEXT, "/tokenize", "/detokenize"):
            answer = own_server.post(path, {}, headers=headers)
            assert answer.status_code == 401 and answer.json()["error"]["type"] == "authentication_error"
        assert own_server.get("/v1/models", headers=headers).status_code == 401
    with pytest.raises(openai.AuthenticationError):
        own_server.client(api_key="wrong").models.list()
    assert [model.id for model in own_server.client(api_key="s3cret").models.list()] == ["tiny", "alias"]
    for path in ("/health", "/metrics", "/version"):
        assert own_server.get(path).status_code == 200
    assert httpx.head(f"{own_server.url}/health").status_code == 200


@pytest.mark.parametrize("own_server", [{"api_key": "clé"}], indirect=True)
def test_a_key_beyond_ascii_opens_in_utf8_and_in_latin1(own_server: Running) -> None:
    for key, status in (
        ("clé".encode(), 200),
        ("clé".encode("latin-1"), 200),
        ("cle\u0301".encode(), 401),
        (b"cl\xc3", 401),
        (b"cl?", 401),
    ):
        answer = own_server.get("/v1/models", headers={b"Authorization": b"Bearer " + key})
        assert answer.status_code == status, key


@pytest.mark.parametrize("own_server", [{"api_key": "кл\udce9"}], indirect=True)
def test_a_key_that_is_no_text_is_compared_as_the_bytes_it_is(own_server: Running) -> None:
    key = "кл".encode() + b"\xe9"
    assert own_server.get("/v1/models", headers={b"Authorization": b"Bearer " + key}).status_code == 200
    assert own_server.get("/v1/models").status_code == 401


def test_models_say_their_length(server: Running) -> None:
    card = server.get("/v1/models").json()["data"][0]
    assert (card["id"], card["max_model_len"]) == ("tiny", 512 * 16)
    assert server.client().models.retrieve("alias").id == "alias"
    assert server.get("/v1/models/gpt-4").status_code == 404


@pytest.mark.parametrize("own_server", [{"max_body_bytes": 1000}], indirect=True)
def test_a_large_body_is_refused_declared_or_not(own_server: Running) -> None:
    body = {"prompt": "x" * 1000}
    declared = own_server.post(TEXT, body)
    pieces = (piece for piece in [json.dumps(body).encode()])
    headers = {"Content-Type": "application/json"}
    chunked = httpx.post(own_server.url + TEXT, content=pieces, headers=headers)
    for answer in (declared, chunked):
        assert answer.status_code == 413 and "--max-body-mib" in answer.json()["error"]["message"]
    assert own_server.post(TEXT, {"prompt": "x"}).status_code == 200


@pytest.mark.parametrize("own_server", [{"max_queue": 2, "num_slots": 1}], indirect=True)
def test_a_full_queue_is_429_and_empties_again(own_server: Running) -> None:
    own_server.say("Fine.")
    hold = Hold(own_server.model)
    with ThreadPoolExecutor(3) as pool:
        waiting = [pool.submit(own_server.post, TEXT, {"prompt": "x"}) for _ in range(3)]
        assert hold.reached.wait(30)
        while own_server.service._admitted < 3:
            time.sleep(0.005)
        for stream in (False, True):
            refused = own_server.post(TEXT, {"prompt": "x", "stream": stream})
            assert refused.status_code == 429 and refused.headers["Retry-After"]
            assert refused.json()["error"]["type"] == "rate_limit_error"
        assert own_server.get("/health").status_code == 200
        hold.release()
        assert {answer.result().status_code for answer in waiting} == {200}
    assert own_server.post(TEXT, {"prompt": "x"}).status_code == 200
    assert own_server.post(TEXT, {"prompt": "x", "n": 4}).status_code == 400
    own_server.wait_until_idle()


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_hangs_up_gives_everything_back_at_once(server: Running, stream: bool) -> None:
    server.say("word ", repeat=3000)
    for delay in (0, 0.001, 0.01, 0.03):
        for path, body in (
            (TEXT, ENDLESS | {"n": 2}),
            (CHAT, USER),
            (TEXT, ENDLESS | {"prompt": ["a", "b"]}),
        ):
            server.post_and_leave(path, body | {"stream": stream}, delay)
    server.wait_until_idle()


@pytest.mark.parametrize("stream", [False, True])
def test_a_finished_request_is_never_aborted(
    server: Running, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.say("Fine.")
    aborted: list[tuple] = []
    monkeypatch.setattr(server.engine, "abort", lambda *given: aborted.append(given))
    for path, body in ((TEXT, {"prompt": ["x", "y"], "n": 2}), (CHAT, USER)):
        assert server.post(path, body | {"stream": stream}).status_code == 200
    server.wait_until_idle()
    assert aborted == []


def test_health_answers_while_a_long_chat_is_rendered_and_encoded(server: Running) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"k": "v"}'}}
    turn = [
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "ok"},
    ]
    server.say("<|end_of_msg|>")
    pace: list[float] = []
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(server.post, "/tokenize", {"messages": turn * 5000})
        while not answer.done():
            began = time.monotonic()
            assert server.get("/health").status_code == 200
            pace.append(time.monotonic() - began)
    assert answer.result().status_code == 200
    assert len(pace) > 3, "health was asked in between"


def failure(server: Running, after_steps: int) -> Callable[[], None]:
    """For `before_step`: fails once, in the step after so many."""
    steps = iter(range(after_steps))

    def step() -> None:
        if next(steps, None) is None:
            server.model.before_step = lambda: None
            raise RuntimeError("broken kernel")

    return step


@pytest.mark.parametrize("stream", [False, True])
def test_a_step_that_fails_ends_its_requests_with_an_error_and_nothing_else(
    server: Running, stream: bool
) -> None:
    server.say("Fine.")
    server.model.before_step = failure(server, after_steps=2)
    answer = server.post(TEXT, {"prompt": "x", "stream": stream})
    if stream:
        *_, last, end = answer.text.split("\n\n")
        found = json.loads(last.removeprefix("data: "))["error"]
        assert end == "" and "[DONE]" not in answer.text
    else:
        assert answer.status_code == 500
        found = answer.json()["error"]
    assert found["type"] == "server_error" and "broken kernel" in found["message"]
    assert server.post(TEXT, {"prompt": "x"}).json()["choices"][0]["text"] == "Fine."


def test_the_official_client_raises_for_an_error_in_a_stream(server: Running) -> None:
    server.say("Fine.")
    server.model.before_step = failure(server, after_steps=1)
    with pytest.raises(openai.APIError, match="broken kernel"):
        list(server.client().completions.create(model="tiny", prompt="x", stream=True))


def test_a_dead_engine_is_unhealthy_and_says_so(own_server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    def die(*_: Any) -> None:
        raise SystemError("the thread dies")

    monkeypatch.setattr(own_server.engine, "step", die)
    assert own_server.post(TEXT, {"prompt": "x"}).status_code >= 500
    assert own_server.get("/health").status_code == 503
    assert own_server.post(TEXT, {"prompt": "x"}).status_code == 503


@pytest.mark.parametrize("own_server", [{"drain_seconds": 30}], indirect=True)
def test_told_to_stop_it_finishes_what_runs_and_tells_everyone_else(own_server: Running) -> None:
    own_server.say("Fine.")
    hold = Hold(own_server.model)
    with ThreadPoolExecutor(1) as pool, httpx.Client(base_url=own_server.url) as kept_open:
        assert kept_open.get("/health").status_code == 200
        running = pool.submit(own_server.post, TEXT, {"prompt": "x"})
        assert hold.reached.wait(30)
        own_server.server.should_exit = True
        time.sleep(0.5)  # several times what the server needs to notice
        for _ in range(3):
            for answer in (
                kept_open.get("/health"),
                kept_open.post(TEXT, json={"prompt": "x"}),
                own_server.get("/health"),
                own_server.post(TEXT, {"prompt": "x"}),
            ):
                assert answer.status_code == 503 and "shutting down" in answer.text
        hold.release()
        assert running.result().json()["choices"][0]["text"] == "Fine."
    for _ in range(500):
        with contextlib.suppress(httpx.TransportError):
            own_server.get("/health")
            time.sleep(0.02)
            continue
        return
    raise AssertionError("it still listens")


LARGE_ANSWER = {"prompt": "word " * 500_000, "return_token_strs": True}  # more than sockets hold


@contextlib.contextmanager
def asked_by_hand(server: Running, path: str, body: dict[str, Any]) -> Iterator[socket.socket]:
    """A connection that has sent a request, holds little of an answer, and closes after it."""
    host, port = server.url.removeprefix("http://").split(":")
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(data)}\r\n\r\n"
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**15)
        connection.connect((host, int(port)))
        connection.sendall(head.encode() + data)
        yield connection


@pytest.mark.parametrize(
    ("path", "body"),
    [(TEXT, ENDLESS | {"n": 2, "logprobs": 20, "stream": True}), ("/tokenize", LARGE_ANSWER)],
)
def test_a_client_that_never_reads_counts_as_gone(
    server: Running, path: str, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Connection, "stall_seconds", 0.3)
    server.say("word ", repeat=4000)
    connections = server.server.server_state.connections
    with asked_by_hand(server, path, body):
        while not any(connection.flow.write_paused for connection in list(connections)):
            time.sleep(0.005)
        while connections or server.service.busy:
            time.sleep(0.005)
    server.wait_until_idle()


def test_a_client_that_reads_slowly_gets_all(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Connection, "stall_seconds", 2)
    expected = httpx.post(f"{server.url}/tokenize", json=LARGE_ANSWER, timeout=60).content
    answer = b""
    with asked_by_hand(server, "/tokenize", LARGE_ANSWER) as connection:
        while piece := connection.recv(2**18):
            answer += piece
            time.sleep(0.02)
    assert answer.endswith(expected)


@pytest.mark.parametrize("own_server", [{"drain_seconds": 0.2}], indirect=True)
def test_what_is_not_done_in_time_is_told_so(own_server: Running) -> None:
    own_server.say("word ", repeat=4000)
    own_server.model.before_step = lambda: time.sleep(0.005)
    with ThreadPoolExecutor(2) as pool:
        whole = pool.submit(own_server.post, TEXT, ENDLESS)
        stream = pool.submit(own_server.post, TEXT, ENDLESS | {"stream": True})
        while own_server.engine.stats.num_running < 2:
            time.sleep(0.005)
        own_server.server.should_exit = True
        assert whole.result().status_code == 503
        last = stream.result().text.strip().split("\n\n")[-1]
    assert "shutting down" in json.loads(last.removeprefix("data: "))["error"]["message"]


def test_a_taken_port_is_said_clearly() -> None:
    with bind("127.0.0.1", 0) as taken:
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(CapacityError, match=f"port {port}.*--port"):
            bind("127.0.0.1", port)


@pytest.mark.parametrize(
    ("host", "port"), [("127.0.0.1", 70000), ("no.such.host.invalid", 8000), ("192.0.2.1", 0)]
)
def test_an_address_that_cannot_be_had_is_said_clearly(host: str, port: int) -> None:
    with pytest.raises(CapacityError, match=f"Cannot listen on .*port {port}.*--port"):
        bind(host, port)


def test_a_checkpoint_without_chat_tokens_completes_and_refuses_chats(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    shutil.copy(ROOT / "models/k31-tiny/tiktoken.model", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"added_tokens_decoder": {}}')
    model = ScriptedModel(tokenizer, Reciter(tokenizer))
    with running_server(model, Tokenizer.from_dir(tmp_path)) as server:
        server.say("Fine.")
        answer = server.post(CHAT, USER)
        assert answer.status_code == 400 and "completions" in answer.json()["error"]["message"]
        assert server.post(TEXT, {"prompt": "x"}).json()["choices"][0]["text"].startswith("Fine.")


def test_without_a_tokenizer_there_is_no_server(tokenizer: Tokenizer) -> None:
    model = ScriptedModel(tokenizer, Reciter(tokenizer))
    with pytest.raises(CheckpointError, match=r"tiktoken\.model"), running_server(model, None):
        pass
