"""/v1/completions, /tokenize and /detokenize."""

from __future__ import annotations

from typing import Any

import pytest
from support.scripted import Running

PATH = "/v1/completions"


def joined(server: Running, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Choices of a streamed completion put together again."""
    choices: dict[int, dict[str, Any]] = {}
    for chunk in server.client().completions.create(**({"model": "tiny", "stream": True} | body)):
        for part in chunk.choices:
            choice = choices.setdefault(part.index, {"text": "", "finish_reason": None, "tokens": []})
            assert choice["finish_reason"] is None
            choice["text"] += part.text
            choice["finish_reason"] = part.finish_reason
            choice["tokens"] += part.logprobs.tokens if part.logprobs else []
    return [choices[index] for index in sorted(choices)]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"max_tokens": 3},
        {"n": 2, "max_tokens": 50},
        {"echo": True},
        {"prompt": ["One", "Two"], "n": 2},
        {"prompt": [[1, 2], [3]], "max_tokens": 50},
        {"stop": ["heaven", "zzz"], "max_tokens": 50},
        {"stop": "heaven", "max_tokens": 50, "extra_body": {"include_stop_str_in_output": True}},
        {"logprobs": 2},
        {"max_tokens": 60, "extra_body": {"ignore_eos": True, "skip_special_tokens": False}},
    ],
)
def test_a_stream_adds_up_to_the_whole_answer(server: Running, fields: dict[str, Any]) -> None:
    server.say("God created the heaven and 하늘 👩‍👩‍👧 the earth.")
    body = {"model": "tiny", "prompt": "In the beginning"} | fields
    whole = server.client().completions.create(**body)
    expected = [
        {
            "text": choice.text,
            "finish_reason": choice.finish_reason,
            "tokens": choice.logprobs.tokens if choice.logprobs else [],
        }
        for choice in whole.choices
    ]
    assert joined(server, body) == expected


def test_choices_are_numbered_prompt_by_prompt(server: Running) -> None:
    server.say("x")
    body = {"prompt": ["One ", "Two "], "n": 2, "echo": True}
    choices = server.post(PATH, body).json()["choices"]
    assert [(c["index"], c["text"]) for c in choices] == [
        (0, "One x"),
        (1, "One x"),
        (2, "Two x"),
        (3, "Two x"),
    ]


def test_the_default_length_is_16_tokens(server: Running) -> None:
    server.say(" word", repeat=40)
    answer = server.post(PATH, {"prompt": "x"}).json()
    assert answer["usage"]["completion_tokens"] == 16
    assert answer["choices"][0]["finish_reason"] == "length"


def test_special_looking_text_in_a_prompt_is_plain_text(server: Running) -> None:
    server.say("x")
    server.post(PATH, {"prompt": "<|end_of_msg|>"})
    assert max(server.model.script.prompts[-1]) < server.engine.tokenizer.n_base


def test_echoed_logprobs_start_with_the_prompt_which_has_none_for_its_first_token(server: Running) -> None:
    server.say(" earth")
    prompt = server.engine.tokenizer.encode("the heaven and the")
    body = {"prompt": prompt, "echo": True, "logprobs": 1, "max_tokens": 1}
    choice = server.post(PATH, body).json()["choices"][0]
    columns = choice["logprobs"]
    assert columns["token_logprobs"][0] is None and columns["top_logprobs"][0] is None
    assert all(value <= 0 for value in columns["token_logprobs"][1:])
    assert len(columns["tokens"]) == len(prompt) + 1
    for token, offset in zip(columns["tokens"], columns["text_offset"], strict=True):
        assert choice["text"][offset : offset + len(token)] == token


def test_prompt_logprobs_come_in_vllms_shape(server: Running) -> None:
    server.say(" earth")
    body = {"prompt": [5, 6, 7], "prompt_logprobs": 1, "max_tokens": 1}
    first, *rest = server.post(PATH, body).json()["choices"][0]["prompt_logprobs"]
    assert first is None and len(rest) == 2
    for token, entry in zip((6, 7), rest, strict=True):
        assert set(entry[str(token)]) == {"logprob", "rank", "decoded_token"}


def test_stop_token_ids_and_bans_are_honoured(server: Running) -> None:
    server.say("one two three")
    first, second, third = server.model.script.encode("one two three")[:3]
    choice = server.post(PATH, {"prompt": "x", "stop_token_ids": [second]}).json()["choices"][0]
    assert choice["text"] == server.engine.tokenizer.decode([first])
    assert choice["stop_reason"] == second
    body = {"prompt": "x", "logit_bias": {str(first): -100}, "logprobs": 0, "temperature": 0}
    tokens = server.post(PATH, body).json()["choices"][0]["logprobs"]["tokens"]
    assert server.engine.tokenizer.decode([first]) not in tokens[:1]
    assert third


@pytest.mark.parametrize(
    "text", ["", "In the beginning", "  spaces\n\n", "한국어 👩‍👩‍👧", "<|open|>message<|sep|>"]
)
def test_tokenize_and_detokenize_are_inverse(server: Running, text: str) -> None:
    answer = server.post("/tokenize", {"prompt": text, "return_token_strs": True}).json()
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    assert answer["max_model_len"] == 512 * 16
    assert server.post("/detokenize", {"tokens": answer["tokens"]}).json() == {"prompt": text}


def test_tokenize_gives_the_ids_that_a_chat_is_fed_with(server: Running) -> None:
    server.say("<|close|>think<|sep|>")
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    chat = {"messages": [{"role": "user", "content": "Hi"}], "tools": [tool], "reasoning_effort": "low"}
    usage = server.post("/v1/chat/completions", chat | {"max_tokens": 1}).json()["usage"]
    answer = server.post("/tokenize", chat).json()
    assert answer["tokens"] == server.model.script.prompts[-1]
    assert answer["count"] == usage["prompt_tokens"]


def test_tokenize_wants_a_text_or_a_chat(server: Running) -> None:
    for body in ({}, {"prompt": "x", "messages": [{"role": "user", "content": "x"}]}):
        assert server.post("/tokenize", body).json()["error"]["param"] == "prompt"
    assert server.post("/detokenize", {"tokens": [2048]}).status_code == 400
