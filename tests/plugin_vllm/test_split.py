"""Prefill and decode on servers of their own, NIXL between them: exact, and right or refused if one fails."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.cluster_cases import Answer, assert_same, make_prompts
from support.cluster_servers import Running, completion, read_answer, read_events, running
from support.cluster_split import MAX_TOKENS, Split

ROUTER_PORT = 18580


@pytest.fixture(scope="module")
def servers(chatting: Path) -> Iterator[Split]:
    with ExitStack() as stack:
        yield Split(chatting, stack)


@pytest.fixture
def split(servers: Split) -> Split:
    servers.revive()
    return servers


def test_one_request_after_another_and_what_decode_has_cached(split: Split) -> None:
    prompts = make_prompts(1, 2, 17, 64, 65, 200, 333)
    before = split.transferred()
    assert_same([split.complete(p) for p in prompts], split.reference(prompts))
    assert split.transferred() - before >= len(prompts) - 1, "decode computed prompts itself"
    tail = make_prompts(30, seed=1)[0]
    again = [prompts[5], prompts[5][:150] + tail, prompts[6] + tail]
    split.check_partly_cached(again)
    split.wait_until_idle()


def test_fifty_requests_at_once(split: Split) -> None:
    rng = random.Random(0)
    prompts = make_prompts(*(rng.choice([1, 3, 30, 63, 64, 65, 128, 150]) for _ in range(25)), seed=2) * 2
    want = split.reference(prompts[:25]) * 2
    delays = [rng.uniform(0, 3) for _ in prompts]
    before = split.transferred()

    def one(i: int) -> Answer:
        time.sleep(delays[i])
        return split.complete(prompts[i])

    with ThreadPoolExecutor(len(prompts)) as pool:
        assert_same(list(pool.map(one, range(len(prompts)))), want)
    assert split.transferred() - before >= len(prompts) / 2
    split.wait_until_idle()


def test_memory_whose_lease_is_over_is_not_used(split: Split) -> None:
    """Others have written to the blocks meanwhile."""
    prompt, *others = make_prompts(100, *[100] * 6, seed=3)
    late = split.fill(completion(prompt, MAX_TOKENS))
    assert split.prefill.metric("kv_cache_usage_perc") > 0
    split.prefill.wait_until_idle(split.lease_s + 20)
    for other in others:
        split.prefill.complete(other, 1)
    answer = read_answer(split.decode.post("/v1/completions", late))
    assert_same([answer], split.reference([prompt]))
    assert "lease_over" in split.decode.log()
    split.wait_until_idle()


def test_blocks_are_read_by_one_request_and_others_do_without(split: Split) -> None:
    """The answers of n have the same parameters, and so has a request that is sent again."""
    prompt, *others = make_prompts(50, *[50] * 4, seed=8)  # less than a block: decode can cache nothing
    body = split.fill(completion(prompt, MAX_TOKENS))
    (want,) = split.reference([prompt])
    both = split.decode.post("/v1/completions", body | {"n": 2, "temperature": 1, "top_k": 1}).json()[
        "choices"
    ]
    assert [choice["token_ids"] for choice in both] == [want.token_ids] * 2
    for other in others:
        split.prefill.complete(other, 1)
    assert_same([read_answer(split.decode.post("/v1/completions", body))], [want])
    assert split.decode.log(20000).count("read_by_another") >= 2
    split.wait_until_idle()


def test_clients_that_leave_hold_no_memory(split: Split) -> None:
    prompt = make_prompts(900, seed=4)[0]
    remote = {"do_remote_decode": True, "do_remote_prefill": False}
    with suppress(httpx.TimeoutException):
        body = completion(prompt, 1) | {"kv_transfer_params": remote}
        split.prefill.post("/v1/completions", body, timeout=0.05)
    body = split.fill(completion(prompt, 100, stream=True))
    with httpx.stream("POST", f"{split.decode.url}/v1/completions", json=body, timeout=60) as response:
        next(response.iter_lines())
    with suppress(httpx.TimeoutException):
        split.decode.post("/v1/completions", split.fill(completion(prompt[:800], 100)), timeout=0.05)
    split.wait_until_idle()


def test_a_prefill_server_that_stands_still_is_not_waited_for(split: Split) -> None:
    prompts = make_prompts(1, 110, 140, seed=7)
    split.complete(prompts[0])  # they know each other
    body = split.fill(completion(prompts[1], MAX_TOKENS))
    os.killpg(split.prefill.process.pid, signal.SIGSTOP)
    try:
        answer = read_answer(split.decode.post("/v1/completions", body, timeout=60))
    finally:
        os.killpg(split.prefill.process.pid, signal.SIGCONT)
    assert_same([answer, split.complete(prompts[2])], split.reference(prompts[1:]))
    split.wait_until_idle()


ROUTERS = {
    "smg": ["smg", "launch", "--pd-disaggregation", "--discovery-provider", "file"],
    "vllm-router": ["vllm-router", "--vllm-pd-disaggregation", "--health-check-interval-secs", "2"],
}


@pytest.mark.parametrize("name", ROUTERS)
def test_a_router_in_front_of_both(split: Split, tmp_path: Path, name: str) -> None:
    chat = {"model": "k31", "messages": [{"role": "user", "content": f"Say {name} " * 40}]}
    chat |= {"max_tokens": MAX_TOKENS, "temperature": 0}
    text = {"model": "k31", "prompt": f"Once there was {name} " * 20, "temperature": 0}
    text |= {"max_tokens": MAX_TOKENS, "logprobs": 0}
    before = split.transferred()
    with running(router(name, split, tmp_path), f"http://127.0.0.1:{ROUTER_PORT}", deadline_s=60) as front:
        until = time.monotonic() + 60
        while front.post("/v1/chat/completions", chat).status_code != 200:
            assert time.monotonic() < until, front.log()
            time.sleep(0.5)
        streamed = read_stream(front, "/v1/chat/completions", chat)
        assert streamed == content(front.post("/v1/chat/completions", chat))
        completed = front.post("/v1/completions", text).json()["choices"][0]
        assert read_stream(front, "/v1/completions", text) == completed["text"]
    assert split.transferred() - before >= 2, f"{name} did not split the work"
    assert streamed == content(split.decode.post("/v1/chat/completions", chat))
    alone = split.decode.post("/v1/completions", text).json()["choices"][0]
    assert completed["text"] == alone["text"]
    assert completed["logprobs"]["token_logprobs"] == pytest.approx(
        alone["logprobs"]["token_logprobs"], abs=1e-4
    )
    split.wait_until_idle()


def router(name: str, split: Split, directory: Path) -> list[str]:
    binary, *flags = ROUTERS[name]
    command = [str(Path(sys.executable).parent / binary), *flags, "--host", "127.0.0.1"]
    command += ["--port", str(ROUTER_PORT), "--policy", "round_robin"]
    command += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(ROUTER_PORT + 1)]
    if name == "vllm-router":
        return [*command, "--prefill", split.prefill.url, "--decode", split.decode.url]
    workers = [
        {"id": role, "url": server.url, "worker_type": role, "kv_connector": "NixlConnector"}
        for role, server in split.servers.items()
    ]
    (directory / "workers.json").write_text(json.dumps({"version": 1, "workers": workers}))
    return [*command, "--discovery-file", str(directory / "workers.json")]


def content(response: httpx.Response) -> str:
    return response.json()["choices"][0]["message"]["content"]


def read_stream(server: Running, path: str, body: dict[str, Any]) -> str:
    with httpx.stream("POST", server.url + path, json=body | {"stream": True}, timeout=60) as response:
        choices = [event["choices"][0] for event in read_events(response)]
    return "".join(c["delta"].get("content") or "" if "delta" in c else c["text"] for c in choices)


def test_prefill_dies_before_decode_has_the_memory_and_comes_back_another(split: Split) -> None:
    """Decode computes the prompt itself; a new prefill server, of other pages at first, is found out."""
    prompt, second, third = make_prompts(120, 130, 140, seed=6)
    split.complete(second)  # they know each other
    body = split.fill(completion(prompt, MAX_TOKENS))
    split.prefill.kill()
    answer = read_answer(split.decode.post("/v1/completions", body))
    assert_same([answer], split.reference([prompt]))
    split.decode.wait_until_idle()

    split.start("prefill", "--block-size", "32")
    split.prefill.wait_for_health()
    assert_same([split.complete(second)], split.reference([second]))
    assert "The pages of the prefill server are" in split.decode.log(40000)

    split.prefill.kill()
    split.revive()
    before = split.transferred()
    assert_same([split.complete(third)], split.reference([third]))
    assert split.transferred() > before, "the new prefill server is not used"
    split.wait_until_idle()


def test_decode_dies_while_it_answers(split: Split) -> None:
    """Its client is told, and the prefill server lets go of what decode never came for."""
    prompt, other = make_prompts(100, 90, seed=5)
    split.fill(completion(other))
    body = split.fill(completion(prompt, 900, stream=True))
    seen: list[str] = []

    def read() -> None:
        try:
            with httpx.stream("POST", f"{split.decode.url}/v1/completions", json=body, timeout=60) as answer:
                seen.extend(line for line in answer.iter_lines() if line)
        except httpx.TransportError:
            seen.append("broken off")

    reader = threading.Thread(target=read)
    reader.start()
    until = time.monotonic() + 60
    while len(seen) < 3:
        assert time.monotonic() < until, "no answer began"
        time.sleep(0.01)
    split.decode.kill()
    reader.join(60)
    assert seen[-1] == "broken off" and "data: [DONE]" not in seen
    split.prefill.wait_until_idle(split.lease_s + 20)
