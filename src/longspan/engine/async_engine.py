"""The engine behind asyncio: any number of tasks of one loop wait for the outputs of a worker.

The core is in the worker, the front is here: what the worker reports is read in the loop and put into the
queue of the task that asked for it. A worker that dies takes its requests with it: each ends with
EngineDeadError.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field, replace

from longspan.chat import Tokenizer
from longspan.config import ModelConfig
from longspan.engine.front import Front
from longspan.engine.output import StepOutput, TokenOutput
from longspan.engine.readers import TokenReader
from longspan.engine.request import Request
from longspan.engine.stats import EngineStats
from longspan.engine.supervisor import STEP_TIMEOUT, State, Supervisor
from longspan.engine.wire import Abort, Add, FlushCache, Report
from longspan.engine.worker import Worker
from longspan.errors import EngineDeadError, OverloadedError, RequestError
from longspan.memory.plan import MemoryPlan


@dataclass(eq=False)
class _Client:
    """The task behind one request."""

    added_by: int  # number of the order
    queue: asyncio.Queue[StepOutput] = field(default_factory=asyncio.Queue)


class AsyncEngine:
    """Serves the tasks of the loop that calls `start`; its properties may be read from anywhere."""

    def __init__(
        self,
        worker: Worker,
        tokenizer: Tokenizer | None,
        *,
        restart: Callable[[], Worker] | None = None,
        step_timeout: float = STEP_TIMEOUT,
        on_death: Callable[[], None] = lambda: None,
    ) -> None:
        """Waits until the worker is ready; raises the error that keeps it from that.

        `restart` makes another worker where one has died. Without it, or when it has been called too often,
        the engine is dead and `on_death` is called. A worker that has work and finishes no step for
        `step_timeout` seconds counts as dead; 0: it may take for ever.
        """
        self.tokenizer = tokenizer
        self._front = Front()
        self._clients: dict[str, _Client] = {}
        self._flushes: deque[asyncio.Future[int]] = deque()
        self._supervisor = Supervisor(worker, restart, step_timeout, self._take, self._lose, on_death)

    async def start(self) -> None:
        """Joins the running loop."""
        await self._supervisor.start()

    @property
    def config(self) -> ModelConfig:
        return self._supervisor.ready.config

    @property
    def plan(self) -> MemoryPlan:
        return self._supervisor.ready.plan

    @property
    def max_model_len(self) -> int:
        return self.plan.max_model_len

    @property
    def stats(self) -> EngineStats:
        """As the worker reported last. Counters begin again with a new worker."""
        return self._supervisor.stats

    @property
    def num_restarts(self) -> int:
        return self._supervisor.num_restarts

    @property
    def busy(self) -> bool:
        """Something is unfinished, here or in the worker."""
        return bool(self._clients) or self._supervisor.busy

    @property
    def healthy(self) -> bool:
        """The worker lives and takes requests."""
        return self._supervisor.state is State.SERVING

    @property
    def dead(self) -> bool:
        """The worker has died for good."""
        return self._supervisor.state is State.DEAD

    @property
    def refusal(self) -> OverloadedError | None:
        """Why no requests are taken, if none are."""
        match self._supervisor.state:
            case State.SERVING:
                return None
            case State.RESTARTING:
                return OverloadedError(
                    "The engine has died and is being restarted.", remedy="Try again soon."
                )
            case State.DRAINING:
                return OverloadedError(
                    "The engine is shutting down.", remedy="Send the request elsewhere, or later."
                )
            case State.DEAD:
                return OverloadedError(
                    "The engine has died and serves nothing.", remedy="Restart it; its log says why."
                )

    def generate(self, request: Request) -> AsyncGenerator[StepOutput, None]:
        """Outputs of all choices as they come. Raises RequestError now if the request can't be served.

        Closing the generator, or cancelling the task that waits for it, aborts the request. A choice that
        fails ends the whole request: its error is raised, EngineDeadError if the worker died. Raises
        OverloadedError where no requests are taken.
        """
        request.validate(self.config.vocab_size, self.max_model_len)
        return self._outputs(request)

    async def _outputs(self, request: Request) -> AsyncGenerator[StepOutput, None]:
        client = self._enter(request)
        unfinished = request.params.n
        try:
            while unfinished:
                output = await client.queue.get()
                if output.finish is not None:
                    if output.finish.error is not None:
                        raise output.finish.error
                    unfinished -= 1
                yield output
        finally:
            self._end(request.id)
            del self._clients[request.id]

    def _enter(self, request: Request) -> _Client:
        self._check_serving()
        if request.id in self._clients:
            raise RequestError(
                f"A request with the id {request.id!r} is being served.", remedy="Give each its own."
            )
        # Readers stay here: a core does without.
        number = self._supervisor.order(Add(replace(request, make_reader=TokenReader)))
        client = self._clients[request.id] = _Client(number)
        self._front.add(request)
        return client

    def _check_serving(self) -> None:
        if refusal := self.refusal:
            raise refusal

    def abort(self, request_id: str) -> None:
        """Ends a request from outside: its generator yields the ends of its choices. Ignores unknown ids."""
        self._deliver(self._end(request_id))

    def abort_all(self) -> None:
        """Ends all requests, as `abort` does."""
        for request_id in self._clients:
            self.abort(request_id)

    def _end(self, request_id: str) -> list[StepOutput]:
        """Ends what is unfinished of a request, here and in the worker -> the ends."""
        steps = self._front.abort(request_id)
        if steps:
            self._supervisor.order(Abort(request_id))
        return steps

    async def flush_cache(self) -> int:
        """`EngineCore.flush_cache`. Raises OverloadedError and EngineDeadError as `generate` does."""
        self._check_serving()
        answer: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._flushes.append(answer)
        self._supervisor.order(FlushCache())
        return await answer

    async def shutdown(self, drain_seconds: float = 0.0) -> None:
        """Takes no more requests, lets the present ones run that long, aborts the rest, ends the worker."""
        if not self.dead:
            self._supervisor.state = State.DRAINING
        deadline = time.monotonic() + drain_seconds
        while self._clients and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        self.abort_all()
        await self._supervisor.close()

    def _take(self, report: Report) -> None:
        for count in report.flushed:
            answer = self._flushes.popleft()
            if not answer.done():  # nobody waits any more
                answer.set_result(count)
        steps, to_end = self._front.read(output for output in report.outputs if self._awaits(output, report))
        for request_id, index in to_end:
            self._supervisor.order(Abort(request_id, index))
        self._deliver(steps)

    def _awaits(self, output: TokenOutput, report: Report) -> bool:
        """It is not of an earlier request with the same id, which the worker had yet to forget."""
        client = self._clients.get(output.request_id)
        return client is not None and client.added_by <= report.num_orders

    def _deliver(self, steps: list[StepOutput]) -> None:
        for step in steps:
            self._clients[step.request_id].queue.put_nowait(step)

    def _lose(self, how: str) -> None:
        """The worker has ended, and with it everything that it was doing."""

        def error() -> EngineDeadError:
            return EngineDeadError(
                f"The engine's {how} while it worked on this request.",
                remedy="Its log says more. Send the request again.",
            )

        for request_id in self._clients:
            self._deliver(self._front.abort(request_id, error()))
        while self._flushes:
            answer = self._flushes.popleft()
            if not answer.done():
                answer.set_exception(error())
