"""The engine as the routes see it: names, admission, metering, and runs that clean up after themselves."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass

from longspan.engine.async_engine import AsyncEngine
from longspan.engine.output import StepOutput
from longspan.engine.readers import TokenReader
from longspan.engine.request import Request, SamplingParams
from longspan.errors import CheckpointError, DeadlineError, OverloadedError, RequestError
from longspan.memory.plan import MemoryPlan
from longspan.serve.body import MAX_PRIORITY
from longspan.serve.failures import AbortedError, QueueFullError, UnknownModelError
from longspan.serve.metrics import Meter, Metrics
from longspan.serve.record import remember
from longspan.structure import Vocabulary

PROBE_SECONDS = 20


@dataclass(frozen=True)
class ServeOptions:
    """Names and limits of one server."""

    served_model_names: tuple[str, ...]
    api_key: str | None = None
    max_queue: int = 256  # choices that may wait beyond those that can run
    max_body_bytes: int = 16 * 2**20
    allowed_origins: tuple[str, ...] = ()  # of web pages that may use the API; "*": of all
    model_path: str | None = None  # of the checkpoint, for SGLang's tools


def engine_id(name: str) -> str:
    """An id for the engine, which takes each but once: clients may give one name to several requests."""
    return f"{name}-{secrets.token_hex(8)}"


class Service:
    """Every route reaches the engine through `run`."""

    def __init__(self, engine: AsyncEngine, options: ServeOptions) -> None:
        """Raises CheckpointError if the engine has no tokenizer."""
        if engine.tokenizer is None:
            raise CheckpointError(
                "The checkpoint has no tokenizer, so nothing could be read or said.",
                remedy="Put its tiktoken.model and tokenizer_config.json beside the weights.",
            )
        self.engine = engine
        self.tokenizer = engine.tokenizer
        self.vocabulary = Vocabulary(self.tokenizer, engine.config.eos_token_ids)
        self.vocabulary.prepare()
        self.options = options
        model = options.served_model_names[0]
        self.metrics = Metrics(model, lambda: engine.stats, _cache_config(engine.plan))
        self._capacity = engine.plan.max_num_seqs + options.max_queue  # choices that run or wait
        self._admitted = 0
        self._running: set[str] = set()  # ids of the admitted requests
        self._aborted: set[str] = set()  # those of them that `abort` ended
        tokens = map(self.tokenizer.token_bytes, range(self.tokenizer.vocab_size))
        self._max_bytes = engine.max_model_len * max(map(len, tokens))

    @property
    def busy(self) -> bool:
        """Something runs or waits."""
        return self._admitted > 0

    def model_name(self, asked: str | None) -> str:
        """The name to answer with. Raises UnknownModelError."""
        names = self.options.served_model_names
        if asked is None or asked in names:
            return asked or names[0]
        raise UnknownModelError(
            f"The model {asked!r} is not served here.", param="model", remedy=f"Served: {', '.join(names)}."
        )

    def check(self, requests: list[Request]) -> None:
        """Raises RequestError if the engine could never serve one of these requests."""
        for request in requests:
            request.validate(self.engine.config.vocab_size, self.engine.max_model_len)

    def check_text(self, num_characters: int) -> None:
        """Raises RequestError for a text that is too long however it is encoded: that spares encoding it."""
        if num_characters > self._max_bytes:
            raise RequestError(
                f"The prompt has {num_characters} characters, and more than {self._max_bytes} never fit "
                f"max_model_len, which is {self.engine.max_model_len} tokens.",
                param="prompt",
                remedy="Shorten it, or raise --max-model-len.",
            )

    def check_choices(self, wanted: int) -> None:
        """Raises RequestError for more choices in a request than the server ever takes."""
        if wanted > self._capacity:
            raise RequestError(
                f"{wanted} choices are asked for, and this server takes {self._capacity} at a time.",
                param="n",
                remedy="Ask for fewer, in several requests, or raise --max-queue.",
            )

    @asynccontextmanager
    async def run(
        self, requests: list[Request], *, tells_aborts: bool = False
    ) -> AsyncIterator[AsyncIterator[StepOutput]]:
        """Admits the requests and runs them together; gives their outputs as they come.

        Leaving the block, for whatever reason, ends what still runs. Raises QueueFullError at once. Iterating
        raises the error of a choice that failed, OverloadedError if the engine gave it up, and AbortedError
        if `abort` ended it, unless `tells_aborts`: that is an output like any other then.
        """
        if refusal := self.engine.refusal:
            raise refusal
        wanted = sum(request.params.n for request in requests)
        if self._admitted + wanted > self._capacity:
            raise QueueFullError(
                f"{self._admitted} choices are running or waiting, and this server takes {self._capacity}.",
                remedy="Try again later, or raise --max-queue.",
            )
        self._admitted += wanted
        self._running |= {request.id for request in requests}
        meters = {request.id: self.metrics.meter(request) for request in requests}
        remember(meters.values())
        error = None
        try:
            async with aclosing(_merge([self.engine.generate(request) for request in requests])) as outputs:
                yield self._watched(meters, outputs, tells_aborts)
        except Exception as caught:
            error = caught
            raise
        finally:
            self._admitted -= wanted
            for ids in (self._running, self._aborted):
                ids.difference_update(request.id for request in requests)
            for meter in meters.values():
                meter.close(error)

    async def _watched(
        self, meters: dict[str, Meter], outputs: AsyncIterator[StepOutput], tells_aborts: bool
    ) -> AsyncIterator[StepOutput]:
        async for step in outputs:
            meters[step.request_id].observe(step)
            if step.finish and step.finish.reason == "abort":
                if step.request_id not in self._aborted:
                    raise OverloadedError("The server is shutting down, so it gave up on this request.")
                if not tells_aborts:
                    raise AbortedError("The request was ended by /abort_request.")
            yield step

    def abort(self, name: str | None) -> int:
        """Ends the requests of this name (see `engine_id`), or all of them; returns how many."""
        wanted = {it for it in self._running if name is None or it.rpartition("-")[0] == name} - self._aborted
        self._aborted |= wanted
        for request_id in wanted:
            self.engine.abort(request_id)
        return len(wanted)

    async def probe(self) -> None:
        """Returns when the engine has generated a token, of one more request before all others or of any.

        Raises what ended that request; DeadlineError if nothing came in time.
        """
        before = self.engine.stats.generation_tokens
        params = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)
        request = Request(engine_id("probe"), [0], params, TokenReader, priority=-MAX_PRIORITY)
        try:
            async with asyncio.timeout(PROBE_SECONDS), aclosing(self.engine.generate(request)) as outputs:
                async for _ in outputs:
                    pass
        except TimeoutError:
            if self.engine.stats.generation_tokens == before:
                raise DeadlineError(
                    f"The engine has generated nothing for {PROBE_SECONDS} seconds."
                ) from None


def _cache_config(plan: MemoryPlan) -> dict[str, str]:
    """Under vLLM's names; routers and autoscalers compute from them."""
    return {"block_size": str(plan.page_size), "num_gpu_blocks": str(plan.num_slabs * plan.pages_per_slab)}


async def _merge(sources: list[AsyncGenerator[StepOutput, None]]) -> AsyncGenerator[StepOutput, None]:
    """Items of all sources as they come. Closing it closes them all."""
    if len(sources) == 1:
        async with aclosing(sources[0]) as source:
            async for item in source:
                yield item
        return
    items: asyncio.Queue[StepOutput | None] = asyncio.Queue()

    async def pump(source: AsyncGenerator[StepOutput, None]) -> None:
        async with aclosing(source):
            async for item in source:
                items.put_nowait(item)

    pumps = [asyncio.create_task(pump(source)) for source in sources]
    everything = asyncio.gather(*pumps)
    everything.add_done_callback(lambda _: items.put_nowait(None))
    try:
        while (item := await items.get()) is not None:
            yield item
        await everything
    finally:
        everything.cancel()
        await asyncio.gather(everything, *pumps, return_exceptions=True)
