"""What every test of the cluster host starts from: a random K3.1 checkpoint, and vLLM in a child process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.cluster_cases import NEW_TOKENS, Answer, write_chatting_k31, write_small_k31

TESTS = Path(__file__).parents[1]
CORES = sorted(os.sched_getaffinity(0))


@dataclass(frozen=True)
class Rounds:
    """What vLLM answered to the prompts of each round."""

    answers: list[list[Answer]]
    cached: list[list[int]]  # prompt tokens that came from its prefix cache
    preemptions: int
    asynchronous: bool  # steps were scheduled ahead
    held: list[dict[str, int]]  # by each rank: bytes of its weights, of a block's pages, of a state


@pytest.fixture(scope="module", autouse=True)
def own_environment() -> Iterator[None]:
    """vLLM writes what it settles into the environment, which the servers of other modules would take up."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small_k31(tmp_path_factory.mktemp("k31"))


@pytest.fixture(scope="session")
def chatting(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with a tokenizer."""
    return write_chatting_k31(tmp_path_factory.mktemp("chatting"))


@pytest.fixture
def vllm(checkpoint: Path, run_vllm: Callable[..., Rounds]) -> Callable[..., Rounds]:
    """vllm(round, round, .., **options of vllm.LLM)."""
    return partial(run_vllm, checkpoint)


@pytest.fixture
def run_vllm(tmp_path: Path) -> Callable[..., Rounds]:
    """run_vllm(checkpoint, round, round, .., **options of vllm.LLM)."""

    def run(
        checkpoint: Path,
        *rounds: list[list[int]],
        max_tokens: int = NEW_TOKENS,
        sampling_seed: int | None = None,
        **options: Any,
    ) -> Rounds:
        job, answers = tmp_path / "job.json", tmp_path / "answers.json"
        job.write_text(
            json.dumps(
                {
                    "checkpoint": str(checkpoint),
                    "options": options,
                    "rounds": rounds,
                    "max_tokens": max_tokens,
                    "sampling_seed": sampling_seed,
                }
            )
        )
        command = [sys.executable, "-m", "plugin_vllm.offline", str(job), str(answers)]
        done = subprocess.run(command, cwd=TESTS, env=environment(options), capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-6000:]
        got = json.loads(answers.read_text())
        return Rounds(
            [[Answer(a["token_ids"], a["logprobs"]) for a in r] for r in got["rounds"]],
            [[a["cached"] for a in r] for r in got["rounds"]],
            got["preemptions"],
            got["asynchronous"],
            got["held"],
        )

    return run


def environment(options: dict[str, Any]) -> dict[str, str]:
    """One process where one is enough; else a core for each rank, shared if there are not as many."""
    ranks = options.get("tensor_parallel_size", 1)
    bind = "|".join(str(CORES[rank % len(CORES)]) for rank in range(ranks))
    return os.environ | {
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0" if ranks == 1 else "1",
        "VLLM_CPU_OMP_THREADS_BIND": bind,
        "GLOO_SOCKET_IFNAME": "lo",
    }
