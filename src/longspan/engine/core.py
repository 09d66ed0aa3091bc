"""The core of an engine: schedule, run the model, sample. It knows token ids only; one thread calls it.

Asynchronous, a step runs on a thread of its own. While it runs the next one is scheduled, and its metadata
made, as if nobody's reply ended; outputs are handed out and checkpoints published. Between two steps only
this is done: the chosen tokens are taken, and whose reply has ended is left out. Answers are the same either
way.
"""

from __future__ import annotations

import logging
import os
import random
import time
from bisect import bisect_left
from math import lcm
from pathlib import Path

import torch

from longspan.chat import Tokenizer
from longspan.config import ModelConfig, load_config
from longspan.engine.batch_state import BatchState
from longspan.engine.failures import unexpected
from longspan.engine.options import ELEMENT_BYTES, EngineOptions
from longspan.engine.output import End, TokenOutput
from longspan.engine.pace import Pace
from longspan.engine.request import Request
from longspan.engine.runner import Model, Runner, SequenceResult, Step, StepResult
from longspan.engine.scheduler import CUT, PROMPT_LOGPROB_ROWS, Scheduler
from longspan.engine.sequence import Sequence
from longspan.engine.snapshots import SnapshotPolicy
from longspan.engine.stats import STEP_TOKENS, EngineStats
from longspan.engine.step_thread import StepThread
from longspan.errors import DeadlineError, RequestError
from longspan.memory.memory import Memory
from longspan.memory.plan import MemoryPlan, plan_memory
from longspan.model.loader import load_model
from longspan.ops.backend import select_backend
from longspan.ops.native.threads import default_threads
from longspan.structure import Vocabulary

logger = logging.getLogger(__name__)

LEAST_INTERVAL = 512
"""Tokens between two states kept of a prompt, unless more are asked for: each cuts a step in two."""


class EngineCore:
    """Serves requests of one model with one memory. Not thread-safe."""

    def __init__(
        self,
        model: Model,
        tokenizer: Tokenizer | None,
        options: EngineOptions,
        plan: MemoryPlan | None = None,
        poison: bool = False,
    ) -> None:
        """`plan` None: made from the options, which may raise CapacityError. `poison` is `Memory`'s."""
        self.config = model.config
        self.tokenizer = tokenizer
        self.options = options
        self.plan = plan or _plan(model.config, options, weight_bytes=0)
        self.memory = Memory(
            model.config,
            num_slabs=self.plan.num_slabs,
            pages_per_slab=self.plan.pages_per_slab,
            page_size=self.plan.page_size,
            dtype=model.dtype,
            index_key_dtype=options.index_key_dtype,
            swap_bytes=self.plan.swap_bytes,
            poison=poison,
        )
        self._scheduler = Scheduler(
            self.memory,
            max_num_batched_tokens=options.max_num_batched_tokens,
            max_num_seqs=self.plan.max_num_seqs,
            max_model_len=self.max_model_len,
            snapshots=self._snapshot_policy(model.dtype) if options.enable_prefix_caching else None,
            pace=Pace(options.max_itl_ms / 1000, CUT),
        )
        num_pages = -(-self.max_model_len // self.plan.page_size)
        state = BatchState(self.plan.max_num_seqs, num_pages, self.plan.page_size)
        self._runner = Runner(model, self.memory, state)
        asynchronous = options.async_scheduling
        if asynchronous is None:
            asynchronous = _has_spare_processor(options)
        self._thread = StepThread(self._runner) if asynchronous else None
        self._in_flight: Step | None = None
        self._vocabulary = Vocabulary(tokenizer, model.config.eos_token_ids) if tokenizer else None
        self._running: dict[str, list[Sequence]] = {}  # unfinished choices of each request
        self._num_sequences = 0
        self._has_deadlines = False
        self._seeds = random.Random(options.seed)
        self._counters = _Counters()

    def _snapshot_policy(self, dtype: torch.dtype) -> SnapshotPolicy:
        """Without a given interval, states take as much memory as the pages between them."""
        page_size = self.plan.page_size
        # In float32 no cut changes a bit.
        grid = page_size if dtype == torch.float32 else lcm(page_size, CUT)
        interval = self.options.snapshot_interval or max(LEAST_INTERVAL, self.plan.pages_per_slab * page_size)
        return SnapshotPolicy(grid, -(-interval // grid) * grid)

    @classmethod
    def from_path(cls, path: str | Path, options: EngineOptions) -> EngineCore:
        """Everything from a checkpoint directory. What can't be met is refused before weights are read."""
        config = load_config(path)
        plan = _plan(config, options, _weight_bytes(Path(path)))
        tokenizer = Tokenizer.find(path)
        if tokenizer:
            tokenizer.check_vocab_size(config.vocab_size)
        select_backend(options.backend).use_threads(options.threads, options.cpus)
        model = load_model(path, dtype=options.dtype, backend=options.backend)
        core = cls(model, tokenizer, options, plan)
        if core._vocabulary:
            core._vocabulary.prepare()
        return core

    @property
    def max_model_len(self) -> int:
        return self.plan.max_model_len

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work

    @property
    def model_seconds(self) -> float:
        """Spent in the model and the sampler so far."""
        return self._counters.model_seconds

    @property
    def stats(self) -> EngineStats:
        scheduler, counters, use = self._scheduler, self._counters, self.memory.use()
        return EngineStats(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            num_swapped=sum(seq.swapped is not None for seq in scheduler.waiting),
            cache_usage=(use.page_bytes_running + use.state_bytes_running) / use.total_bytes,
            memory=use,
            num_checkpoints=self.memory.cache.num_checkpoints,
            num_preemptions=scheduler.num_preemptions,
            num_swaps=scheduler.num_swaps,
            num_evictions=self.memory.cache.num_evictions,
            prompt_tokens=counters.prompt_tokens,
            generation_tokens=counters.generation_tokens,
            prefix_queries=scheduler.prefix_queries,
            prefix_hits=scheduler.prefix_hits,
            num_steps=counters.num_steps,
            step_tokens=tuple(counters.step_tokens),
            num_step_tokens=counters.num_step_tokens,
            step_seconds=counters.step_seconds,
            model_seconds=counters.model_seconds,
        )

    def validate(self, request: Request) -> None:
        """Raises RequestError if the request can't be served. Any thread may call: it reads no state."""
        request.validate(self.config.vocab_size, self.max_model_len)
        if request.structure and not self._vocabulary:
            raise RequestError(
                "This checkpoint has no tokenizer, so nobody can tell what tokens obey a structure.",
                param="structured_outputs",
                remedy="Leave it out.",
            )

    def add(self, request: Request) -> None:
        """Queues a request. Raises RequestError if it can't be served as asked."""
        self.validate(request)
        if request.id in self._running:
            raise RequestError(
                f"A request with the id {request.id!r} is being served.", remedy="Give each its own."
            )
        seed = request.params.seed
        if seed is None:
            seed = self._seeds.getrandbits(64)
        order, self._num_sequences = self._num_sequences, self._num_sequences + request.params.n
        self._has_deadlines |= request.timeout is not None
        seqs = [Sequence(request, i, seed, order + i, self._vocabulary) for i in range(request.params.n)]
        self._running[request.id] = seqs
        for seq in seqs:
            self._scheduler.add(seq)

    def abort(self, request_id: str, index: int | None = None) -> None:
        """Forgets a request or one choice of it; memory is free at once. Ended before is no error."""
        for seq in list(self._running.get(request_id, ())):
            if index in (None, seq.index):
                self._forget(seq)
        self._rest_if_idle()

    def flush_cache(self) -> int:
        """Gives up all checkpoints of the prefix cache that nobody uses; how many."""
        count = self.memory.cache.clear()
        self._rest_if_idle()
        return count

    def close(self) -> None:
        """Ends the thread. Nothing may be called after it."""
        if self._thread:
            if self._in_flight:
                self._thread.wait()
            self._thread.stop()

    def step(self) -> list[TokenOutput]:
        """One step of the model for whatever is there; outputs of the choices that got a token or ended."""
        began = time.perf_counter()
        outputs = self._expire()
        if self._thread:
            result = self._step_beside(self._thread, outputs)
        else:
            step = self._prepare()
            result = self._runner.run(step, self.memory.take_edits()) if step else None
            outputs += self._finish(self._accept(result)) if result else []
        if result:
            self._count(result, time.perf_counter() - began)
        self._rest_if_idle()
        return outputs

    def _step_beside(self, thread: StepThread, outputs: list[TokenOutput]) -> StepResult | None:
        """Waits for the step in flight and starts the next one, which was prepared meanwhile."""
        if self._in_flight is None:
            self._launch(thread, self._prepare())
            if self._in_flight is None:
                return None
        following = self._prepare()
        result = thread.wait()
        self._in_flight = None
        accepted = self._accept(result)
        self._launch(thread, self._without_ended(following))
        outputs += self._finish(accepted)
        return result

    def _prepare(self) -> Step | None:
        scheduled = self._scheduler.schedule()
        return self._runner.prepare(scheduled) if scheduled else None

    def _launch(self, thread: StepThread, step: Step | None) -> None:
        if step:
            thread.start(step, self.memory.take_edits())
            self._in_flight = step

    def _without_ended(self, step: Step | None) -> Step | None:
        """The step without sequences that ended after it was prepared."""
        if step is None or not any(item.seq.ended for item in step.scheduled):
            return step
        for item in step.scheduled:
            if item.seq.ended and item.state_slot is not None:
                self.memory.cancel(item.state_slot)
        going_on = [item for item in step.scheduled if not item.seq.ended]
        return self._runner.prepare(going_on) if going_on else None

    def _accept(self, result: StepResult) -> list[tuple[SequenceResult, End | None]]:
        """Adds the chosen tokens to their sequences; whose reply ends by it. No more, for time presses."""
        accepted = []
        for one in result.sequences:
            seq, end = one.item.seq, None
            if seq.ended:
                accepted.append((one, None))
                continue
            seq.num_in_flight -= one.item.samples
            if one.error:
                end = End("error", error=one.error)
            elif one.sampled:
                try:
                    seq.append(one.sampled.token_id)
                    end = self._end_after(seq, one.sampled.token_id)
                except RequestError as error:
                    end = End("error", error=error)
                except Exception as error:
                    logger.exception("a constraint failed")
                    end = End("error", error=unexpected(error))
            seq.ended = end is not None
            accepted.append((one, end))
        return accepted

    def _finish(self, accepted: list[tuple[SequenceResult, End | None]]) -> list[TokenOutput]:
        """Publishes what is to be kept, frees what ended, and says what came of it."""
        outputs = []
        for one, end in accepted:
            seq = one.item.seq
            self._publish(one, failed=end is not None and end.error is not None)
            if one.prompt_logprobs and seq.prompt_logprobs is not None:
                seq.prompt_logprobs += one.prompt_logprobs
            if seq.ended and end is None:
                continue  # it was given up while the step ran
            if end:
                self._forget(seq, scrub=end.error is not None)
            if one.sampled is None and end is None:
                continue
            sampled = None if end and end.error else one.sampled
            if sampled:
                self._counters.prompt_tokens += seq.num_prompt_tokens if seq.num_output_tokens == 1 else 0
                self._counters.generation_tokens += 1
            outputs.append(
                TokenOutput(
                    request_id=seq.request.id,
                    index=seq.index,
                    token_ids=[sampled.token_id] if sampled else [],
                    time=time.monotonic(),
                    logprobs=[sampled.logprobs] if sampled and sampled.logprobs is not None else [],
                    started=seq.take_started(),
                    end=end,
                )
            )
        return outputs

    def _publish(self, one: SequenceResult, failed: bool) -> None:
        """Makes a checkpoint of the state that the step has kept, if it has."""
        item, seq = one.item, one.item.seq
        if item.state_slot is None:
            return
        seq.planned_states.discard(item.end)
        item.memory.is_sound &= one.keeps_state
        if failed or not item.memory.is_sound:
            self.memory.cancel(item.state_slot)
            return
        digests = list(seq.digests(item.end, self.memory.page_size))
        checkpoint = self.memory.publish(item.memory, digests, item.state_slot)
        if checkpoint is None or item.end <= seq.num_prompt_tokens:
            return
        if seq.rolling and not self._scheduler.is_lasting(seq.rolling):
            self.memory.cache.drop(seq.rolling)
        seq.rolling = checkpoint

    def _expire(self) -> list[TokenOutput]:
        """Ends what was not finished in time."""
        if not self._has_deadlines:
            return []
        now = time.monotonic()
        waiting, running = self._scheduler.waiting, self._scheduler.running
        late = [seq for seq in (*waiting, *running) if seq.deadline is not None and seq.deadline < now]
        outputs = []
        for seq in late:
            what = f"The request was not finished within its timeout of {seq.request.timeout:g} seconds."
            error = DeadlineError(what, remedy="Give it more time, ask for fewer tokens or try again later.")
            self._forget(seq)
            outputs.append(
                TokenOutput(
                    seq.request.id,
                    seq.index,
                    [],
                    now,
                    started=seq.take_started(),
                    end=End("error", error=error),
                )
            )
        return outputs

    def _end_after(self, seq: Sequence, token_id: int) -> End | None:
        if token_id in self.config.eos_token_ids and not seq.params.ignore_eos:
            return End("stop")
        if token_id in (seq.params.stop_token_ids or ()):
            return End("stop", stop_token=token_id)
        if seq.num_output_tokens == seq.params.max_tokens or len(seq.tokens) == self.max_model_len:
            return End("length")
        return None

    def _forget(self, seq: Sequence, scrub: bool = False) -> None:
        """Frees what a choice holds. After an error its memory may hold NaN."""
        seq.ended = True
        self._scheduler.remove(seq, scrub)
        unfinished = self._running[seq.request.id]
        unfinished.remove(seq)
        if not unfinished:
            del self._running[seq.request.id]

    def _rest_if_idle(self) -> None:
        """With nothing to do, what is left to do to memory is done, and all of it must be accounted for."""
        if self._scheduler.has_work:
            return
        if self._in_flight and self._thread:
            step, self._in_flight = self._in_flight, None
            self._thread.wait()
            for item in step.scheduled:
                if item.state_slot is not None:
                    self.memory.cancel(item.state_slot)
        self.memory.settle()
        self.memory.audit()

    def _count(self, result: StepResult, seconds: float) -> None:
        counters = self._counters
        num_tokens = sum(one.item.end - one.item.start for one in result.sequences)
        counters.num_steps += 1
        counters.step_tokens[bisect_left(STEP_TOKENS, num_tokens)] += 1
        counters.num_step_tokens += num_tokens
        counters.step_seconds += seconds
        counters.model_seconds += result.seconds
        if num_tokens > len(result.sequences):
            self._scheduler.pace.observe(num_tokens, result.seconds)


class _Counters:
    """What an engine has done so far."""

    def __init__(self) -> None:
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.num_steps = 0
        self.step_tokens = [0] * (len(STEP_TOKENS) + 1)
        self.num_step_tokens = 0
        self.step_seconds = 0.0
        self.model_seconds = 0.0


def _has_spare_processor(options: EngineOptions) -> bool:
    """Preparing a step beside another one gains nothing where it takes a processor from the operators."""
    threads = options.threads or len(options.cpus) or default_threads()
    return len(os.sched_getaffinity(0)) > threads


def _plan(config: ModelConfig, options: EngineOptions, weight_bytes: int) -> MemoryPlan:
    return plan_memory(
        config,
        element_bytes=ELEMENT_BYTES[options.dtype],
        index_key_dtype=options.index_key_dtype,
        page_size=options.page_size,
        max_num_batched_tokens=options.max_num_batched_tokens,
        extra_logit_rows=PROMPT_LOGPROB_ROWS,
        max_num_seqs=options.max_num_seqs,
        max_model_len=options.max_model_len,
        cache_gib=options.cache_gib,
        swap_gib=options.swap_gib,
        weight_bytes=weight_bytes,
    )


def _weight_bytes(path: Path) -> int:
    return sum(file.stat().st_size for file in path.glob("*.safetensors"))
