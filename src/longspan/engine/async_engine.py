"""The engine behind asyncio: one thread runs steps, any number of tasks wait for their outputs.

Tasks leave orders (add, abort) in an inbox; only the thread touches the engine. It sleeps while there is
nothing to do. Every output goes to the queue of the task that asked for it, in the loop of that task.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Literal

from longspan.chat import Tokenizer
from longspan.config import ModelConfig
from longspan.engine.engine import Engine
from longspan.engine.output import StepOutput
from longspan.engine.request import Request
from longspan.engine.stats import EngineStats
from longspan.errors import LongspanError, OverloadedError, RequestError
from longspan.memory.plan import MemoryPlan

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class _Client:
    """The task behind one request. What the thread puts into `queue`, errors included, the task takes out."""

    request: Request
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    queue: asyncio.Queue[StepOutput | LongspanError] = field(default_factory=asyncio.Queue)
    unfinished: int = 0  # choices; belongs to the thread

    def send(self, items: list[StepOutput | LongspanError]) -> None:
        try:
            self.loop.call_soon_threadsafe(self._put, items)
        except RuntimeError:
            logger.debug("the loop of request %s is closed", self.request.id)

    def _put(self, items: list[StepOutput | LongspanError]) -> None:
        for item in items:
            self.queue.put_nowait(item)


_Order = tuple[Literal["add", "abort"], _Client]


class AsyncEngine:
    """Owns the thread that owns `engine`. `generate` belongs into a running loop, the rest anywhere."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._wake = threading.Condition()
        # Shared, under `_wake`:
        self._orders: deque[_Order] = deque()
        self._clients: dict[str, _Client] = {}
        self._refusal: LongspanError | None = None  # why no more requests are taken
        self._stopping = False
        # The thread's own:
        self._served: dict[str, _Client] = {}
        self._thread = threading.Thread(target=self._run, name="longspan-engine", daemon=True)
        self._thread.start()

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self._engine.tokenizer

    @property
    def config(self) -> ModelConfig:
        return self._engine.config

    @property
    def max_model_len(self) -> int:
        return self._engine.max_model_len

    @property
    def plan(self) -> MemoryPlan:
        return self._engine.plan

    @property
    def stats(self) -> EngineStats:
        return self._engine.stats

    @property
    def healthy(self) -> bool:
        """The thread is alive and takes requests."""
        return self._thread.is_alive() and self._refusal is None

    def generate(self, request: Request) -> AsyncGenerator[StepOutput, None]:
        """Outputs of all choices as they come. Raises RequestError now if the request can't be served.

        Closing the generator, or cancelling the task that waits for it, aborts the request. A choice that
        fails ends the whole request: its error is raised. Raises OverloadedError while shutting down, and
        LongspanError if the engine's thread is dead.
        """
        self._engine.validate(request)
        return self._outputs(request)

    async def _outputs(self, request: Request) -> AsyncGenerator[StepOutput, None]:
        client = _Client(request)
        self._enter(client)
        unfinished = request.params.n
        try:
            while unfinished:
                item = await client.queue.get()
                if isinstance(item, LongspanError):
                    raise item
                if item.finish is not None:
                    if item.finish.error is not None:
                        raise item.finish.error
                    unfinished -= 1
                yield item
        finally:
            self._leave(client, abort=unfinished > 0)

    def abort(self, request_id: str) -> None:
        """Ends a request from outside: its generator yields the ends of its choices. Ignores unknown ids."""
        with self._wake:
            if request_id in self._clients:
                self._order("abort", self._clients[request_id])

    def abort_all(self) -> None:
        """Ends all requests, as `abort` does."""
        with self._wake:
            for client in self._clients.values():
                self._order("abort", client)

    async def shutdown(self, drain_seconds: float = 0.0) -> None:
        """Takes no more requests, lets the present ones run that long, aborts the rest, ends the thread."""
        with self._wake:
            self._refusal = self._refusal or OverloadedError(
                "The engine is shutting down.", remedy="Send the request elsewhere, or later."
            )
        deadline = time.monotonic() + drain_seconds
        while self._clients and self._thread.is_alive() and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        self.abort_all()
        with self._wake:
            self._stopping = True
            self._wake.notify()
        await asyncio.to_thread(self._thread.join)

    def _enter(self, client: _Client) -> None:
        request_id = client.request.id
        with self._wake:
            if self._refusal is not None:
                raise self._refusal
            if request_id in self._clients:
                raise RequestError(
                    f"A request with the id {request_id!r} is being served.", remedy="Give each its own."
                )
            self._clients[request_id] = client
            self._order("add", client)

    def _leave(self, client: _Client, abort: bool) -> None:
        with self._wake:
            del self._clients[client.request.id]
            if abort:
                self._order("abort", client)

    def _order(self, what: Literal["add", "abort"], client: _Client) -> None:
        self._orders.append((what, client))
        self._wake.notify()

    def _run(self) -> None:
        try:
            while self._take_orders():
                self._deliver(self._engine.step())
        except BaseException:
            logger.critical("the engine's thread died", exc_info=True)
        finally:
            with self._wake:
                self._refusal = self._refusal or _dead()
                clients = list(self._clients.values())
            for client in clients:
                client.send([_dead()])

    def _take_orders(self) -> bool:
        """Waits until there is something to do and carries out the orders; False: stop."""
        with self._wake:
            self._wake.wait_for(lambda: self._orders or self._stopping or self._engine.has_work)
            orders = list(self._orders)
            self._orders.clear()
            stopping = self._stopping
        for what, client in orders:
            if what == "add":
                self._add(client)
            elif self._served.get(client.request.id) is client:
                self._deliver(self._engine.abort(client.request.id))
        return not stopping

    def _add(self, client: _Client) -> None:
        try:
            self._engine.add(client.request)
        except LongspanError as error:
            client.send([error])
            return
        client.unfinished = client.request.params.n
        self._served[client.request.id] = client

    def _deliver(self, outputs: list[StepOutput]) -> None:
        items: dict[str, list[StepOutput | LongspanError]] = {}
        for output in outputs:
            items.setdefault(output.request_id, []).append(output)
            self._served[output.request_id].unfinished -= output.finish is not None
        for request_id, batch in items.items():
            client = self._served[request_id]
            client.send(batch)
            if client.unfinished == 0:
                del self._served[request_id]


def _dead() -> LongspanError:
    return LongspanError("The engine has died and serves nothing.", remedy="Restart it; its log says why.")
