"""Large bodies, right or wrong, cost little memory and keep nobody waiting."""

from __future__ import annotations

import json
import threading
import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from support.scripted import Running

from longspan.errors import RequestError
from longspan.serve import json_text
from longspan.serve.body import parse_body
from longspan.serve.json_text import read_json
from longspan.serve.protocol import ChatRequest, CompletionRequest, DetokenizeRequest

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
COUNT = 100_000
KINDS: dict[str, Any] = {CHAT: ChatRequest, TEXT: CompletionRequest, "/detokenize": DetokenizeRequest}


def filled(start: str, item: str, end: str, count: int = COUNT) -> bytes:
    return (start + ", ".join([item] * count) + end).encode()


WRONG = [
    (TEXT, filled('{"prompt": [', "1.5", "]}")),
    (TEXT, filled('{"prompt": [', "true", "]}")),
    (TEXT, filled('{"prompt": [', "{}", "]}")),
    (TEXT, filled('{"prompt": [1, ', '"a"', "]}")),
    (TEXT, filled('{"prompt": [[1], ', "[null]", "]}")),
    (TEXT, filled('{"prompt": "x", "stop": [', "1", "]}")),
    (TEXT, filled('{"prompt": "x", "stop": [', '"a"', "]}")),
    (TEXT, filled('{"prompt": "x", "stop_token_ids": [', '"a"', "]}")),
    (CHAT, filled('{"messages": [], "tools": [', "1", "]}")),
    (CHAT, filled('{"messages": {"a": [', "1", "]}}")),
    ("/detokenize", filled('{"tokens": [', "1.5", "]}")),
    (
        TEXT,
        json.dumps(
            {"prompt": "x", "stream": True, "stream_options": dict.fromkeys(map(str, range(COUNT)), 1)}
        ).encode(),
    ),
    (TEXT, json.dumps({"prompt": "x"} | dict.fromkeys(map(str, range(COUNT)), 1)).encode()),
]
NOTHING_GOOD = [
    *WRONG[:3],
    (CHAT, filled('{"messages": [', "[]", "]}")),
    (TEXT, filled('{"prompt": [', "[1]", "]}")),
    (TEXT, filled('{"prompt": [', "5", "]}")),
    (TEXT, filled('{"prompt": "', "word", '"}')),
    (CHAT, filled('{"messages": [{"role": "user", "content": "', "word", '"}]}')),
    (TEXT, json.dumps({"prompt": "x", "logit_bias": dict.fromkeys(map(str, range(COUNT)), "a")}).encode()),
]


@pytest.mark.parametrize(("path", "raw"), WRONG)
def test_one_mistake_made_many_times_is_told_once_and_takes_no_more_memory_than_reading(
    path: str, raw: bytes
) -> None:
    def peak(work: Any) -> int:
        tracemalloc.start()
        work()
        _, highest = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return highest

    def refuse() -> None:
        with pytest.raises(RequestError) as caught:
            parse_body(raw, KINDS[path])
        assert len(str(caught.value)) < 1000

    refuse()
    assert peak(refuse) < 1.5 * peak(lambda: json.loads(raw.decode())) + 2**20


@pytest.mark.parametrize(("path", "raw"), NOTHING_GOOD)
def test_a_large_body_of_nonsense_is_refused_in_a_few_words(server: Running, path: str, raw: bytes) -> None:
    refused = httpx.post(server.url + path, content=raw, timeout=120)
    assert refused.status_code == 400 and len(refused.content) < 4000


@pytest.mark.parametrize("path", [CHAT, TEXT, "/tokenize", "/detokenize"])
def test_health_is_answered_while_a_body_is_being_read(
    server: Running, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, asked = threading.Event(), threading.Event()

    def read(*_: Any) -> None:
        reading.set()
        assert asked.wait(60)
        raise RequestError("read")

    monkeypatch.setattr("longspan.serve.body.read_json", read)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(server.post, path, {})
        assert reading.wait(30)
        assert httpx.get(f"{server.url}/health", timeout=30).status_code == 200
        asked.set()
        assert answer.result().status_code == 400


def test_threads_run_while_a_body_of_many_parts_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def turns() -> int:
        """How often this thread gets on while another reads."""
        reader = threading.Thread(target=read_json, args=(raw,))
        count = 0
        reader.start()
        while reader.is_alive():
            time.sleep(0.0005)
            count += 1
        return count

    raw = filled("[", "[]", "]", count=3 * COUNT)
    at_once = turns()
    monkeypatch.setattr(json_text, "MAX_MARKS", COUNT)
    assert turns() > 3 * at_once


def test_a_text_that_can_never_fit_is_refused_before_it_is_encoded(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    def encode(*_: Any) -> None:
        raise AssertionError("encoded")

    monkeypatch.setattr("longspan.chat.Tokenizer.encode", encode)
    text = "word " * 1_000_000
    for path, body in (
        (TEXT, {"prompt": text}),
        (TEXT, {"prompt": ["x" * 2_000_000]}),
        (CHAT, {"messages": [{"role": "user", "content": text}]}),
    ):
        answer = server.post(path, body)
        assert answer.status_code == 400, answer.text
        assert "max_model_len" in answer.json()["error"]["message"]


def test_the_longest_text_that_fits_is_not_refused(server: Running) -> None:
    server.say("a")
    tokenizer = server.engine.tokenizer
    longest = max(range(tokenizer.n_base), key=lambda token: len(tokenizer.decode([token])))
    text = tokenizer.decode([longest]) * (server.service.engine.max_model_len - 10)
    expected = len(tokenizer.encode(text))
    answer = server.post(TEXT, {"prompt": text, "max_tokens": 1})
    fits = expected < server.service.engine.max_model_len
    assert answer.status_code == (200 if fits else 400)
    assert fits or f"{expected} tokens" in answer.json()["error"]["message"]


def test_more_ids_than_any_sequence_has_are_not_decoded(server: Running) -> None:
    longest = server.service.engine.max_model_len
    assert server.post("/detokenize", {"tokens": [5] * longest}).status_code == 200
    refused = server.post("/detokenize", {"tokens": [5] * (longest + 1)})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "tokens"


@pytest.mark.parametrize(
    "text",
    [
        '{"a": [1, -2.5, 1e3, true, false, null, "b\\u00e9\\ud800", {}, []], "a": {"c": "\u00e9"}}',
        "[1,,2]",
        '{"a" 1}',
        "[1] 2",
        "nul",
        '"\\x"',
        "",
        "[" * 100_000,
        "9" * 5000,
        "-Infinity",
    ],
)
def test_a_body_is_read_the_same_whether_others_may_run_in_between_or_not(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def result() -> Any:
        try:
            return read_json(text.encode())
        except RequestError as error:
            return str(error)

    at_once = result()
    monkeypatch.setattr(json_text, "MAX_MARKS", -1)
    assert result() == at_once
