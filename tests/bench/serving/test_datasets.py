"""Conversations: lengths and prefixes as asked, and files whose mistakes are named with their line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from longspan.bench.serving.datasets import (
    TRACE_BLOCK,
    Conversation,
    Lengths,
    TraceLine,
    random_conversations,
    read_conversations,
    read_trace,
    trace_conversations,
)
from longspan.bench.serving.dialogue import CHAT, COMPLETIONS, Dialect, Dialogue
from longspan.bench.serving.prompts import TokenIds, Words, words_from
from longspan.bench.serving.reply import Reply
from longspan.errors import BenchError

IDS = TokenIds(range(100, 300))
LINE = {"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]}


def ids_of(conversation: Conversation) -> list[int]:
    (turn,) = conversation.turns
    assert isinstance(turn.content, list)
    return turn.content


@given(
    st.integers(1, 40),
    st.integers(1, 40),
    st.floats(0, 0.99),
    st.integers(0, 20),
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(0, 12),
)
def test_random_prompts_have_the_lengths_that_they_say(
    input_len: int, output_len: int, ratio: float, prefix_len: int, prefixes: int, turns: int, count: int
) -> None:
    lengths = Lengths(input_len, output_len, ratio, prefix_len, prefixes, turns)
    found = random_conversations(lengths, count, IDS, seed=1, fill=0)
    assert len(found) == count
    for conversation in found:
        assert len(conversation.turns) == turns
        for i, turn in enumerate(conversation.turns):
            before = 0 if i else prefix_len
            assert turn.input_len is not None
            assert len(turn.content) == turn.input_len
            assert max(1, int(input_len * (1 - ratio))) <= turn.input_len - before <= input_len * (1 + ratio)
            assert max(1, int(output_len * (1 - ratio))) <= turn.output_len <= output_len * (1 + ratio)


def test_points_of_a_sweep_have_the_same_lengths_and_fresh_text() -> None:
    lengths = Lengths(20, 10, 0.5, prefix_len=8, num_prefixes=2)
    first, again, second = (random_conversations(lengths, 10, IDS, 3, fill) for fill in (0, 0, 1))
    assert first == again
    assert [[(t.input_len, t.output_len) for t in c.turns] for c in first] == [
        [(t.input_len, t.output_len) for t in c.turns] for c in second
    ]
    assert all(ids_of(a)[:8] != ids_of(b)[:8] for a in first for b in second)


def test_prefixes_are_shared_by_as_many_as_asked_and_nothing_else_is() -> None:
    found = random_conversations(Lengths(9, 1, prefix_len=16, num_prefixes=3), 60, IDS, 0, 0)
    assert len({tuple(ids_of(c)[:16]) for c in found}) == 3
    assert len({tuple(ids_of(c)[16:]) for c in found}) == 60


def test_words_make_up_for_what_they_and_the_frame_count() -> None:
    words = words_from((8, 30), (208, 280))  # 1.25 tokens a word beside a frame of 20
    assert (words.tokens_per_word, words.frame) == (1.25, 20)
    (conversation,) = random_conversations(Lengths(120, 1, prefix_len=50), 1, words, 0, 0)
    content = conversation.turns[0].content
    assert isinstance(content, str) and len(content.split()) == 40 + 80
    assert words_from((8, 30), (208, 30)) == Words()


def write(tmp_path: Path, *lines: Any) -> Path:
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return path


def test_a_trace_is_read_with_its_times_and_replayed_with_its_prefixes(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        LINE | {"timestamp": 1000},
        "",
        LINE | {"timestamp": 1500, "hash_ids": [1, 3], "input_length": 1024},
        {"timestamp": 4000, "input_length": 7, "output_length": 1},
    )
    lines = read_trace(path)
    assert [line.at for line in lines] == [0.0, 0.5, 3.0]
    assert read_trace(path, limit=2) == lines[:2]
    a, b, c = trace_conversations(lines, speed=2, scale=1, source=IDS, seed=0, fill=0)
    assert [x.at for x in (a, b, c)] == [0.0, 0.25, 1.5]
    assert [len(ids_of(x)) for x in (a, b, c)] == [600, 1024, 7]
    assert ids_of(a)[:TRACE_BLOCK] == ids_of(b)[:TRACE_BLOCK]
    assert ids_of(a)[TRACE_BLOCK:] != ids_of(b)[TRACE_BLOCK:600]


@given(st.integers(1, 1200), st.floats(0.01, 2))
def test_a_scaled_trace_has_scaled_lengths(input_len: int, scale: float) -> None:
    hashes = list(range(-(-input_len // TRACE_BLOCK)))
    line = TraceLine(0.0, input_len, 30, hashes)
    (found,) = trace_conversations([line], 1, scale, IDS, 0, 0)
    assert len(ids_of(found)) == found.turns[0].input_len == max(1, round(input_len * scale))
    assert found.turns[0].output_len == max(1, round(30 * scale))


@pytest.mark.parametrize(
    ("second", "says"),
    [
        ("{", "not JSON"),
        ("3", "object"),
        ({"input_length": 1, "output_length": 1}, "timestamp"),
        (LINE | {"timestamp": "x"}, "timestamp"),
        (LINE | {"timestamp": -1}, "timestamp"),
        (LINE | {"input_length": 0, "hash_ids": []}, "input_length"),
        (LINE | {"input_length": True}, "input_length"),
        (LINE | {"output_length": None}, "output_length"),
        (LINE | {"hash_ids": ["a"]}, "hash_ids"),
        (LINE | {"hash_ids": 3}, "hash_ids"),
        (LINE | {"hash_ids": [1]}, "hash_ids"),
        (LINE | {"hash_ids": [1, 2, 3]}, "hash_ids"),
    ],
)
def test_a_wrong_line_of_a_trace_is_named(tmp_path: Path, second: Any, says: str) -> None:
    with pytest.raises(BenchError, match=r"line 2") as caught:
        read_trace(write(tmp_path, LINE, second))
    assert says in str(caught.value)


def test_a_trace_that_runs_backwards_or_is_empty_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match=r"line 2: its timestamp lies before"):
        read_trace(write(tmp_path, LINE | {"timestamp": 9}, LINE))
    with pytest.raises(BenchError, match="empty"):
        read_trace(write(tmp_path, ""))
    (tmp_path / "data.jsonl").write_bytes(b"\xff\xfe")
    with pytest.raises(BenchError, match="UTF-8"):
        read_trace(tmp_path / "data.jsonl")


SHAREGPT = {"conversations": [{"from": who, "value": text} for who, text in (
    ("system", "Be short."), ("human", "Hi"), ("gpt", "Hello"), ("human", "Bye"))]}  # fmt: skip


def test_conversations_of_all_three_forms_are_read(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "A"}, {"role": "assistant", "content": "B"}]
    lines = [{"prompt": "P", "output_length": 3}, {"messages": messages}, SHAREGPT]
    for content in (lines, [json.dumps(lines)]):
        one, two, three = read_conversations(write(tmp_path, *content), 9, turns=4, limit=None)
        assert [(t.content, t.output_len) for t in one.turns] == [("P", 3)]
        assert [(t.content, t.output_len) for t in two.turns] == [("A", 9)]
        assert [t.content for t in three.turns] == ["Hi", "Bye"]
        assert three.opening == [{"role": "system", "content": "Be short."}]
    assert len(read_conversations(write(tmp_path, SHAREGPT), 9, turns=1, limit=1)[0].turns) == 1


@pytest.mark.parametrize(
    "line",
    [{}, {"prompt": 3}, {"messages": []}, {"messages": ["x"]}, {"messages": [{"role": "user"}]},
     {"conversations": [{"from": "gpt", "value": "x"}]}, {"prompt": "x", "output_length": 0}],
)  # fmt: skip
def test_a_wrong_conversation_is_named(tmp_path: Path, line: Any) -> None:
    with pytest.raises(BenchError, match="line 2"):
        read_conversations(write(tmp_path, SHAREGPT, line), 9, 1, None)


def answer(text: str, reasoning: str = "") -> Reply:
    reply = Reply()
    delta = {"content": text} | ({"reasoning_content": reasoning} if reasoning else {})
    reply.feed(b"data: " + json.dumps({"choices": [{"delta": delta}]}).encode() + b"\n\n", 0.0)
    return reply


def test_a_chat_goes_on_from_its_real_answers(tmp_path: Path) -> None:
    (conversation,) = read_conversations(write(tmp_path, SHAREGPT), 9, 2, None)
    dialogue = Dialogue(conversation, Dialect(CHAT, "m", ignore_eos=True, extra={"temperature": 0}))
    first = json.loads(dialogue.body(0))
    dialogue.answered(answer("Hey", "Hm."))
    second = json.loads(dialogue.body(1))
    assert [m["content"] for m in first["messages"]] == ["Be short.", "Hi"]
    assert second["messages"][2:] == [
        {"role": "assistant", "content": "Hey", "reasoning_content": "Hm."},
        {"role": "user", "content": "Bye"},
    ]
    assert first["stream_options"] == {"include_usage": True}
    assert (first["model"], first["max_tokens"], first["ignore_eos"], first["temperature"]) == (
        "m",
        9,
        True,
        0,
    )


def test_a_completion_goes_on_from_the_text_before_it(tmp_path: Path) -> None:
    lines = {"messages": [{"role": "user", "content": text} for text in ("One", "Two")]}
    (conversation,) = read_conversations(write(tmp_path, lines), 9, 2, None)
    dialogue = Dialogue(conversation, Dialect(COMPLETIONS, "m"))
    assert json.loads(dialogue.body(0))["prompt"] == "One"
    reply = Reply()
    reply.feed(b'data: {"choices": [{"text": " and"}]}\n\n', 0.0)
    dialogue.answered(reply)
    assert json.loads(dialogue.body(1))["prompt"] == "One and\nTwo"


def test_a_system_message_needs_the_chat_endpoint(tmp_path: Path) -> None:
    (conversation,) = read_conversations(write(tmp_path, SHAREGPT), 9, 1, None)
    with pytest.raises(BenchError, match=CHAT):
        Dialogue(conversation, Dialect(COMPLETIONS, "m"))


def test_drawing_is_seeded() -> None:
    one, two = (IDS.draw(50, np.random.default_rng(5)) for _ in range(2))
    assert one == two and set(one) <= set(range(100, 300))
