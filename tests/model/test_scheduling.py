"""Scheduling never changes answers: chunks, batch mates, cached decode against the lone uncached forward.

All memory starts as NaN and pages are scrambled, so a read of anything not written shows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.batches import Host
from support.random_checkpoint import TOP_K
from torch import Tensor

import longspan
from longspan.model.decoder import FORWARD_PAGE_SIZE, Decoder
from longspan.ops.backend import backends
from longspan.ops.batch import KdaView, MlaView
from longspan.ops.indexer import INDEX_QUERY_BLOCK
from longspan.ops.kda import CHUNK, RECURRENT_MAX_TOKENS, SEGMENT, TILE
from longspan.ops.sparse_attention import DENSE_QUERY_BLOCK

KINDS = ["kimi-linear", "k3", "k3-plain-experts", "k3.1"]
TOLERANCE = 1e-4


def tokens(count: int, vocab: int = 61, seed: int = 0) -> list[int]:
    return torch.randint(0, vocab, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def same(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got, want, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [1, 2, TOP_K - 1, TOP_K, TOP_K + 1, 2 * TOP_K, 40])
def test_decode_token_by_token_equals_the_uncached_forward(
    kind: str, length: int, model_of: Callable[[str], Decoder]
) -> None:
    ids = tokens(length)
    same(Host(model_of(kind), 1, length).feed(0, ids, 1), model_of(kind).forward(ids))


@pytest.mark.parametrize("kind", KINDS)
def test_every_chunk_size_equals_the_uncached_forward(kind: str, model_of: Callable[[str], Decoder]) -> None:
    ids = tokens(4 * TOP_K + 3)
    want = model_of(kind).forward(ids)
    for chunk in range(1, len(ids)):
        same(Host(model_of(kind), 1, len(ids), page_size=5).feed(0, ids, chunk), want)


def test_golden_weights_choose_the_same_keys_at_every_chunk_size(data_dir: Path) -> None:
    """Scores of exactly 0 tie here for real. This network amplifies float32 noise up to 1e-3 and more."""
    model = longspan.load_model(data_dir / "k31-text", dtype="float32")
    ids = tokens(96, model.config.vocab_size)
    want, chosen = record(model, lambda observe: model.forward(ids, observe))
    for chunk in (1, 5, 16, 17, 64):
        host = Host(model, 1, len(ids), page_size=16)
        got, parts = record(model, lambda observe, h=host, c=chunk: feed_observed(h, ids, c, observe))
        for layer, selected in chosen.items():
            late = parts[layer]  # no choice is made while nobody sees more than top-k
            differing = (late != selected[-late.shape[0] :]).any(1)
            assert differing.float().mean() < 0.02, f"chunk {chunk}, layer {layer}"
        assert (got - want).abs().median() < TOLERANCE


def feed_observed(host: Host, ids: list[int], chunk: int, observe) -> Tensor:
    parts = [host.step({0: ids[i : i + chunk]}, observe)[0] for i in range(0, len(ids), chunk)]
    return torch.cat(parts)


def record(model: Decoder, run) -> tuple[Tensor, dict[int, Tensor]]:
    """Logits and, per layer, the selections of all steps that made one, in order."""
    parts: dict[int, list[Tensor]] = {}

    def observe(name: str, layer: int, tensor: Tensor) -> None:
        if name == "selected":
            parts.setdefault(layer, []).append(tensor)

    logits = run(observe)
    return logits, {layer: torch.cat(p) for layer, p in parts.items()}


SWITCHES = [
    RECURRENT_MAX_TOKENS,
    TILE,
    CHUNK,
    DENSE_QUERY_BLOCK,
    INDEX_QUERY_BLOCK,
    FORWARD_PAGE_SIZE,
    SEGMENT,
]


@pytest.mark.parametrize("kind", ["k3", "k3.1"])
@pytest.mark.parametrize("size", sorted({n + d for n in SWITCHES for d in (-1, 0, 1)}))
def test_a_prompt_on_either_side_of_every_size_switch_equals_small_chunks(
    kind: str, size: int, model_of: Callable[[str], Decoder]
) -> None:
    ids = tokens(size)
    same(Host(model_of(kind), 1, size, page_size=16).feed(0, ids, 41), model_of(kind).forward(ids))


@pytest.mark.parametrize("threads", [2, 3, 7])
def test_the_number_of_threads_changes_nothing(threads: int, model_of: Callable[[str], Decoder]) -> None:
    ids = tokens(70)
    want = model_of("k3.1").forward(ids)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        same(model_of("k3.1").forward(ids), want)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_ragged_steps_in_any_interleaving_equal_lone_runs(
    kind: str, model_of: Callable[[str], Decoder], data: st.DataObject
) -> None:
    model = model_of(kind)
    lengths = data.draw(st.lists(st.integers(0, 30), min_size=1, max_size=4))
    prompts = [tokens(n, seed=s) for s, n in enumerate(lengths)]
    host = Host(model, len(lengths), 32)
    outputs: list[list[Tensor]] = [[] for _ in lengths]
    while host.lengths != lengths:
        seqs = data.draw(st.permutations(range(len(lengths))))
        sizes = data.draw(st.lists(st.integers(0, 30), min_size=len(seqs), max_size=len(seqs)))
        if not any(sizes):
            sizes = [30] * len(seqs)
        chunks = {
            s: prompts[s][host.lengths[s] : host.lengths[s] + n] for s, n in zip(seqs, sizes, strict=True)
        }
        for s, logits in host.step(chunks).items():
            outputs[s].append(logits)
    for s, prompt in enumerate(prompts):
        if prompt:
            same(torch.cat(outputs[s]), model.forward(prompt))


@pytest.mark.parametrize("kind", KINDS)
def test_memory_after_chunks_equals_memory_after_decode_element_by_element(
    kind: str, model_of: Callable[[str], Decoder]
) -> None:
    ids = tokens(30)
    whole, walked = Host(model_of(kind), 1, 30), Host(model_of(kind), 1, 30)
    whole.feed(0, ids, 30)
    walked.feed(0, ids, 1)
    slot = whole.tables.slots[0]
    for a, b in zip(whole.views, walked.views, strict=True):
        if isinstance(a, KdaView) and isinstance(b, KdaView):
            same(a.state[slot], b.state[slot])
            same(a.conv[slot], b.conv[slot])
        elif isinstance(a, MlaView) and isinstance(b, MlaView):
            torch.testing.assert_close(a.latent, b.latent, atol=TOLERANCE, rtol=0, equal_nan=True)


@pytest.mark.parametrize("kind", KINDS)
def test_a_used_slot_and_used_pages_leave_no_trace_in_the_next_sequence(
    kind: str, model_of: Callable[[str], Decoder]
) -> None:
    host = Host(model_of(kind), 1, 32)
    host.feed(0, tokens(32, seed=1), 10)
    host.lengths[0] = 0
    ids = tokens(20, seed=2)
    same(host.feed(0, ids, 7), model_of(kind).forward(ids))


@pytest.mark.parametrize("kind", KINDS)
def test_a_broken_sequence_does_not_touch_its_batch_mates(
    kind: str, model_of: Callable[[str], Decoder]
) -> None:
    model = model_of(kind)
    host = Host(model, 2, 40)
    good, bad = tokens(20, seed=3), tokens(20, seed=4)
    outputs = [host.step({0: good[:12], 1: bad[:12]})[0]]
    slot = host.tables.slots[1]
    for view in host.views:
        if isinstance(view, KdaView):
            view.state[slot] = torch.nan
        elif view.index_key is not None:
            page = host.tables.pages[1, 0]
            view.index_key[page, 0] = torch.inf
    for i in range(12, 20):
        step = host.step({1: bad[i : i + 1], 0: good[i : i + 1]})
        assert not step[1].isfinite().any()
        outputs.append(step[0])
    same(torch.cat(outputs), model.forward(good))


@pytest.mark.parametrize("kind", KINDS)
def test_logits_come_only_for_the_rows_asked_for(kind: str, model_of: Callable[[str], Decoder]) -> None:
    model = model_of(kind)
    ids = tokens(9)
    want = model.forward(ids)
    for rows in ([], [8], [0, 5]):
        host = Host(model, 1, 9)
        batch = dataclasses.replace(
            host.tables.batch([0], [9], [0], ids), logit_rows=torch.tensor(rows, dtype=torch.int64)
        )
        got = model.step(batch, host.views)
        assert got.shape == (len(rows), 61) and got.dtype == torch.float32
        same(got, want[rows])


@pytest.mark.parametrize("kind", KINDS)
def test_batches_without_rows_or_sequences_are_fine(kind: str, model_of: Callable[[str], Decoder]) -> None:
    model = model_of(kind)
    host = Host(model, 1, 8)
    assert model.step(host.tables.batch([], [], []), host.views).shape == (0, 61)
    assert host.step({0: []})[0].shape == (0, 61)
    assert model.forward([]).shape == (0, 61)
    ids = tokens(8)
    same(host.feed(0, ids, 3), model.forward(ids))


needs_native = pytest.mark.skipif(
    "native" not in backends(), reason="oneDNN rounds otherwise in another batch"
)


@needs_native
def test_mates_and_cuts_at_multiples_of_64_change_no_bit_in_bfloat16(tiny_dir: Path) -> None:
    model = longspan.load_model(tiny_dir, dtype="bfloat16")
    prompts = [tokens(count, 2000, count) for count in (196, 70, 1, 9)]
    alone = [Host(model, 1, 200).feed(0, prompt, len(prompt)) for prompt in prompts]
    together = Host(model, 4, 200).step(dict(enumerate(prompts)))
    assert all(torch.equal(together[s], logits) for s, logits in enumerate(alone))
    for chunk in (64, 128):
        assert torch.equal(Host(model, 1, 200).feed(0, prompts[0], chunk), alone[0])


@needs_native
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_decoding_in_a_batch_gives_the_bits_of_decoding_alone(dtype: str, tiny_dir: Path) -> None:
    model = longspan.load_model(tiny_dir, dtype=dtype)
    prompts = [tokens(count, 2000, count) for count in (100, 65, 3)]

    def decode(chosen: list[int]) -> list[Tensor]:
        host = Host(model, len(chosen), 110)
        host.step({s: prompts[p] for s, p in enumerate(chosen)})
        steps = [host.step({s: [7] for s in range(len(chosen))}) for _ in range(3)]
        return [torch.cat([step[s] for step in steps]) for s in range(len(chosen))]

    for p, logits in enumerate(decode([0, 1, 2])):
        assert torch.equal(decode([p])[0], logits)


@needs_native
@pytest.mark.parametrize("kind", KINDS)
def test_no_cut_changes_a_bit_in_float32(kind: str, model_of: Callable[[str], Decoder]) -> None:
    whole = Host(model_of(kind), 1, 150).feed(0, tokens(130), 130)
    for chunk in (1, 7, 9, 50):
        assert torch.equal(Host(model_of(kind), 1, 150).feed(0, tokens(130), chunk), whole)
