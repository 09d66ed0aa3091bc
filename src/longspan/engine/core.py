"""The core of an engine: schedule, run the model, sample. It knows token ids only; one thread calls it."""

from __future__ import annotations

import logging
import random
import time
from pathlib import Path

import torch

from longspan.chat import Tokenizer
from longspan.config import ModelConfig, load_config
from longspan.engine.failures import non_finite, unexpected
from longspan.engine.options import ELEMENT_BYTES, EngineOptions
from longspan.engine.output import End, TokenOutput
from longspan.engine.request import Request
from longspan.engine.runner import Model, Runner, SequenceLogits
from longspan.engine.sampler import Sampled, Sampler, token_logprobs
from longspan.engine.scheduler import PROMPT_LOGPROB_ROWS, Scheduler
from longspan.engine.sequence import Sequence
from longspan.engine.stats import EngineStats
from longspan.errors import LongspanError, RequestError
from longspan.memory.memory import Memory
from longspan.memory.plan import MemoryPlan, plan_memory
from longspan.model.loader import load_model
from longspan.ops.backend import select_backend
from longspan.structure import Vocabulary

logger = logging.getLogger(__name__)


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
            self.plan.num_pages,
            self.plan.page_size,
            self.plan.num_slots,
            model.dtype,
            options.index_key_dtype,
            poison,
        )
        self._scheduler = Scheduler(self.memory, options.max_num_batched_tokens)
        self._runner = Runner(model, self.memory)
        self._sampler = Sampler(model.ops, model.config.eos_token_ids)
        self._vocabulary = Vocabulary(tokenizer, model.config.eos_token_ids) if tokenizer else None
        self._running: dict[str, list[Sequence]] = {}  # unfinished choices of each request
        self._seeds = random.Random(options.seed)
        self._prompt_tokens = 0
        self._generation_tokens = 0

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
        return cls(model, tokenizer, options, plan)

    @property
    def max_model_len(self) -> int:
        return self.plan.max_model_len

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work

    @property
    def stats(self) -> EngineStats:
        return EngineStats(
            num_running=len(self._scheduler.running),
            num_waiting=len(self._scheduler.waiting),
            cache_usage=1 - self.memory.free_pages / self.memory.num_pages,
            num_preemptions=self._scheduler.num_preemptions,
            prompt_tokens=self._prompt_tokens,
            generation_tokens=self._generation_tokens,
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
        seqs = [Sequence(request, index, seed, self._vocabulary) for index in range(request.params.n)]
        self._running[request.id] = seqs
        for seq in seqs:
            self._scheduler.add(seq)

    def abort(self, request_id: str, index: int | None = None) -> None:
        """Forgets a request or one choice of it; memory is free at once. Ended before is no error."""
        for seq in list(self._running.get(request_id, ())):
            if index in (None, seq.index):
                self._forget(seq)

    def flush_cache(self) -> int:
        """Empties the prefix cache -> how many tokens it held."""
        return 0

    @torch.inference_mode()
    def step(self) -> list[TokenOutput]:
        """One step of the model for whatever is there; outputs of the choices that got a token or ended."""
        scheduled = self._scheduler.schedule()
        if not scheduled:
            return []
        try:
            results = self._runner.run(scheduled)
        except Exception as error:
            # Whatever was half done to these sequences, the others have not been touched.
            logger.exception("a step failed")
            outputs = [self._fail(item.seq, unexpected(error)) for item in scheduled]
        else:
            outputs = self._take(results)
        if not self.has_work:
            self.memory.check()
        return outputs

    def _take(self, results: list[SequenceLogits]) -> list[TokenOutput]:
        """What each sequence makes of its logits. From here on a failure is that of one sequence."""
        outputs, ready = [], []
        for result in results:
            error = _collect_prompt_logprobs(result) if result.finite else non_finite()
            if error:
                outputs.append(self._fail(result.seq, error))
            elif result.next_token is not None:
                ready.append(result)
        sampled = self._sample(ready)
        return outputs + [self._accept(r.seq, token) for r, token in zip(ready, sampled, strict=True)]

    def _sample(self, ready: list[SequenceLogits]) -> list[Sampled | LongspanError]:
        rows = [result.next_token for result in ready if result.next_token is not None]
        return self._sampler.sample(torch.stack(rows), [result.seq for result in ready]) if rows else []

    def _accept(self, seq: Sequence, sampled: Sampled | LongspanError) -> TokenOutput:
        """Adds a token to a choice, which alone fails if none could be chosen or its constraint fails."""
        if isinstance(sampled, LongspanError):
            return self._fail(seq, sampled)
        token_id, is_first = sampled.token_id, seq.num_output_tokens == 0
        try:
            seq.append(token_id)
        except Exception as error:
            logger.exception("a constraint failed")
            return self._fail(seq, unexpected(error))
        self._prompt_tokens += seq.num_prompt_tokens if is_first else 0
        self._generation_tokens += 1
        end = self._end_after(seq, token_id)
        if end:
            self._forget(seq)
        return TokenOutput(
            request_id=seq.request.id,
            index=seq.index,
            token_ids=[token_id],
            time=time.monotonic(),
            logprobs=[] if sampled.logprobs is None else [sampled.logprobs],
            started=seq.take_started(),
            end=end,
        )

    def _end_after(self, seq: Sequence, token_id: int) -> End | None:
        if token_id in self.config.eos_token_ids and not seq.params.ignore_eos:
            return End("stop")
        if token_id in (seq.params.stop_token_ids or ()):
            return End("stop", stop_token=token_id)
        if seq.num_output_tokens == seq.params.max_tokens or len(seq.tokens) == self.max_model_len:
            return End("length")
        return None

    def _fail(self, seq: Sequence, error: LongspanError) -> TokenOutput:
        """Ends a choice with an error; its memory may hold NaN."""
        self._forget(seq, scrub=True)
        end = End("error", error=error)
        return TokenOutput(
            seq.request.id, seq.index, [], time.monotonic(), started=seq.take_started(), end=end
        )

    def _forget(self, seq: Sequence, scrub: bool = False) -> None:
        self._scheduler.remove(seq, scrub)
        unfinished = self._running[seq.request.id]
        unfinished.remove(seq)
        if not unfinished:
            del self._running[seq.request.id]


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
        weight_bytes=weight_bytes,
    )


def _weight_bytes(path: Path) -> int:
    return sum(file.stat().st_size for file in path.glob("*.safetensors"))


def _collect_prompt_logprobs(result: SequenceLogits) -> LongspanError | None:
    """Adds those of this step to the sequence; an error if that fails."""
    seq = result.seq
    if seq.prompt_logprobs is None or not len(result.prompt):
        return None
    start = len(seq.prompt_logprobs)
    targets = seq.tokens[start : start + len(result.prompt)]
    try:
        seq.prompt_logprobs += token_logprobs(result.prompt, targets, seq.params.prompt_logprobs or 0)
    except Exception as error:
        logger.exception("the log-probabilities of a prompt failed")
        return unexpected(error)
    return None
