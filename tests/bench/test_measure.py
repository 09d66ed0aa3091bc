"""Steps that `longspan bench` runs: the depth asked for, memory of their own, numbers or an error."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.random_checkpoint import published_config
from torch import Tensor

from longspan.bench.measure import PAGE_SIZE, Bench, warm_up_tokens
from longspan.bench.workload import Step
from longspan.config import parse_config
from longspan.errors import NonFiniteError
from longspan.ops.batch import KdaView, LayerView, QuantizedKeys, StepBatch


class RecordingModel:
    """Keeps every batch and gives `logit` everywhere."""

    def __init__(self, logit: float = 0.0) -> None:
        self.config = parse_config(published_config("k3.1"))
        self.dtype = torch.bfloat16
        self.logit = logit
        self.batches: list[StepBatch] = []
        self.views: Sequence[LayerView] = ()

    def step(self, batch: StepBatch, views: Sequence[LayerView]) -> Tensor:
        self.batches.append(batch)
        self.views = views
        return torch.full((len(batch.logit_rows), self.config.vocab_size), self.logit)


def bench_of(model: Any, sequences: int, tokens: int, index_key_dtype: str = "auto") -> Bench:
    return Bench(model, sequences, tokens, index_key_dtype)


@pytest.mark.parametrize(("rows", "context"), [(1, 0), (1, 130), (PAGE_SIZE + 1, 0), (70, 65)])
def test_a_step_has_the_depth_and_the_pages_of_its_sequences(rows: int, context: int) -> None:
    model = RecordingModel()
    step = Step(3, rows, context)
    bench_of(model, 3, rows + context).time(step, count=1)
    batch = model.batches[-1]
    assert [(s.end - s.begin, s.context) for s in batch.sequences] == [(rows, context)] * 3
    assert batch.logit_rows.tolist() == [rows - 1, 2 * rows - 1, 3 * rows - 1]
    pages = batch.block_tables.flatten().tolist()
    assert sorted(pages) == list(range(len(pages)))  # each page belongs to one sequence
    for row, slot in enumerate(batch.slot_mapping.tolist()):
        seq, position = row // rows, context + row % rows
        assert slot // PAGE_SIZE == batch.block_tables[seq, position // PAGE_SIZE]
        assert slot % PAGE_SIZE == position % PAGE_SIZE
    assert batch.state_slots.tolist() == [0, 1, 2]


def test_tokens_differ_from_step_to_step() -> None:
    model = RecordingModel()
    bench_of(model, 1, 40).time(Step(1, 40, 0), count=2)
    ids = [batch.token_ids for batch in model.batches]
    assert len(ids) == 3 and not torch.equal(ids[0], ids[1])
    assert all(int(i.min()) >= 0 and int(i.max()) < model.config.vocab_size for i in ids)


@pytest.mark.parametrize("index_key_dtype", ["auto", "int8"])
def test_all_memory_holds_numbers_of_plausible_size(index_key_dtype: str) -> None:
    model = RecordingModel()
    bench_of(model, 2, 200, index_key_dtype).warm_up()
    for view in model.views:
        if isinstance(view, KdaView):
            assert 0.03 < view.state.std() < 0.07 and 0.8 < view.conv.float().std() < 1.2
            continue
        assert 0.9 < view.latent.float().std() < 1.1
        keys = view.index_key
        if isinstance(keys, QuantizedKeys):
            assert int(keys.codes.min()) >= 1
            keys = (keys.codes.float() - 128) * keys.scale[:, None, :, None]
        assert keys is not None and 0.7 < keys.float().std() < 1.7


@pytest.mark.parametrize(("experts", "top_k", "tokens"), [(896, 16, 544), (6, 2, 12), (6, 6, 1), (1, 1, 1)])
def test_a_warm_up_hits_all_experts(experts: int, top_k: int, tokens: int) -> None:
    values = published_config("k3.1", num_experts=experts, num_experts_per_token=top_k)
    assert warm_up_tokens(parse_config(values)) == tokens


@pytest.mark.parametrize("count", [1, 4])
def test_the_first_step_is_not_counted(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter([0, 100] + [t for n in range(count) for t in (0, n + 1)])
    monkeypatch.setattr("longspan.bench.measure.time", SimpleNamespace(perf_counter=lambda: next(ticks)))
    timing = bench_of(RecordingModel(), 1, 1).time(Step(1, 1, 0), count)
    assert timing.steps == count
    assert (timing.fastest, timing.median, timing.slowest) == (1, (count + 1) / 2, count)


@pytest.mark.parametrize(("seconds", "steps"), [(0.001, 50), (0.5, 5), (10, 3)])
def test_steps_are_as_many_as_fit_in_two_seconds(
    seconds: float, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticks = iter(n * seconds for n in range(1000))
    monkeypatch.setattr("longspan.bench.measure.time", SimpleNamespace(perf_counter=lambda: next(ticks)))
    assert bench_of(RecordingModel(), 1, 1).time(Step(1, 1, 0)).steps == steps


@pytest.mark.parametrize("logit", [torch.nan, torch.inf])
def test_what_is_no_number_is_no_speed(logit: float) -> None:
    with pytest.raises(NonFiniteError, match="depth 7"):
        bench_of(RecordingModel(logit), 1, 8).time(Step(1, 1, 7), count=1)
