"""A model that says what a test wants, behind the real engine and the real HTTP server."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import torch
from openai import OpenAI
from support.serving import small_plan
from torch import Tensor

from longspan.chat import Segment, Tokenizer
from longspan.config import load_config
from longspan.engine.async_engine import AsyncEngine
from longspan.engine.core import EngineCore
from longspan.engine.options import EngineOptions
from longspan.engine.worker import ThreadWorker
from longspan.ops.backend import TORCH
from longspan.ops.batch import LayerView, StepBatch
from longspan.serve.app import create_app
from longspan.serve.server import Server, bind
from longspan.serve.service import ServeOptions, Service
from longspan.serve.tracing import Tracing

ROOT = Path(__file__).parents[2]
Script = Callable[[list[int]], Sequence[int]]


class ScriptedModel:
    """Answers each prompt with the ids that `script` gives for it, then with the end of the message for ever.

    `before_step` is called first in every step: it may wait, or raise.
    """

    def __init__(self, tokenizer: Tokenizer, script: Script) -> None:
        config = load_config(ROOT / "tests/data/k31-text")
        self.end = tokenizer.special_id("<|end_of_msg|>")
        self._close = tokenizer.special_id("<|close|>")
        self.config = replace(config, vocab_size=tokenizer.vocab_size, eos_token_ids=(self.end,))
        self.dtype = torch.float32
        self.ops = TORCH
        self.script = script
        self.before_step: Callable[[], None] = lambda: None
        self._seen: dict[int, list[int]] = {}  # by slot: the tokens so far
        self._replies: dict[int, list[int]] = {}  # by slot: what is left to say

    def step(self, batch: StepBatch, views: Sequence[LayerView]) -> Tensor:
        self.before_step()
        starts, wanted = batch.query_starts.tolist(), batch.logit_rows.tolist()
        logits = torch.full((len(wanted), self.config.vocab_size), -100.0)
        logits[:, self._close] = 0.0  # kept from its script, it closes what is open
        for s, slot in enumerate(batch.state_slots.tolist()):
            if batch.context_lens[s] == 0:
                self._seen[slot] = []
                self._replies.pop(slot, None)
            self._seen[slot] += batch.token_ids[starts[s] : starts[s + 1]].tolist()
            last = starts[s + 1] - 1
            if last in wanted:
                logits[wanted.index(last), self._next(slot)] = 100.0
        return logits

    def _next(self, slot: int) -> int:
        if slot not in self._replies:
            self._replies[slot] = list(self.script(self._seen[slot]))
        reply = self._replies[slot]
        return reply.pop(0) if reply else self.end


class Reciter:
    """A script: the reply that `say` was given last, whatever the prompt; prompts are kept in `prompts`."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._reply: list[int] = []
        self.prompts: list[list[int]] = []

    def say(self, xtml: str, *, repeat: int = 1) -> int:
        """From now on answers with this markup, `repeat` times over. Returns its number of tokens."""
        return self.say_ids(self.encode(xtml) * repeat)

    def say_ids(self, ids: Sequence[int]) -> int:
        self._reply = list(ids)
        return len(self._reply)

    def encode(self, xtml: str) -> list[int]:
        return self._tokenizer.encode_segments([Segment(xtml, special=True)])

    def __call__(self, prompt: list[int]) -> list[int]:
        self.prompts.append(list(prompt))
        return self._reply


class Hold:
    """Lets a model make so many steps, then stops it until released."""

    def __init__(self, model: ScriptedModel, after: int = 0) -> None:
        self.reached, self._free = threading.Event(), threading.Event()
        self._steps_left = after
        model.before_step = self._wait

    def _wait(self) -> None:
        self._steps_left -= 1
        if self._steps_left < 0:
            self.reached.set()
            assert self._free.wait(60)

    def release(self) -> None:
        self._free.set()


@dataclass
class Running:
    """A server that is up."""

    url: str
    model: Any
    engine: EngineCore
    service: Service
    server: Server

    def say(self, xtml: str, *, repeat: int = 1) -> int:
        """What the scripted model answers from now on, as markup. Returns its number of tokens."""
        return self.model.script.say(xtml, repeat=repeat)

    def last_prompt(self) -> str:
        """The prompt that the scripted model answered last, control tokens as they are written."""
        return self.engine.tokenizer.decode(self.model.script.prompts[-1])

    def client(self, **options: Any) -> OpenAI:
        given = {"base_url": f"{self.url}/v1", "api_key": "none", "max_retries": 0} | options
        return OpenAI(**given)

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=60, **options)

    def get(self, path: str, **options: Any) -> httpx.Response:
        return httpx.get(self.url + path, timeout=60, **options)

    def post_and_leave(self, path: str, body: Any, after: float | threading.Event) -> None:
        """Sends a request and closes the socket after so many seconds, or once something happened."""
        host, port = self.url.removeprefix("http://").split(":")
        data = json.dumps(body).encode()
        with socket.create_connection((host, int(port))) as connection:
            head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            head += f"Content-Length: {len(data)}\r\n\r\n"
            connection.sendall(head.encode() + data)
            if isinstance(after, threading.Event):
                assert after.wait(30)
            else:
                time.sleep(after)

    def wait_until_idle(self) -> None:
        """Returns when nothing runs, nothing waits and all memory is free; fails if that never happens."""
        for _ in range(2000):
            stats = self.engine.stats
            use = stats.memory
            held = (use.page_bytes_running, use.state_bytes_running)
            if (stats.num_running, stats.num_waiting, *held) == (0, 0, 0, 0):
                return
            time.sleep(0.005)
        raise AssertionError(f"still busy: {self.engine.stats}")


@contextmanager
def running_server(
    model: Any,
    tokenizer: Tokenizer | None,
    *,
    num_pages: int = 512,
    page_size: int = 16,
    num_slots: int = 4,
    drain_seconds: float = 5,
    tracing: Tracing | None = None,
    **options: Any,
) -> Iterator[Running]:
    """Serves `model` on a free port from a thread of this process."""
    plan = small_plan(num_pages, page_size, num_slots)
    engine = EngineCore(
        model, tokenizer, EngineOptions(dtype="float32", enable_prefix_caching=False), plan, poison=True
    )
    async_engine = AsyncEngine(ThreadWorker(engine), tokenizer)
    service = Service(async_engine, ServeOptions(**{"served_model_names": ("tiny", "alias")} | options))
    app = create_app(service, draining=lambda: server.should_exit, tracing=tracing)
    up = threading.Event()
    server = Server(
        app,
        drain_seconds=drain_seconds,
        busy=lambda: service.busy,
        abort_all=async_engine.abort_all,
        on_start=up.set,
        access_log=False,
    )
    with bind("127.0.0.1", 0) as listener:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            assert up.wait(30)
            yield Running(f"http://127.0.0.1:{listener.getsockname()[1]}", model, engine, service, server)
        finally:
            server.should_exit = True
            thread.join()
