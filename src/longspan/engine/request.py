"""What a caller may ask for: `SamplingParams` (vLLM's names and meanings) and `Request`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from longspan.errors import RequestError
from longspan.structure import Structure, StructuredOutputs
from longspan.token_ids import shown, to_token_ids

if TYPE_CHECKING:
    from longspan.engine.readers import Reader

MAX_CHOICES = 128
MAX_COUNT = 2**31 - 1  # of tokens, and the largest token id: more than any model has
MAX_LOGPROBS = 20
MAX_TEMPERATURE = 10_000  # far beyond where all tokens are equally likely
REPETITION_PENALTY = (0.01, 100)  # keeps float32 logits finite
MAX_STOPS = 64
MAX_STOP_LENGTH = 1024  # characters
SEED = (-(2**63), 2**64 - 1)


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen and when a reply ends. Raises RequestError for a value outside its legal range.

    The order is vLLM's: logit_bias, min_tokens, penalties, structure, temperature, min_p, top_k, top_p.
    Temperature 0 is greedy and takes the lowest id on a tie. A seeded request gives the same tokens whatever
    else is running.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0 or -1: all tokens
    min_p: float = 0.0
    presence_penalty: float = 0.0  # over the output
    frequency_penalty: float = 0.0  # over the output
    repetition_penalty: float = 1.0  # over prompt and output
    logit_bias: dict[int, float] | None = None  # -100 bans the id
    seed: int | None = None
    max_tokens: int | None = 16  # None: until the context is full
    min_tokens: int = 0
    stop: str | Sequence[str] | None = None  # always a tuple after construction
    stop_token_ids: Sequence[int] | None = None  # always a tuple after construction
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None  # top-N beside the chosen token, from the unchanged distribution
    prompt_logprobs: int | None = None
    structured_outputs: StructuredOutputs | None = None  # a dict becomes one

    def __post_init__(self) -> None:
        _integer("n", self.n, 1, MAX_CHOICES)
        _number("temperature", self.temperature, 0, MAX_TEMPERATURE)
        _number("top_p", self.top_p, 0, 1, low_is_legal=False)
        _integer("top_k", self.top_k, -1, MAX_COUNT)
        _number("min_p", self.min_p, 0, 1)
        _number("presence_penalty", self.presence_penalty, -2, 2)
        _number("frequency_penalty", self.frequency_penalty, -2, 2)
        _number("repetition_penalty", self.repetition_penalty, *REPETITION_PENALTY)
        if self.seed is not None:
            _integer("seed", self.seed, *SEED)
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 1, MAX_COUNT)
        _integer("min_tokens", self.min_tokens, 0, self.max_tokens or MAX_COUNT)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _integer(name, getattr(self, name), 0, MAX_LOGPROBS)
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise _illegal(name, getattr(self, name), "true or false")
        self._normalise_stops()
        self._normalise_bias()
        if isinstance(self.structured_outputs, dict):
            outputs = StructuredOutputs.from_dict(self.structured_outputs)
            object.__setattr__(self, "structured_outputs", outputs)
        elif not isinstance(self.structured_outputs, StructuredOutputs | None):
            raise _illegal("structured_outputs", self.structured_outputs, "a StructuredOutputs or a dict")

    def validate(self, vocab_size: int) -> None:
        """Raises RequestError for token ids and counts that only make sense with a larger vocabulary."""
        for token_id in self.stop_token_ids or ():
            _integer("stop_token_ids", token_id, 0, vocab_size - 1)
        for token_id in self.logit_bias or ():
            _integer("logit_bias", token_id, 0, vocab_size - 1, what="token id")
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _integer(name, getattr(self, name), 0, min(vocab_size, MAX_LOGPROBS))

    @property
    def penalises(self) -> bool:
        return (self.presence_penalty, self.frequency_penalty, self.repetition_penalty) != (0, 0, 1)

    def _normalise_stops(self) -> None:
        stop = self.stop
        if stop is None or isinstance(stop, str):
            stop = () if stop is None else (stop,)
        if not isinstance(stop, list | tuple) or not all(isinstance(text, str) and text for text in stop):
            raise _illegal("stop", self.stop, "a non-empty string or a list of them")
        if len(stop) > MAX_STOPS:
            raise _too_many("stop", f"{len(stop)} strings", MAX_STOPS)
        longest = max(map(len, stop), default=0)
        if longest > MAX_STOP_LENGTH:
            raise _too_many("stop", f"a string of {longest} characters", MAX_STOP_LENGTH)
        ids = () if self.stop_token_ids is None else self.stop_token_ids
        if not isinstance(ids, list | tuple):
            raise _illegal("stop_token_ids", ids, "a list of token ids")
        if len(ids) > MAX_STOPS:
            raise _too_many("stop_token_ids", f"{len(ids)} token ids", MAX_STOPS)
        for token_id in ids:
            _integer("stop_token_ids", token_id, 0, MAX_COUNT)
        object.__setattr__(self, "stop", tuple(stop))
        object.__setattr__(self, "stop_token_ids", tuple(ids))

    def _normalise_bias(self) -> None:
        if self.logit_bias is None:
            return
        if not isinstance(self.logit_bias, dict):
            raise _illegal("logit_bias", self.logit_bias, "a mapping of token ids to numbers")
        for token_id, bias in self.logit_bias.items():
            _integer("logit_bias", token_id, 0, MAX_COUNT, what="token id")
            _number("logit_bias", bias, -100, 100)
        object.__setattr__(self, "logit_bias", dict(self.logit_bias))


@dataclass(frozen=True)
class Request:
    """One prompt and `params.n` choices, each with a reader and, by `structure`, a constraint of its own."""

    id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    make_reader: Callable[[], Reader]
    structure: Structure | None = None  # None: replies are free
    priority: int = 0  # lower goes first
    timeout: float | None = None  # seconds from arrival; what is unfinished then ends with DeadlineError
    cache_salt: str = ""  # only requests with the same salt share cached prefixes

    def validate(self, vocab_size: int, max_model_len: int) -> None:
        """Raises RequestError where prompt or params don't fit a model and context of these sizes."""
        self.params.validate(vocab_size)
        length = len(self.prompt_token_ids)
        if length == 0:
            raise RequestError(
                "The prompt is empty.",
                param="prompt",
                remedy="Send at least one token; there is no default one.",
            )
        to_token_ids(self.prompt_token_ids, vocab_size)
        room = max_model_len - length
        if room < 1:
            raise RequestError(
                f"The prompt has {length} tokens, max_model_len is {max_model_len}: no room for a reply.",
                param="prompt",
                remedy=f"Shorten it to {max_model_len - 1} tokens or fewer, or raise --max-model-len.",
            )
        for name in ("max_tokens", "min_tokens"):
            wanted = getattr(self.params, name)
            if wanted is not None and wanted > room:
                raise RequestError(
                    f"The prompt has {length} tokens and {name} is {wanted}, {length + wanted} in all, "
                    f"but max_model_len is {max_model_len}.",
                    param=name,
                    remedy=f"Ask for {room} or fewer, shorten the prompt or raise --max-model-len.",
                )


def _illegal(name: str, value: Any, legal: str, what: str = "value") -> RequestError:
    return RequestError(f"`{name}` has the {what} {shown(value)}.", param=name, remedy=f"Legal is {legal}.")


def _too_many(name: str, found: str, most: int) -> RequestError:
    return RequestError(f"`{name}` has {found}.", param=name, remedy=f"Legal are at most {most}.")


def _integer(name: str, value: Any, low: int, high: int, what: str = "value") -> None:
    integer = isinstance(value, int) and not isinstance(value, bool)
    if not integer or not low <= value <= high:
        raise _illegal(name, value, f"an integer from {low} to {high}", what)


def _number(name: str, value: Any, low: float, high: float, low_is_legal: bool = True) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    # NaN is in no range.
    if not number or not low <= value <= high or (value == low and not low_is_legal):
        start = f"at least {low}" if low_is_legal else f"greater than {low}"
        raise _illegal(name, value, f"a number {start} and at most {high}")
