"""All that `LLM.generate` may be given, and what it says to everything else."""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from longspan.engine.prompts import parse_prompts
from longspan.errors import RequestError

VOCAB = 50


@pytest.mark.parametrize(
    ("prompts", "expected"),
    [
        ("In", ["In"]),
        ({"prompt": "In"}, ["In"]),
        ({"prompt_token_ids": [1, 2]}, [[1, 2]]),
        ({"prompt_token_ids": np.array([1, 2])}, [[1, 2]]),
        ([1, 2], [[1, 2]]),
        ((1, 2), [[1, 2]]),
        (range(3), [[0, 1, 2]]),
        (array("l", [1, 2]), [[1, 2]]),
        ([np.int64(1), torch.tensor(2), 3], [[1, 2, 3]]),
        (np.array([1, 2], dtype=np.uint8), [[1, 2]]),
        (torch.tensor([1, 2]), [[1, 2]]),
        (torch.tensor([[1, 2], [3, 4]]), [[1, 2], [3, 4]]),
        ([[1, 2], np.array([3]), torch.tensor([4, 5]), range(2)], [[1, 2], [3], [4, 5], [0, 1]]),
        (["a", {"prompt": "b"}, [1], {"prompt_token_ids": (2,)}], ["a", "b", [1], [2]]),
        ((text for text in ("a", "b")), ["a", "b"]),
        ([], []),
        ([[]], [[]]),
    ],
)
def test_one_prompt_or_several_in_every_form(prompts: Any, expected: list) -> None:
    parsed = parse_prompts(prompts, VOCAB)
    assert parsed == expected
    assert all(type(item) is int for prompt in parsed if isinstance(prompt, list) for item in prompt)


@pytest.mark.parametrize(
    ("prompts", "param", "found"),
    [
        (None, "prompts", "`prompts` is None"),
        (7, "prompts", "`prompts` is 7"),
        (1.5, "prompts", "is 1.5"),
        (True, "prompts", "is True"),
        (b"ab", "prompts", "is b'ab'"),
        ([True, False], "prompts", "Item 0 of `prompts` is True"),
        ([1, True], "prompts", "Item 1 of `prompts` is True"),
        ([1, None], "prompts", "Item 1 of `prompts` is None"),
        ([1.0, 2.0], "prompts", "Item 0 of `prompts` is 1.0"),
        (np.array([1.0]), "prompts", "Item 0 of `prompts` is 1.0"),
        (torch.tensor([True]), "prompts", "Item 0 of `prompts` is True"),
        ([VOCAB], "prompts", "`prompts` has the token id 50"),
        ([[1], [-1]], "prompts[1]", "`prompts[1]` has the token id -1"),
        ([[1], [10**5000]], "prompts[1]", "the token id <int too long to show>"),
        ([1, "a"], "prompts[0]", "`prompts[0]` is 1"),
        (["a", None], "prompts[1]", "`prompts[1]` is None"),
        (["a", b"b"], "prompts[1]", "is b'b'"),
        (["a", [[1]]], "prompts[1]", "Item 0 of `prompts[1]` is [1]"),
        ({}, "prompts", "is {}"),
        ({"prompt": None}, "prompts", "is {'prompt': None}"),
        ({"prompt": "a", "prompt_token_ids": [1]}, "prompts", "is {'prompt': 'a'"),
        ({"text": "a"}, "prompts", "is {'text': 'a'}"),
        ({"prompt_token_ids": "ab"}, "prompts.prompt_token_ids", "is 'ab'"),
        ([{"prompt_token_ids": [True]}], "prompts[0].prompt_token_ids", "is True"),
    ],
)
def test_what_is_no_prompt_is_named_and_shown(prompts: Any, param: str, found: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse_prompts(prompts, VOCAB)
    assert caught.value.param == param
    assert found in str(caught.value)
    assert len(str(caught.value)) < 300


SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | st.binary(max_size=3)
)
ANYTHING = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["prompt", "prompt_token_ids", "x"]), inner, max_size=2)
    ),
    max_leaves=6,
)


@given(ANYTHING)
def test_whatever_comes_in_prompts_or_a_request_error_come_out(value: Any) -> None:
    try:
        parsed = parse_prompts(value, VOCAB)
    except RequestError as error:
        assert error.param and error.param.startswith("prompts") and error.remedy
    else:
        for prompt in parsed:
            assert isinstance(prompt, str) or all(type(i) is int and 0 <= i < VOCAB for i in prompt)
