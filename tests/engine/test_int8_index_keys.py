"""Engines whose sparse indexer scores int8 keys: scheduling changes nothing, and little is lost."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.random_checkpoint import write_checkpoint
from support.serving import make_engine, make_request, run

from longspan.chat import Tokenizer
from longspan.engine.llm import LLM
from longspan.engine.request import SamplingParams
from longspan.errors import CapacityError
from longspan.evaluation.runner import fresh_requests
from longspan.evaluation.text import Text
from longspan.model.decoder import Decoder
from longspan.ops.batch import MlaView, QuantizedKeys

REQUESTS = [make_request(str(n), [(7 * n + i * i) % 58 + 3 for i in range(n)]) for n in (1, 7, 8, 41)]


@pytest.mark.parametrize(("chunk", "num_pages"), [(1, 64), (9, 64), (12, 16)])
def test_scheduling_does_not_change_an_answer(decoder: Decoder, chunk: int, num_pages: int) -> None:
    lone = [run(make_engine(decoder, index_key_dtype="int8"), r)[r.id, 0].token_ids for r in REQUESTS]
    engine = make_engine(decoder, chunk=chunk, num_pages=num_pages, index_key_dtype="int8")
    keys = [view.index_key for view in engine.memory.views if isinstance(view, MlaView)]
    assert keys and all(isinstance(key, QuantizedKeys) for key in keys)
    answers = run(engine, *REQUESTS)
    assert [answers[r.id, 0].token_ids for r in REQUESTS] == lone


def test_a_trained_model_still_finds_what_lies_far_back(tiny_dir: Path) -> None:
    tokenizer, text = Tokenizer.from_dir(tiny_dir), Text.read(tiny_dir / "heldout.txt")
    asked = fresh_requests("retrieval", 4, text, 3, 512, lambda part: len(tokenizer.encode(part)))
    greedy = SamplingParams(temperature=0.0, max_tokens=64)
    llm = LLM(tiny_dir, dtype="float32", index_key_dtype="int8", max_model_len=1024)
    answers = llm.chat([request.messages for request in asked], greedy)
    assert all(r.turn.check(answer.outputs[0]) for r, answer in zip(asked, answers, strict=True))


def test_a_model_without_an_indexer_refuses_them(tmp_path: Path) -> None:
    with pytest.raises(CapacityError, match="no sparse indexer"):
        LLM(write_checkpoint(tmp_path, "k3"), index_key_dtype="int8")
