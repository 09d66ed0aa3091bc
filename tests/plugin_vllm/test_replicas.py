"""Two replicas that share the experts (DP 2 + EP 2): tokens travel, ranks without work take part."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.cluster_cases import NEW_TOKENS, Answer, assert_same, embedded_answers, make_prompts
from support.cluster_servers import SMALL, Running, vllm_server

PORT = 18610
FLAGS = (*SMALL, "--data-parallel-size", "2", "--enable-expert-parallel", "--max-num-batched-tokens", "128")


@pytest.fixture(scope="module")
def replicas(chatting) -> Iterator[Running]:
    with vllm_server(chatting, PORT, *FLAGS, cores=(0, 1)) as server:
        yield server


def test_one_request_while_the_other_replica_idles(replicas: Running, chatting) -> None:
    prompts = make_prompts(1, 70, 200)
    assert_same([replicas.complete(p) for p in prompts], embedded_answers(chatting, prompts))


def test_many_requests_of_all_lengths_at_once(replicas: Running, chatting) -> None:
    prompts = make_prompts(*range(1, 240, 20), seed=2)
    limits = [NEW_TOKENS - i for i in range(len(prompts))]  # replicas run dry at different steps
    with ThreadPoolExecutor(len(prompts)) as pool:
        got = list(pool.map(replicas.complete, prompts, limits))
    want = embedded_answers(chatting, prompts)
    assert_same(got, [Answer(a.token_ids[:n], a.logprobs[:n]) for a, n in zip(want, limits, strict=True)])
    replicas.wait_until_idle()
