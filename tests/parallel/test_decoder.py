"""The whole decoder over several ranks against the decoder of one process, in float32."""

from __future__ import annotations

import shutil
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from support.random_checkpoint import published_config, write_checkpoint
from support.rank_cases import Chunks, Fork, Script, Split, Trace, run_script, run_split
from support.ranks import Ranks
from torch import Tensor

import longspan
from longspan.formats.safetensors import open_checkpoint, save_checkpoint
from longspan.ops.backend import backends
from longspan.ops.shard import WHOLE
from longspan.parallel.context import EXCHANGE_ROWS

TOLERANCE = 1e-4
BACKENDS = list(backends())


def ids(seed: int, count: int) -> list[int]:
    return torch.randint(0, 61, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def chunked_script() -> Script:
    """Prompts in chunks and decoding, mixed: 40 tokens of one sequence, 21 and 9 of others."""
    a, b, c = ids(1, 40), ids(2, 21), ids(3, 9)
    steps = [
        {0: a[:5]},
        {0: a[5:22], 1: b[:3]},
        {1: b[3:18], 0: a[22:23], 2: c[:7]},
        *({0: a[23 + i : 24 + i], 1: b[18 + i : 19 + i], 2: c[7 + i : 8 + i]} for i in range(2)),
        {0: a[25:40], 1: b[20:]},
    ]
    return Script(steps, num_seqs=3, max_tokens=40)


@cache
def alone(path: Path, backend: str) -> longspan.model.decoder.Decoder:
    return longspan.load_model(path, dtype="float32", backend=backend)


def check(traces: list[Trace], reference: Trace) -> None:
    """Every rank has the logits of the one process; together the ranks chose and hold what it did."""
    for trace in traces:
        for got, want in zip(trace.logits, reference.logits, strict=True):
            assert got.keys() == want.keys()
            for seq in want:
                torch.testing.assert_close(got[seq], want[seq], atol=TOLERANCE, rtol=0)
    by_shard = {trace.shard: trace for trace in traces}.values()
    for step, chosen in enumerate(reference.selected):
        for layer, want in enumerate(chosen):
            got = torch.cat([trace.selected[step][layer] for trace in by_shard], 1)
            assert rows(got) == rows(want)
    for seq, keys in enumerate(reference.keys):
        for layer, want in enumerate(keys):
            whole = torch.full_like(want, torch.nan)
            for trace in by_shard:
                mine = trace.keys[seq][layer]
                whole[trace.shard.position(torch.arange(len(mine)))] = mine
            assert sum(len(trace.keys[seq][layer]) for trace in by_shard) == len(want)
            torch.testing.assert_close(whole, want, atol=TOLERANCE, rtol=0)


def rows(selected: Tensor) -> list[list[int]]:
    """What is chosen, ascending: a token chosen on two ranks shows up twice."""
    return [sorted(p for p in row if p != -1) for row in selected.tolist()]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "split",
    [
        Split(tensor=2),
        Split(tensor=4),
        Split(tensor=2, context=2),
        Split(tensor=2, context=2, interleave=4),
        Split(tensor=4, context=2, interleave=2),
        Split(tensor=4, context=4),
        Split(tensor=4, context=4, interleave=4),
    ],
    ids=lambda split: f"tp{split.tensor}-dcp{split.context}-by{split.interleave}",
)
def test_several_ranks_compute_what_one_does(
    split: Split, backend: str, ranks: Ranks, checkpoint: Path
) -> None:
    split = replace(split, backend=backend)
    script = chunked_script()
    reference = run_script(alone(checkpoint, backend), script, WHOLE)
    assert any(reference.selected)
    check(ranks.run(split.size, run_split, checkpoint, split, [script]), reference)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "split",
    [Split(replicas=2), Split(replicas=3), Split(tensor=2, replicas=2), Split(2, context=2, replicas=2)],
    ids=lambda split: f"dp{split.replicas}-tp{split.tensor}-dcp{split.context}",
)
def test_replicas_share_experts_whatever_tokens_each_has(
    split: Split, backend: str, ranks: Ranks, checkpoint: Path
) -> None:
    """The tokens of replicas differ in number at each step, and some have none."""
    split = replace(split, backend=backend)
    a, b = ids(4, 24), ids(5, 12)
    steps: list[list[Chunks]] = [
        [{0: a[:17]}, {0: a[17:18], 1: b[:1]}, {}, {0: a[18:24]}],
        [{}, {0: b[:1]}, {0: b[1:12]}, {}],
        [{0: b[:3], 1: a[:2]}, {}, {0: b[3:4]}, {1: a[2:7]}],
    ]
    scripts = [Script(each, num_seqs=2, max_tokens=24) for each in steps[: split.replicas]]
    traces = ranks.run(split.size, run_split, checkpoint, split, scripts)
    for replica, script in enumerate(scripts):
        reference = run_script(alone(checkpoint, backend), script, WHOLE)
        check(traces[replica * split.tensor : (replica + 1) * split.tensor], reference)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ranks_without_tokens_send_rows_of_any_width(
    dtype: torch.dtype, backend: str, ranks: Ranks, tmp_path: Path
) -> None:
    """One token, one expert for it, and rows of 33 numbers, whose bytes are no whole number of words."""
    attention = published_config("kimi-linear")["linear_attn_config"] | {"num_heads": 2}
    sizes = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_experts": 1, "num_experts_per_token": 1}
    path = write_checkpoint(
        tmp_path,
        "kimi-linear",
        hidden_size=33,
        linear_attn_config=attention,
        moe_intermediate_size=33,
        **sizes,
    )
    split = Split(tensor=2, replicas=2, backend=backend, dtype=dtype)
    scripts = [Script([{0: [5]}], 1, 1), Script([{}], 1, 1)]
    traces = ranks.run(4, run_split, path, split, scripts)
    want = longspan.load_model(path, dtype, backend).forward([5])
    tolerance = TOLERANCE if dtype == torch.float32 else 0.1
    for trace in traces[:2]:
        torch.testing.assert_close(trace.logits[0][0], want, atol=tolerance, rtol=0)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("context", [2, 4])
@pytest.mark.parametrize("interleave", [1, 4])
def test_a_prefix_of_others_goes_on_as_if_it_were_ones_own(
    interleave: int, context: int, backend: str, ranks: Ranks, checkpoint: Path
) -> None:
    """Three pages on every rank are shared by five sequences, which add 1 to 5 tokens and then one by one."""
    prefix = 3 * 4 * context
    split = Split(context, context, interleave=interleave, backend=backend)
    suffixes = {n: ids(10 + n, n + 2) for n in range(1, 6)}
    steps: list[Chunks] = [
        {0: ids(6, prefix)},
        {n: suffix[:n] for n, suffix in suffixes.items()},
        *({n: suffix[n + i : n + i + 1] for n, suffix in suffixes.items()} for i in range(2)),
    ]
    forks = [Fork(1, 0, n) for n in suffixes]
    script = Script(steps, num_seqs=6, max_tokens=prefix + 7, forks=forks)
    reference = run_script(alone(checkpoint, backend), script, WHOLE)
    traces = ranks.run(split.size, run_split, checkpoint, split, [script])
    check(traces, reference)
    for n, suffix in suffixes.items():
        assert sum(len(trace.keys[n][0]) for trace in traces) == prefix + len(suffix)
        whole = alone(checkpoint, backend).forward(steps[0][0] + suffix)
        got = torch.cat([traces[0].logits[step][n] for step in range(1, 4)])
        torch.testing.assert_close(got, whole[prefix:], atol=TOLERANCE, rtol=0)


def test_a_chunk_that_is_exchanged_in_several_blocks(ranks: Ranks, checkpoint: Path) -> None:
    script = Script([{0: ids(14, EXCHANGE_ROWS + 3)}], 1, EXCHANGE_ROWS + 3)
    split = Split(2, context=2, backend=BACKENDS[-1])
    reference = run_script(alone(checkpoint, split.backend), script, WHOLE)
    check(ranks.run(2, run_split, checkpoint, split, [script]), reference)


@pytest.mark.parametrize("family", ["kimi-linear", "k3"])
def test_other_families_are_split_too(family: str, ranks: Ranks, tmp_path: Path) -> None:
    """Without q-LoRA, gate, latent or indexer, and with gates of low rank."""
    values = published_config(family)
    attention = values.get("text_config", values)["linear_attn_config"] | {"num_heads": 4}
    path = write_checkpoint(
        tmp_path / family,
        family,
        num_attention_heads=4,
        num_key_value_heads=4,
        linear_attn_config=attention,
    )
    script = chunked_script()
    reference = run_script(alone(path, "torch"), script, WHOLE)
    for split in (Split(4), Split(2, context=2, replicas=1), Split(4, context=2, interleave=4)):
        check(ranks.run(split.size, run_split, path, split, [script]), reference)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("split", [Split(4, context=4), Split(2, context=2, replicas=2)], ids=["tp4", "dp2"])
def test_nan_of_a_sequence_is_seen_on_every_rank_and_in_no_other_sequence(
    split: Split, backend: str, ranks: Ranks, checkpoint: Path, tmp_path: Path
) -> None:
    """The embedding of token 60 is NaN, and so is its index key, which lies on one rank."""
    whole = open_checkpoint(checkpoint)
    tensors = {name: whole.tensor(name) for name in whole}
    name = "language_model.model.embed_tokens.weight"
    tensors[name] = tensors[name].clone()
    tensors[name][60] = torch.nan
    save_checkpoint(tensors, tmp_path)
    shutil.copy(checkpoint / "config.json", tmp_path)
    split = replace(split, backend=backend)
    clean, broken = [i % 60 for i in ids(12, 16)], [i % 60 for i in ids(13, 16)]
    broken[9] = 60
    script = Script([{0: clean[:12], 1: broken[:12]}, {1: broken[12:], 0: clean[12:]}], 2, 16)
    reference = run_script(longspan.load_model(tmp_path, "float32", backend), script, WHOLE)
    assert torch.cat([step[1] for step in reference.logits])[9:].isnan().all()
    for trace in ranks.run(split.size, run_split, tmp_path, split, [script] * split.replicas):
        for got, want in zip(trace.logits, reference.logits, strict=True):
            assert not got[0].isnan().any()
            for seq in (0, 1):
                torch.testing.assert_close(got[seq], want[seq], atol=TOLERANCE, rtol=0, equal_nan=True)


@pytest.mark.parametrize("backend", BACKENDS)
def test_bfloat16_ranks_stay_near_one_bfloat16_process(backend: str, ranks: Ranks, checkpoint: Path) -> None:
    """Rounding of partial sums may flip a choice, but not for most rows."""
    model = longspan.load_model(checkpoint, dtype="bfloat16", backend=backend)
    a, b = ids(8, 12), ids(9, 7)
    scripts = [Script([{0: a}], 1, 12), Script([{0: b}], 1, 12)]
    split = Split(2, context=2, replicas=2, backend=backend, dtype=torch.bfloat16)
    traces = ranks.run(4, run_split, checkpoint, split, scripts)
    for trace, prompt in zip(traces[::2], (a, b), strict=True):
        want = model.forward(prompt)
        error = (trace.logits[0][0] - want).square().mean(-1).sqrt() / want.square().mean(-1).sqrt()
        assert error.median() < 0.1


def test_traffic_of_dcp_is_candidates_and_outputs_as_the_formula_says(ranks: Ranks, checkpoint: Path) -> None:
    """One sequence of 26 tokens, one by one after 20: 2 layers, top-k 7, 8 heads, latents of 10."""
    for split in (Split(2, context=2), Split(4, context=2), Split(4, context=4)):
        a = ids(7, 26)
        script = Script([{0: a[:20]}, *({0: a[i : i + 1]} for i in range(20, 26))], 1, 26)
        d = split.context
        for trace in ranks.run(split.size, run_split, checkpoint, split, [script]):
            widths = [min(7, -(-20 // d))] * 20 + [min(7, -(-n // d)) for n in range(21, 27)]
            assert trace.traffic.nbytes["candidates"] == 2 * sum((d - 1) * w * 8 for w in widths)
            assert trace.traffic.nbytes["outputs"] == 2 * 26 * (d - 1) * (8 // split.tensor) * (10 + 1) * 4
            assert trace.traffic.rows["candidates"] == trace.traffic.rows["outputs"] == 2 * 26
