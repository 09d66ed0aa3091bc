"""What holds for every route: ids, keys, fields for the scheduler, deadlines, hang-ups, other origins."""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import AsyncGenerator, Iterator
from dataclasses import replace
from typing import Any

import anthropic
import httpx
import openai
import pytest
from support.scripted import Reciter, Running, ScriptedModel, running_server
from support.xtml_replies import CALL, THINK_END

from longspan.chat import Tokenizer
from longspan.engine.output import StepOutput
from longspan.engine.request import Request

CHAT, TEXT, RESPONSES, MESSAGES, GENERATE = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/generate",
)
USER = [{"role": "user", "content": "x"}]
TOOL = {"name": "f", "parameters": {"type": "object", "properties": {"k": {"type": "string"}}}}
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": USER},
    TEXT: {"prompt": "x"},
    RESPONSES: {"input": "x"},
    MESSAGES: {"messages": USER, "max_tokens": 4000},
    GENERATE: {"text": "x"},
}
ENDLESS: dict[str, dict[str, Any]] = {
    TEXT: {"max_tokens": 4000, "ignore_eos": True, "n": 2},
    GENERATE: {"sampling_params": {"max_new_tokens": 4000, "ignore_eos": True, "n": 2}, "text": ["x", "y"]},
}


@pytest.fixture
def own_server(tokenizer: Tokenizer, request: pytest.FixtureRequest) -> Iterator[Running]:
    """A server of the test's own, with the options it is parametrised with."""
    model = ScriptedModel(tokenizer, Reciter(tokenizer))
    with running_server(model, tokenizer, **getattr(request, "param", {})) as server:
        yield server


@pytest.mark.parametrize("path", BODIES)
def test_the_id_of_a_request_is_in_its_answer_and_on_it(server: Running, path: str) -> None:
    server.say("x")
    for stream in (False, True):
        answer = server.post(path, BODIES[path] | {"stream": stream}, headers={"X-Request-Id": "tr-1.a"})
        assert answer.headers["X-Request-Id"] == "tr-1.a" and "tr-1.a" in answer.text
        made = server.post(path, BODIES[path] | {"stream": stream})
        assert len(made.headers["X-Request-Id"]) == 32 and made.headers["X-Request-Id"] in made.text
    refused = server.post(path, {"colour": 1}, headers={"X-Request-Id": "tr-2"})
    assert (refused.status_code, refused.headers["X-Request-Id"]) == (400, "tr-2")


def test_every_answer_has_an_id_whoever_gives_it(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in ("/health", "/v1/models", "/nowhere", "/metrics", "/v1/models/none"):
        assert server.get(path, headers={"X-Request-Id": "a"}).headers["X-Request-Id"] == "a"
    monkeypatch.setattr("longspan.serve.chat_call.chat_prompt", lambda *_: 1 / 0)
    failed = server.post(CHAT, BODIES[CHAT], headers={"X-Request-Id": "a"})
    assert (failed.status_code, failed.headers["X-Request-Id"]) == (500, "a")
    assert "ZeroDivision" not in failed.text


@pytest.mark.parametrize(
    ("sent", "taken"),
    [
        (b"a b\tc", "abc"),
        ("ü\x7f;<>%7E".encode(), "7E"),
        (b"x" * 5000, "x" * 128),
        (b"A-z_0.9:/@=+", "A-z_0.9:/@=+"),
    ],
)
def test_an_id_is_cut_and_cleaned(server: Running, sent: bytes, taken: str) -> None:
    answer = server.get("/health", headers={b"X-Request-Id": sent})
    assert answer.headers["X-Request-Id"] == taken


def test_an_id_may_be_used_by_several_requests_at_once(server: Running) -> None:
    server.say("x")
    with contextlib.ExitStack() as stack:
        for _ in range(3):
            stream = httpx.stream(
                "POST",
                server.url + TEXT,
                json=BODIES[TEXT] | {"stream": True},
                headers={"X-Request-Id": "same"},
            )
            assert stack.enter_context(stream).status_code == 200


@pytest.mark.parametrize("own_server", [{"api_key": "s3cret"}], indirect=True)
def test_both_headers_carry_the_key_on_every_route(own_server: Running) -> None:
    own_server.say(f"{THINK_END}x")
    for path, body in BODIES.items():
        for headers in ({"x-api-key": "s3cret"}, {"Authorization": "Bearer s3cret"}):
            assert own_server.post(path, body, headers=headers).status_code == 200
        for headers in ({}, {"x-api-key": "wrong"}, {"x-api-key": "Bearer s3cret"}):
            refused = own_server.post(path, body, headers=headers)
            assert refused.status_code == 401 and refused.json()["error"]["type"] == "authentication_error"
    client = anthropic.Anthropic(base_url=own_server.url, api_key="s3cret", max_retries=0)
    assert client.messages.create(**BODIES[MESSAGES], model="tiny").content[0].text
    wrong = anthropic.Anthropic(base_url=own_server.url, api_key="wrong", max_retries=0)
    with pytest.raises(anthropic.AuthenticationError) as caught:
        wrong.messages.create(**BODIES[MESSAGES], model="tiny")
    assert caught.value.request_id
    assert own_server.get("/ping").status_code == 200
    for path in ("/flush_cache", "/abort_request", "/health_generate"):
        assert own_server.post(path, {}).status_code == 401


@pytest.mark.parametrize("path", BODIES)
def test_priority_timeout_and_salt_reach_the_engine(
    server: Running, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.say("x")
    seen: list[Request] = []
    generate = server.service.engine.generate
    monkeypatch.setattr(
        server.service.engine, "generate", lambda request: seen.append(request) or generate(request)
    )
    salt = "extra_key" if path == GENERATE else "cache_salt"
    assert server.post(path, BODIES[path] | {"priority": 3, "timeout": 60, salt: "s"}).status_code == 200
    assert server.post(path, BODIES[path]).status_code == 200
    # SGLang's is the other way round: there the higher goes first.
    expected = (-3 if path == GENERATE else 3, 60, "s")
    assert [(r.priority, r.timeout, r.cache_salt) for r in seen] == [expected, (0, None, "")]
    for wrong in (
        {"priority": 1.5},
        {"priority": 2**40},
        {"timeout": 0},
        {"timeout": "1"},
        {salt: "x" * 300},
    ):
        refused = server.post(path, BODIES[path] | wrong)
        assert refused.status_code == 400 and next(iter(wrong)) in refused.text


@pytest.mark.parametrize("path", BODIES)
def test_a_deadline_is_504_or_the_last_event(
    server: Running, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    server.say("word ", repeat=4000)
    server.model.before_step = lambda: time.sleep(0.01)
    body = BODIES[path] | ENDLESS.get(path, {}) | {"timeout": 0.15}
    whole = server.post(path, body)
    assert whole.status_code == 504 and whole.json()["error"]["type"] == "timeout_error"
    last = server.post(path, body | {"stream": True}).text.strip().split("\n\n")[-1]
    assert "error" in last and "[DONE]" not in last
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


@pytest.mark.parametrize("path", [RESPONSES, MESSAGES, GENERATE])
def test_a_hundred_hang_ups_leave_nothing_behind(server: Running, path: str) -> None:
    server.say("word ", repeat=3000)
    body = BODIES[path] | ENDLESS.get(path, {})
    for i in range(100):
        server.post_and_leave(path, body | {"stream": i % 2 == 0}, (0, 0.001, 0.005, 0.02)[i % 4])
    server.wait_until_idle()
    assert server.get("/load").json() == {"server_load": 0}


@pytest.mark.parametrize("path", [RESPONSES, MESSAGES, GENERATE])
@pytest.mark.parametrize("stream", [False, True])
def test_a_finished_request_is_never_aborted(
    server: Running, path: str, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.say("Fine.")
    aborted: list[tuple] = []
    monkeypatch.setattr(server.engine, "abort", lambda *given: aborted.append(given))
    assert server.post(path, BODIES[path] | {"stream": stream}).status_code == 200
    server.wait_until_idle()
    assert aborted == []


def usage_of(path: str, answer: Any) -> tuple[int, int, int]:
    """(prompt, cached, reply) tokens of an answer of any protocol."""
    if path == GENERATE:
        answers = answer if isinstance(answer, list) else [answer]
        infos = [one["meta_info"] for one in answers]
        reply = sum(info["completion_tokens"] for info in infos)
        return infos[0]["prompt_tokens"], infos[0]["cached_tokens"], reply
    usage = answer["usage"]
    if path == MESSAGES:
        cached = usage["cache_read_input_tokens"]
        return usage["input_tokens"] + cached, cached, usage["output_tokens"]
    if path == RESPONSES:
        details = usage["input_tokens_details"]
        return usage["input_tokens"], details["cached_tokens"], usage["output_tokens"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    details = usage["prompt_tokens_details"]
    return usage["prompt_tokens"], details["cached_tokens"], usage["completion_tokens"]


def last_of(path: str, text: str) -> Any:
    """The event that has the usage."""
    lines = [line.removeprefix("data: ") for line in text.split("\n") if line.startswith("data: {")]
    found = [json.loads(line) for line in lines]
    if path == RESPONSES:
        return found[-1]["response"]
    if path == MESSAGES:
        return next(event for event in found if event["type"] == "message_delta")
    return list({event.get("index"): event for event in found}.values()) if path == GENERATE else found[-1]


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("n", [1, 2])
def test_usage_is_the_same_streamed_or_not_and_counts_what_was_cached(
    server: Running, path: str, n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With thinking, a tool call, several choices and a hit of 5 tokens."""

    async def with_hit(request: Request) -> AsyncGenerator[StepOutput, None]:
        first = set(range(request.params.n))
        async for step in generate(request):
            yield replace(step, cached_tokens=5 if step.index in first else 0)
            first.discard(step.index)

    generate = server.service.engine.generate
    monkeypatch.setattr(server.service.engine, "generate", with_hit)
    body = (
        BODIES[path]
        | {
            CHAT: {"tools": [{"type": "function", "function": TOOL}], "n": n},
            TEXT: {"n": n, "max_tokens": 200, "prompt": "In the beginning"},
            RESPONSES: {"tools": [{"type": "function"} | TOOL]},
            MESSAGES: {
                "tools": [{"name": "f", "input_schema": TOOL["parameters"]}],
                "thinking": {"type": "adaptive"},
            },
            GENERATE: {"sampling_params": {"n": n}, "text": "In the beginning"},
        }[path]
    )
    length = server.say(CALL)
    choices = n if path in (CHAT, TEXT, GENERATE) else 1
    whole = usage_of(path, server.post(path, body).json())
    assert whole == (len(server.model.script.prompts[-1]), 5, length * choices)
    options = {"stream_options": {"include_usage": True}} if path in (CHAT, TEXT) else {}
    streamed = server.post(path, body | options | {"stream": True}).text
    assert usage_of(path, last_of(path, streamed)) == whole


def test_log_probabilities_of_a_prompt_are_the_same_cold_and_warm(server: Running) -> None:
    server.say("x")
    prompt = list(range(1, 200))
    bodies = {
        TEXT: {"prompt": prompt, "prompt_logprobs": 2, "max_tokens": 1},
        CHAT: {
            "messages": [{"role": "user", "content": "word " * 200}],
            "prompt_logprobs": 2,
            "max_tokens": 1,
        },
        GENERATE: {
            "input_ids": prompt,
            "return_logprob": True,
            "logprob_start_len": 0,
            "top_logprobs_num": 2,
        },
    }
    for path, body in bodies.items():
        assert server.post("/flush_cache", {}).status_code == 200
        answers = [server.post(path, body).json() for _ in range(3)]
        if path == GENERATE:
            found = [[answer["meta_info"][f"input_{what}"] for what in ("token_logprobs", "top_logprobs")]
                     for answer in answers]  # fmt: skip
        else:
            found = [
                answer.get("prompt_logprobs") or answer["choices"][0]["prompt_logprobs"] for answer in answers
            ]
        assert found[0] and found[0] == found[1] == found[2]


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("stream", [False, True])
def test_no_tokens_with_echo_give_the_echo_alone(server: Running, n: int, stream: bool) -> None:
    server.say("More.")
    body = {"prompt": ["One ", "Two "], "echo": True, "max_tokens": 0, "n": n, "stop": "O", "stream": stream}
    if stream:
        chunks = list(server.client().completions.create(model="tiny", **body))
        texts = [choice.text for chunk in chunks for choice in chunk.choices if choice.text]
        assert sorted(texts) == ["One "] * n + ["Two "] * n
        return
    answer = server.post(TEXT, body).json()
    assert [choice["text"] for choice in answer["choices"]] == ["One "] * n + ["Two "] * n
    assert {choice["finish_reason"] for choice in answer["choices"]} == {"length"}
    assert answer["usage"]["completion_tokens"] == 0
    columns = server.post(TEXT, body | {"logprobs": 1, "prompt": "One two"}).json()["choices"][0]["logprobs"]
    assert "".join(columns["tokens"]) == "One two" and columns["token_logprobs"][0] is None
    assert len(columns["token_logprobs"]) == len(columns["tokens"])


@pytest.mark.parametrize(
    "own_server", [{"allowed_origins": ("https://a.example",), "api_key": "k"}], indirect=True
)
def test_pages_of_allowed_origins_may_ask_and_no_others(own_server: Running) -> None:
    asks = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    allow = "Access-Control-Allow-Origin"
    ours = httpx.options(own_server.url + CHAT, headers={"Origin": "https://a.example"} | asks)
    assert ours.status_code == 200 and ours.headers[allow] == "https://a.example"
    other = httpx.options(own_server.url + CHAT, headers={"Origin": "https://b.example"} | asks)
    assert other.status_code == 400 and allow not in other.headers
    refused = own_server.post(CHAT, BODIES[CHAT], headers={"Origin": "https://a.example"})
    assert refused.status_code == 401 and refused.headers[allow] == "https://a.example"


def test_without_the_option_no_page_may_ask(server: Running) -> None:
    answer = server.get("/health", headers={"Origin": "https://a.example"})
    assert not any(name.lower().startswith("access-control") for name in answer.headers)


def test_headers_without_end_are_refused_and_harm_nobody(server: Running) -> None:
    with contextlib.suppress(httpx.TransportError):  # it may hang up while more is sent
        assert httpx.get(server.url + "/health", headers={"X-Long": "x" * 300_000}).status_code >= 400
    assert server.get("/health").status_code == 200


def test_probes_and_load(server: Running) -> None:
    assert server.get("/ping").status_code == server.post("/ping", {}).status_code == 200
    assert server.get("/load").json() == {"server_load": 0}
    card = server.client().models.list().data[1].model_dump()
    assert (card["id"], card["root"], card["parent"], card["owned_by"]) == ("alias", "tiny", None, "longspan")


def test_a_client_that_speaks_another_protocol_is_told_the_field(server: Running) -> None:
    for path, body in ((RESPONSES, BODIES[CHAT]), (MESSAGES, BODIES[RESPONSES]), (GENERATE, BODIES[TEXT])):
        assert server.post(path, body).status_code == 400
    with pytest.raises(openai.BadRequestError, match="`input`"):
        server.client().responses.create(model="tiny", extra_body={"messages": USER})
