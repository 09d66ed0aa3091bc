"""What must hold of the decoder whatever its weights are."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.batches import Host
from support.random_checkpoint import TOP_K, published_config, random_tensors
from torch import Tensor

import longspan
from longspan.config import parse_config
from longspan.errors import RequestError
from longspan.memory.layout import allocate_views
from longspan.model.decoder import Decoder
from longspan.model.weights import build_weights
from longspan.ops import moe
from longspan.ops.backend import select_backend
from longspan.ops.batch import KdaView, MlaView


class InMemory(dict[str, Tensor]):
    """Tensors by canonical name."""

    def tensor(self, name: str) -> Tensor:
        return self[name]


def build(values: dict, tensors: dict[str, Tensor]) -> Decoder:
    config = parse_config(values)
    return Decoder(
        config,
        build_weights(InMemory(tensors), config, torch.float32),
        select_backend("torch"),
        torch.float32,
    )


def tokens(count: int) -> list[int]:
    return torch.randint(0, 61, (count,), generator=torch.Generator().manual_seed(0)).tolist()


@pytest.mark.parametrize("length", [1, TOP_K - 1, TOP_K])
def test_k31_up_to_top_k_tokens_is_exactly_the_dense_model(length: int) -> None:
    values = published_config("k3.1")
    tensors = random_tensors(values)
    sparse = build(values, tensors)
    dense = Decoder(
        dataclasses.replace(sparse.config, indexer=None), sparse.weights, sparse.ops, torch.float32
    )
    dense.weights = build_weights(InMemory(tensors), dense.config, torch.float32)
    ids = tokens(length)
    assert torch.equal(sparse.forward(ids), dense.forward(ids))


def test_k31_beyond_top_k_tokens_really_is_sparse() -> None:
    values = published_config("k3.1")
    tensors = random_tensors(values)
    everything = published_config(
        "k3.1", dsa_config={"index_n_heads": 3, "index_head_dim": 6, "index_topk": 100}
    )
    ids = tokens(TOP_K + 1)
    sparse, dense = build(values, tensors).forward(ids), build(everything, tensors).forward(ids)
    torch.testing.assert_close(sparse[:TOP_K], dense[:TOP_K], atol=1e-4, rtol=0)
    assert (sparse[TOP_K] - dense[TOP_K]).abs().max() > 1e-3


def test_selected_indices_are_shown_to_the_observer_of_each_full_attention_layer(
    model_of: Callable[[str], Decoder],
) -> None:
    seen: dict[tuple[str, int], Tensor] = {}
    model = model_of("k3.1")
    model.forward(tokens(20), lambda name, layer, tensor: seen.__setitem__((name, layer), tensor))
    assert [layer for name, layer in seen if name == "selected"] == [2, 4]
    assert [layer for name, layer in seen if name == "layer_output"] == [0, 1, 2, 3, 4]
    for layer in (2, 4):
        selected = seen["selected", layer]
        for row in range(20):
            chosen = [p for p in selected[row].tolist() if p >= 0]
            assert len(set(chosen)) == min(TOP_K, row + 1) and max(chosen) <= row


def test_each_layer_has_its_own_choice(model_of: Callable[[str], Decoder]) -> None:
    chosen: list[Tensor] = []
    model_of("k3.1").forward(
        tokens(40), lambda name, _, tensor: chosen.append(tensor) if name == "selected" else None
    )
    assert not torch.equal(*chosen)


def test_residual_weights_of_layer_0_before_attention_change_nothing() -> None:
    values = published_config("k3")
    tensors = random_tensors(values)
    want = build(values, tensors).forward(tokens(10))
    for name in ("norm", "proj"):
        tensors[f"model.layers.0.self_attention_res_{name}.weight"] = torch.full_like(
            tensors[f"model.layers.0.self_attention_res_{name}.weight"], torch.nan
        )
    assert torch.equal(build(values, tensors).forward(tokens(10)), want)


def test_a_constant_added_to_the_correction_bias_changes_nothing() -> None:
    values = published_config("k3")
    tensors = random_tensors(values)
    want = build(values, tensors).forward(tokens(10))
    for name in tensors:
        if name.endswith("e_score_correction_bias"):
            tensors[name] = tensors[name] + 0.5
    torch.testing.assert_close(build(values, tensors).forward(tokens(10)), want)


def test_an_index_query_from_the_hidden_state_is_detected_by_its_columns() -> None:
    values = published_config("k3.1")
    tensors = random_tensors(values)
    for layer in (2, 4):
        tensors[f"model.layers.{layer}.self_attn.indexer.wq_b.weight"] = torch.randn(18, 36).bfloat16()
    model = build(values, tensors)
    ids = tokens(20)
    torch.testing.assert_close(Host(model, 1, 20).feed(0, ids, 6), model.forward(ids), atol=1e-4, rtol=0)


def test_tied_embeddings_need_no_lm_head() -> None:
    values = published_config("kimi-linear", tie_word_embeddings=True)
    tensors = random_tensors(values)
    assert "lm_head.weight" not in tensors
    model = build(values, tensors)
    assert model.weights.lm_head is model.weights.embed
    assert model.forward(tokens(3)).shape == (3, 61)


def test_expert_groups_are_honoured() -> None:
    grouped = published_config("kimi-linear", num_expert_group=3, topk_group=1)
    plain = published_config("kimi-linear")
    tensors = random_tensors(plain)
    ids = tokens(12)
    assert not torch.allclose(build(grouped, tensors).forward(ids), build(plain, tensors).forward(ids))


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ([-1], "0 to 60"),
        ([3, 61], "the token id 61.* 0 to 60"),
        (torch.tensor([3, 61]), "the token id 61"),
        ([10**30], "the token id 1000"),
        ([1.5], r"Item 0 of `token_ids` is 1\.5"),
        ([True], "Item 0 of `token_ids` is True"),
        ([1, None], "Item 1 of `token_ids` is None"),
        ([[1, 2]], r"Item 0 of `token_ids` is \[1, 2\]"),
        (torch.ones(2), r"Item 0 of `token_ids` is 1\.0"),
        (torch.ones(2, dtype=torch.bool), "is True"),
        (torch.ones(1, 2, dtype=torch.int64), r"is \[1, 1\]"),
        (7, "`token_ids` is 7"),
        ("ab", "`token_ids` is 'ab'"),
    ],
)
def test_forward_refuses_what_is_no_list_of_ids_of_the_vocabulary(
    bad: Any, message: str, model_of: Callable[[str], Decoder]
) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        model_of("k3.1").forward(bad)
    assert caught.value.param == "token_ids"


def test_forward_takes_integers_of_every_kind(model_of: Callable[[str], Decoder]) -> None:
    want = model_of("k3").forward([3, 4, 5])
    for ids in (range(3, 6), (3, 4, 5), torch.tensor([3, 4, 5], dtype=torch.int16), list(torch.arange(3, 6))):
        assert torch.equal(model_of("k3").forward(ids), want)


@pytest.mark.parametrize("kind", ["kimi-linear", "k3", "k3.1"])
def test_bfloat16_stays_near_float32_when_choices_are_the_same(
    kind: str,
    checkpoint_of: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rounding flips choices of experts and keys in a random network, so those of float32 are replayed.

    Only the reference lets choices of experts be replayed; native operators are held to it one by one.
    """
    choices: list[object] = []

    def recording(op):
        def run(*args):
            choices.append(op(*args))
            return choices[-1]

        return run

    wide, low = (
        longspan.load_model(checkpoint_of(kind), dtype=dtype, backend="torch")
        for dtype in ("float32", "bfloat16")
    )
    wide.ops = dataclasses.replace(wide.ops, index_select=recording(wide.ops.index_select))
    monkeypatch.setattr(moe, "route", recording(moe.route))
    want = wide.forward(tokens(50))
    replay = iter(choices)
    low.ops = dataclasses.replace(low.ops, index_select=lambda *_: next(replay))
    monkeypatch.setattr(moe, "route", lambda *_: next(replay))
    got = low.forward(tokens(50))
    assert got.dtype == torch.float32
    error = (got - want).square().mean().sqrt() / want.square().mean().sqrt()
    assert 1e-4 < error < 0.12


@pytest.mark.parametrize("family", ["kimi-linear", "k3", "k3.1"])
def test_views_have_the_layout_that_the_contract_states(family: str) -> None:
    config = parse_config(published_config(family))
    views = allocate_views(config, 7, 4, 3, torch.bfloat16, poison=True)
    assert len(views) == 5
    for layer, view in enumerate(views):
        if layer in (2, 4):
            assert isinstance(view, MlaView)
            assert view.latent.shape == (7, 4, 14) and view.latent.dtype == torch.bfloat16
            assert view.latent.isnan().all()
            if family == "k3.1":
                assert isinstance(view.index_key, Tensor) and view.index_key.shape == (7, 4, 6)
            else:
                assert view.index_key is None
        else:
            assert isinstance(view, KdaView)
            assert view.state.shape == (3, 3, 6, 6) and view.state.dtype == torch.float32
            assert view.conv.shape == (3, 3, 54) and view.conv.dtype == torch.bfloat16
            assert view.state.isnan().all() and view.conv.isnan().all()
