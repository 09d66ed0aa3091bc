"""The body of SGLang's /generate: texts or token ids, and sampling under SGLang's names."""

from __future__ import annotations

from typing import Any, ClassVar, TypeVar

from pydantic import Field

from longspan.engine.request import MAX_CHOICES
from longspan.errors import RequestError
from longspan.serve.body import MAX_PRIORITY, Body, FastList, Name, Refused, illegal, keep_supported
from longspan.structure import StructuredOutputs

_T = TypeVar("_T")
_TEXT_ONLY = Refused("Requests are text or token ids; leave it out.")
_NONE = Refused("It is not available; leave it out or send false.", (False,))
_SAME = {"n", "temperature", "top_p", "top_k", "min_p", "stop", "stop_token_ids", "ignore_eos", "logit_bias"}
_SAME |= {"frequency_penalty", "presence_penalty", "repetition_penalty", "skip_special_tokens"}
_OURS = {name: name for name in _SAME} | {  # SGLang's name -> ours
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "no_stop_trim": "include_stop_str_in_output",
    "sampling_seed": "seed",
}
_STRUCTURES = {"json_schema": "json", "regex": "regex", "ebnf": "grammar"}
_REFUSED_SAMPLING = {
    "spaces_between_special_tokens": Refused("Leave it out: tokens are joined as they are.", (True, False)),
    "stop_regex": Refused("Use `stop`.", ([],)),
    "structural_tag": Refused("Use `json_schema`, `regex` or `ebnf`."),
    "custom_params": Refused("There are no custom logit processors; leave it out."),
}
_WHERE = "sampling_params"
NAMES = {
    **{ours: f"{_WHERE}.{theirs}" for theirs, ours in _OURS.items()},
    **{f"{_WHERE}.{ours}": f"{_WHERE}.{theirs}" for theirs, ours in _STRUCTURES.items()},
    "logprobs": "top_logprobs_num",
    "prompt_logprobs": "top_logprobs_num",
}


class GenerateRequest(Body):
    """POST /generate. Fields of a batch may be lists, with a value for each prompt."""

    refused: ClassVar[dict[str, Refused]] = {
        "input_embeds": _TEXT_ONLY,
        "image_data": _TEXT_ONLY,
        "video_data": _TEXT_ONLY,
        "audio_data": _TEXT_ONLY,
        "modalities": _TEXT_ONLY,
        "lora_path": Refused("There are no adapters; leave it out."),
        "session_params": Refused("Nothing is stored: send the whole text."),
        "custom_logit_processor": Refused("There are no custom logit processors; leave it out."),
        "token_ids_logprob": Refused("Use `top_logprobs_num`."),
        "return_hidden_states": _NONE,
        "return_routed_experts": _NONE,
        "return_bytes": _NONE,
        "return_entropy": _NONE,
        "no_logs": _NONE,
        "require_reasoning": _NONE,
        "background": _NONE,
        "log_metrics": Refused("Metrics are always kept; leave it out or send true.", (True,)),
    }

    model: str | None = None
    text: str | FastList[str] | None = None
    input_ids: list[Any] | None = None  # the engine looks at the ids
    sampling_params: dict[str, Any] | FastList[dict[str, Any]] = Field(default_factory=dict)
    rid: Name | FastList[Name] | None = None
    stream: bool = False
    return_logprob: bool | FastList[bool] = False
    logprob_start_len: int | FastList[int] = -1
    top_logprobs_num: int | FastList[int] = 0
    return_text_in_logprobs: bool = False
    priority: int = Field(default=0, ge=-MAX_PRIORITY, le=MAX_PRIORITY)  # SGLang's: higher goes first
    extra_key: Name = ""  # SGLang's name for a cache salt
    timeout: float | None = Field(default=None, gt=0)

    def prompts(self) -> list[str] | list[list[int]]:
        """One or more. Raises RequestError."""
        if (self.text is None) == (self.input_ids is None):
            raise RequestError("Exactly one of `text` and `input_ids` is expected.", param="text")
        if self.text is not None:
            prompts: list[Any] = self.text if isinstance(self.text, list) else [self.text]
        else:
            ids = self.input_ids or []
            prompts = ids if ids and isinstance(ids[0], list) else [ids]
            wrong = next((i for i, ids in enumerate(prompts) if not _are_ids(ids)), None)
            if wrong is not None:
                what = f"`input_ids` has something else than token ids in prompt {wrong}."
                raise RequestError(
                    what, param="input_ids", remedy="Send a list of ids or a list of such lists."
                )
        if not prompts:
            raise RequestError("`text` is an empty list.", param="text", remedy="Send one text or more.")
        return prompts

    @property
    def is_batch(self) -> bool:
        """The answer is a list, whatever its length."""
        ids = self.input_ids or [0]
        return isinstance(self.text, list) or isinstance(ids[0], list)

    def for_each(self, name: str, value: _T | list[_T], count: int) -> list[_T]:
        """A field's value for each of `count` prompts. Raises RequestError for another number of values."""
        if not isinstance(value, list):
            return [value] * count
        if len(value) != count:
            what = f"`{name}` has {len(value)} values for {count} prompts."
            raise RequestError(what, param=name, remedy="Send one value, or one for each prompt.")
        return value

    def scheduling(self) -> dict[str, Any]:
        return {"priority": -self.priority, "timeout": self.timeout, "cache_salt": self.extra_key}


def _are_ids(ids: Any) -> bool:
    return isinstance(ids, list) and all(type(token) is int for token in ids)


def sampling(params: dict[str, Any]) -> dict[str, Any]:
    """`sampling_params` as arguments of `SamplingParams`. Raises RequestError."""
    known = (*_OURS, *_STRUCTURES)
    given = keep_supported(params, known, _REFUSED_SAMPLING, where=f"{_WHERE}.")
    structure = {_STRUCTURES[name]: given.pop(name) for name in _STRUCTURES if name in given}
    arguments = {_OURS[name]: value for name, value in given.items()}
    bias = arguments.get("logit_bias")
    if isinstance(bias, dict):
        try:
            arguments["logit_bias"] = {int(token): value for token, value in bias.items()}
        except ValueError:
            raise illegal(f"{_WHERE}.logit_bias", "no token id", "an object with token ids as keys") from None
    choices = arguments.setdefault("n", 1)
    if type(choices) is not int or not 1 <= choices <= MAX_CHOICES:
        raise illegal(f"{_WHERE}.n", choices, f"an integer from 1 to {MAX_CHOICES}")
    if structure:
        arguments["structured_outputs"] = StructuredOutputs(**structure, prefix=f"{_WHERE}.")
    return arguments
