"""Skill generators are seeded and honest: the reference answer passes its own check, a wrong one does not."""

from __future__ import annotations

import json
import random
from types import SimpleNamespace
from typing import Any

import pytest

from longspan.errors import RequestError
from longspan.evaluation import runner, skills
from longspan.evaluation.runner import Evaluation, fresh_requests
from longspan.evaluation.text import Text

TEXT = Text(
    "In the beginning God created the heaven and the earth. And the earth was without form, and void. "
    "And God said, Let there be light: and there was light.\nAnd God saw the light, that it was good."
)
ASKED = [skill for skill in runner.SKILLS if skill != "english"]


def size(text: str) -> int:
    return len(text) // 4


def requests(skill: str, seed: int = 1, samples: int = 30) -> list[skills.Request]:
    return fresh_requests(skill, samples, TEXT, seed, 512, size)


@pytest.mark.parametrize("skill", ASKED)
def test_requests_repeat_with_the_seed_and_differ_without(skill: str) -> None:
    def shown(seed: int) -> list[Any]:
        return [(r.messages, r.tools, r.turn.answer) for r in requests(skill, seed)]

    assert shown(1) == shown(1)
    assert shown(1) != shown(2)


@pytest.mark.parametrize("skill", ASKED)
def test_the_reference_answer_passes_and_others_fail(skill: str) -> None:
    made = requests(skill)
    assert {r.turn.skill for r in made} == {skill}
    for request in made:
        answer = skills.reply_of(request.turn.answer)
        assert request.turn.check(answer)
        empty = SimpleNamespace(content=None, reasoning=None, tool_calls=None)
        wrong = SimpleNamespace(content="Nothing of that kind 12345", reasoning="", tool_calls=[])
        assert not request.turn.check(empty)
        assert not request.turn.check(wrong)


def test_a_call_with_a_wrong_argument_or_a_second_call_fails() -> None:
    for request in requests("tool_call"):
        call = request.turn.answer["tool_calls"][0]
        arguments = json.loads(call["function"]["arguments"])
        other = dict.fromkeys(arguments, "elsewhere")
        spoiled = call | {"function": call["function"] | {"arguments": json.dumps(other)}}
        object_like = SimpleNamespace(name=call["function"]["name"], arguments=json.dumps(arguments))
        assert request.turn.check(SimpleNamespace(content=None, tool_calls=[object_like]))
        assert not request.turn.check(SimpleNamespace(content=None, tool_calls=[spoiled]))
        assert not request.turn.check(SimpleNamespace(content=None, tool_calls=[call, call]))


def test_the_working_of_an_addition_is_right() -> None:
    assert skills.working(417, 286) == "0+7+6=13 1+1+8=10 1+4+2=07"
    rng = random.Random(3)
    for _ in range(200):
        a, b = rng.randrange(1000), rng.randrange(1000)
        digits = [step.rsplit("=", 1)[1] for step in skills.working(a, b).split()]
        assert int(digits[-1] + "".join(d[1] for d in reversed(digits[:-1]))) == a + b


@pytest.mark.parametrize("length", [256, 1024, 4096])
def test_a_retrieval_context_is_about_as_long_as_asked_and_has_one_answer(length: int) -> None:
    for request in fresh_requests("retrieval", 10, TEXT, 5, length, size):
        prompt = request.messages[-1]["content"]
        assert 0.8 * length < size(prompt) < 1.1 * length
        assert prompt.count(request.turn.answer["content"]) == 1


class FakeLLM:
    """Answers every question by the reference, or wrongly."""

    def __init__(self, right: bool) -> None:
        self.right = right
        self.tokenizer = SimpleNamespace(encode=lambda text: list(text.encode()))
        self.known = {repr(r.messages): r.turn.answer for skill in ASKED for r in self._requests(skill)}

    def _requests(self, skill: str) -> list[skills.Request]:
        length = 512 if skill == "retrieval" else None
        return fresh_requests(skill, 5, TEXT, 9, length, lambda text: len(text.encode()))

    def chat(self, conversations: list[Any], params: Any, **options: Any) -> list[Any]:
        return [SimpleNamespace(outputs=[self._reply(messages)]) for messages in conversations]

    def _reply(self, messages: list[Any]) -> Any:
        answer = skills.reply_of(self.known[repr(messages)])
        answer.finish_reason = "stop" if self.right else "length"
        if not self.right:
            answer.content, answer.tool_calls = "no", []
        return answer


@pytest.mark.parametrize("right", [True, False])
def test_the_runner_counts_right_and_well_formed_answers(right: bool) -> None:
    rows = list(Evaluation(FakeLLM(right), TEXT, seed=9).rows(ASKED, 5, [512]))
    assert [row.skill for row in rows] == ASKED
    assert all(row.exact == (100 if right else 0) for row in rows)
    assert all(row.well_formed == (100 if right else 0) for row in rows)


def test_unknown_skills_and_lengths_are_refused_with_the_legal_ones() -> None:
    with pytest.raises(RequestError, match="retrieval"):
        runner._names("singing")
    with pytest.raises(RequestError, match="128"):
        runner._lengths("12,x")
