"""Small engines in poisoned memory, and what they answered."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from longspan.chat import Tokenizer
from longspan.engine.core import EngineCore
from longspan.engine.engine import Engine
from longspan.engine.options import EngineOptions
from longspan.engine.output import Finish, StepOutput, TokenLogprobs
from longspan.engine.readers import Reader, TokenReader
from longspan.engine.request import Request, SamplingParams
from longspan.engine.runner import Model
from longspan.memory.plan import MemoryPlan


def small_plan(
    num_pages: int, page_size: int, num_slots: int, max_model_len: int | None = None
) -> MemoryPlan:
    """Slabs of one page each: as many as these pages and the states of all that may run."""
    return MemoryPlan(
        page_size=page_size,
        pages_per_slab=1,
        num_slabs=num_pages + num_slots,
        max_num_seqs=num_slots,
        max_model_len=max_model_len or num_pages * page_size,
    )


def make_engine(
    model: Model,
    tokenizer: Tokenizer | None = None,
    *,
    num_pages: int = 64,
    page_size: int = 4,
    num_slots: int = 8,
    pages_per_slab: int = 1,
    chunk: int = 512,
    max_model_len: int | None = None,
    poison: bool = True,
    swap_bytes: int = 0,
    **options: Any,
) -> Engine:
    """An engine whose free memory is NaN, unless `poison` is false; in one thread, without a prefix cache."""
    given = {"dtype": "float32", "enable_prefix_caching": False, "async_scheduling": False, "max_itl_ms": 0}
    given |= {"max_num_batched_tokens": chunk, "page_size": page_size}
    plan = replace(
        small_plan(num_pages, page_size, num_slots, max_model_len),
        pages_per_slab=pages_per_slab,
        num_slabs=-(-num_pages // pages_per_slab) + num_slots,
        swap_bytes=swap_bytes,
    )
    return Engine(EngineCore(model, tokenizer, EngineOptions(**(given | options)), plan, poison))


def make_request(
    id: str,
    prompt: list[int],
    make_reader: Callable[[], Reader] = TokenReader,
    structure: Any = None,
    **params: Any,
) -> Request:
    """Greedy, 8 tokens and blind to the end of text, unless `params` say otherwise."""
    given = {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True} | params
    return Request(id, prompt, SamplingParams(**given), make_reader, structure)


@dataclass
class Answer:
    """All outputs of one choice, added up."""

    token_ids: list[int] = field(default_factory=list)
    deltas: list[Any] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    finish: Finish | None = None

    def add(self, output: StepOutput) -> None:
        assert self.finish is None, "an output came after the end"
        self.token_ids += output.token_ids
        self.deltas += output.deltas
        self.logprobs += output.logprobs
        self.prompt_logprobs = self.prompt_logprobs or output.prompt_logprobs
        self.finish = output.finish

    @property
    def reason(self) -> str | None:
        return self.finish and self.finish.reason


Answers = dict[tuple[str, int], Answer]


def gather(outputs: Iterable[StepOutput], answers: Answers) -> Answers:
    for output in outputs:
        answers.setdefault((output.request_id, output.index), Answer()).add(output)
    return answers


def run(engine: Engine, *requests: Request) -> Answers:
    """Serves all requests together, from the first step on."""
    for request in requests:
        engine.add(request)
    return finish(engine)


def assert_all_free(engine: Engine) -> None:
    """No sequence holds anything; what the prefix cache keeps adds up with what is free."""
    use = engine.memory.use()
    assert use.page_bytes_running == use.state_bytes_running == use.swap_bytes == 0
    engine.memory.check()


def steps(engine: Engine) -> Iterator[list[StepOutput]]:
    """The outputs of each step until nothing is left. Fails if that is never."""
    for _ in range(20_000):
        if not engine.has_work:
            return
        yield engine.step()
    raise AssertionError(f"no progress: {engine.stats}")


def finish(engine: Engine, answers: Answers | None = None) -> Answers:
    """Steps until nothing is left; all memory must be back then."""
    answers = {} if answers is None else answers
    for outputs in steps(engine):
        gather(outputs, answers)
    assert_all_free(engine)
    return answers
