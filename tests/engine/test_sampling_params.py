from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from support.serving import make_request

from longspan.engine.request import SamplingParams
from longspan.engine.sampler import Sampled, Sampler
from longspan.engine.sequence import Sequence
from longspan.errors import RequestError
from longspan.ops.backend import TORCH

NUMERIC = ("int", "float", "int | None")


def test_defaults_are_vllms() -> None:
    params = SamplingParams()
    assert (params.n, params.temperature, params.top_p, params.top_k, params.min_p) == (1, 1.0, 1.0, 0, 0.0)
    assert (params.max_tokens, params.min_tokens, params.seed, params.logprobs) == (16, 0, None, None)


@pytest.mark.parametrize(
    ("name", "value", "legal"),
    [
        ("n", 0, "integer from 1 to 128"),
        ("n", 1.5, "integer from 1 to 128"),
        ("n", True, "integer from 1 to 128"),
        ("temperature", -0.1, "at least 0"),
        ("temperature", math.nan, "at least 0"),
        ("temperature", math.inf, "at least 0"),
        ("temperature", "hot", "at least 0"),
        ("top_p", 0.0, "greater than 0 and at most 1"),
        ("top_p", 1.01, "greater than 0 and at most 1"),
        ("top_k", -2, "from -1 to"),
        ("min_p", 1.1, "at least 0 and at most 1"),
        ("presence_penalty", 2.1, "at least -2 and at most 2"),
        ("frequency_penalty", -2.1, "at least -2 and at most 2"),
        ("repetition_penalty", 0.0, "at least 0.01 and at most 100"),
        ("seed", "1", "integer from"),
        ("max_tokens", 0, "from 1 to"),
        ("max_tokens", -1, "from 1 to"),
        ("min_tokens", -1, "from 0 to 16"),
        ("min_tokens", 17, "from 0 to 16"),
        ("logprobs", -1, "from 0 to 20"),
        ("prompt_logprobs", 21, "from 0 to 20"),
        ("stop", "", "non-empty string"),
        ("stop", ["a", ""], "non-empty string"),
        ("stop", [3], "non-empty string"),
        ("stop", 3, "non-empty string"),
        ("stop", ["a"] * 65, "65 strings. Legal are at most 64"),
        ("stop", "a" * 1025, "1025 characters. Legal are at most 1024"),
        ("stop_token_ids", [1] * 65, "65 token ids. Legal are at most 64"),
        ("stop_token_ids", 3, "list of token ids"),
        ("stop_token_ids", [-1], "from 0 to"),
        ("stop_token_ids", ["a"], "from 0 to"),
        ("logit_bias", {-1: 1.0}, "from 0 to"),
        ("logit_bias", {3: 101.0}, "at least -100 and at most 100"),
        ("logit_bias", {3: math.nan}, "at least -100 and at most 100"),
        ("logit_bias", [3], "mapping of token ids"),
        ("ignore_eos", 1, "true or false"),
        ("skip_special_tokens", None, "true or false"),
    ],
)
def test_a_value_out_of_range_is_refused_by_name_with_the_legal_range(
    name: str, value: Any, legal: str
) -> None:
    with pytest.raises(RequestError, match=f"`{name}`.*{legal}") as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == name


@pytest.mark.parametrize(
    "good",
    [
        {"temperature": 0},
        {"top_k": -1},
        {"top_p": 1},
        {"max_tokens": 1},
        {"max_tokens": None, "min_tokens": 500},
        {"min_tokens": 16},
        {"seed": -(2**63)},
        {"seed": 2**64 - 1},
        {"logit_bias": {}},
        {"logprobs": 0},
    ],
)
def test_values_at_the_edge_are_taken(good: dict[str, Any]) -> None:
    assert SamplingParams(**good)


NUMBERS = [name for name, field in SamplingParams.__dataclass_fields__.items() if field.type in NUMERIC]
HUGE = {
    "1e30": 10**30,
    "-1e30": -(10**30),
    "2**63": 2**63,
    "2**64": 2**64,
    "10**400": 10**400,
    "-10**400": -(10**400),
    "10**5000": 10**5000,
    "1e300": 1e300,
    "1e-300": 1e-300,
    "5e-324": 5e-324,
    "inf": math.inf,
    "nan": math.nan,
}


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("value", HUGE.values(), ids=HUGE.keys())
def test_a_number_beyond_what_the_machine_holds_is_refused_by_name_or_harmless(
    name: str, value: float
) -> None:
    """Whatever passes must be of use to the sampler's int64 and float32."""
    try:
        params = SamplingParams(**{"max_tokens": None, name: value})
    except RequestError as error:
        assert error.param == name and len(str(error)) < 300
    else:
        kept = torch.tensor(getattr(params, name), dtype=torch.float32)
        assert kept.isfinite()
        seqs = [Sequence(make_request("a", [1], **{name: value}), 0, 1)]
        (sampled,) = Sampler(TORCH, (7,)).sample(torch.linspace(-9, 9, 8)[None], seqs)
        assert isinstance(sampled, Sampled)


def test_stops_become_tuples() -> None:
    assert SamplingParams(stop="a").stop == ("a",)
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")
    assert SamplingParams().stop == ()
    assert SamplingParams(stop_token_ids=[3]).stop_token_ids == (3,)


def test_the_callers_dictionary_is_not_kept() -> None:
    bias = {3: 1.0}
    params = SamplingParams(logit_bias=bias)
    bias[5000] = 2.0
    assert params.logit_bias == {3: 1.0}


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"logit_bias": {15: 1.0}}, "`logit_bias` has the token id 15. Legal is an integer from 0 to 14"),
        ({"stop_token_ids": [15]}, "`stop_token_ids` .* 15. Legal is an integer from 0 to 14"),
        ({"logprobs": 16}, "`logprobs` .* from 0 to 15"),
        ({"prompt_logprobs": 16}, "`prompt_logprobs` .* from 0 to 15"),
    ],
)
def test_ids_outside_of_the_vocabulary_are_refused(params: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        make_request("a", [1], **params).validate(vocab_size=15, max_model_len=50)


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], {}, "The prompt is empty"),
        ([1, 100], {}, "token id 100. The model has ids 0 to 99"),
        ([1, -1], {}, "token id -1"),
        ([1, True], {}, "Item 1 of `prompt` is True. Token ids are one list of integers"),
        ([1.0], {}, r"Item 0 of `prompt` is 1\.0"),
        ([1] * 50, {}, "50 tokens, max_model_len is 50: no room for a reply. Shorten it to 49"),
        ([1] * 51, {"max_tokens": None}, "51 tokens, max_model_len is 50"),
        ([1] * 43, {"max_tokens": 8}, "max_tokens is 8, 51 in all, but max_model_len is 50. Ask for 7"),
        ([1] * 43, {"max_tokens": None, "min_tokens": 8}, "min_tokens is 8, 51 in all"),
    ],
)
def test_prompts_that_do_not_fit_are_refused_with_the_numbers(
    prompt: list[int], params: dict[str, Any], message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        make_request("a", prompt, **params).validate(vocab_size=100, max_model_len=50)


def test_a_prompt_and_a_reply_that_just_fit_are_taken() -> None:
    make_request("a", [1] * 42, max_tokens=8).validate(vocab_size=100, max_model_len=50)
    make_request("a", [1] * 49, max_tokens=None).validate(vocab_size=100, max_model_len=50)
