"""The training code of models/k31-tiny: its model is the published one, and its export loses nothing."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from train_tiny import tokenizer as tokenizer_training
from train_tiny.data import Builder, Options, tokenizer_texts
from train_tiny.export import config_json, export, load_published, published_tensors
from train_tiny.kda import CHUNK, kda_chunked, kda_recurrent, unit_lower_inverse
from train_tiny.model import Config, TinyK31
from train_tiny.muon import orthogonalize
from train_tiny.mxfp4 import round_mxfp4

from longspan.chat import Tokenizer, render
from longspan.evaluation import skills, tool_skill
from longspan.evaluation.text import Text

SMALL = {
    "vocab_size": 384,
    "hidden": 64,
    "layers": 4,
    "full_layers": (1, 3),
    "kda_heads": 2,
    "kda_dim": 32,
    "heads": 2,
    "dense_inter": 64,
    "experts": 4,
    "latent": 32,
    "moe_inter": 32,
    "index_topk": 8,
    "res_block": 2,
}


def kda_inputs(length: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    q, k, v, z = (torch.randn(2, 2, length, 16, generator=generator) for _ in range(4))
    g = -5 * torch.sigmoid(3 * z)
    beta = torch.rand(2, 2, length, generator=generator)
    return [x.requires_grad_() for x in (q, F.normalize(k, dim=-1), v, g, beta)]


def test_chunked_kda_and_its_gradients_equal_the_recurrence() -> None:
    inputs = kda_inputs(3 * CHUNK)
    slow, fast = kda_recurrent(*inputs), kda_chunked(*inputs)
    torch.testing.assert_close(fast, slow, atol=2e-5, rtol=1e-4)
    weights = torch.randn_like(slow)
    for a, b in zip(
        torch.autograd.grad((slow * weights).sum(), inputs),
        torch.autograd.grad((fast * weights).sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(b, a, atol=2e-4, rtol=1e-3)


def test_the_inverse_is_exact_where_all_keys_are_alike() -> None:
    a = torch.ones(1, CHUNK, CHUNK).tril(-1)
    product = unit_lower_inverse(a) @ (torch.eye(CHUNK) + a)
    torch.testing.assert_close(product[0], torch.eye(CHUNK))


def test_the_training_model_gives_the_golden_logits_of_kimi_k31(data_dir: Path) -> None:
    folder = data_dir / "k31-text"
    config = Config(
        vocab_size=384,
        hidden=128,
        full_layers=(3, 7),
        kda_heads=4,
        kda_dim=32,
        heads=4,
        nope=32,
        rope=16,
        v_dim=32,
        q_lora=64,
        kv_lora=64,
        res_block=3,
        tied=False,
        index_topk=16,
        dense_inter=256,
        experts=8,
        latent=64,
        moe_inter=64,
        capacity=0,
        compute_dtype=torch.float32,
    )
    model = TinyK31(config)
    load_published(model, load_file(folder / "model.safetensors"))
    golden = load_file(folder / "golden.safetensors")
    ids = golden["input_ids"].reshape(1, -1)
    padded = F.pad(ids, (0, -ids.shape[1] % CHUNK))
    with torch.no_grad():
        logits = model.logits(model(padded, "sparse").hidden)[0, : ids.shape[1]]
    torch.testing.assert_close(logits, golden["logits"].reshape(logits.shape), atol=2e-3, rtol=0)


def test_rounding_to_mxfp4_is_what_the_export_packs() -> None:
    w = torch.randn(5, 64, generator=torch.Generator().manual_seed(1)) * 0.1
    rounded = round_mxfp4(w)
    assert torch.equal(round_mxfp4(rounded), rounded)
    model = TinyK31(Config(**SMALL, compute_dtype=torch.float32))
    published = published_tensors(model)
    again = TinyK31(Config(**SMALL, compute_dtype=torch.float32))
    load_published(again, published)
    for name, value in model.state_dict().items():
        if ".experts.w" in name:
            assert torch.equal(again.state_dict()[name], round_mxfp4(value)), name


def test_an_exported_model_computes_what_the_training_model_computes() -> None:
    torch.manual_seed(2)
    model = TinyK31(Config(**SMALL, capacity=0, compute_dtype=torch.float32))
    for p in model.parameters():
        if p.dim() < 3:
            p.data = p.data.bfloat16().float()  # so that the export rounds nothing but the experts
    again = TinyK31(model.c)
    load_published(again, published_tensors(model))
    ids = torch.randint(0, 384, (1, 64))
    with torch.no_grad():
        torch.testing.assert_close(again(ids, "sparse").hidden, model(ids, "sparse").hidden)


def test_an_export_has_the_names_and_dtypes_of_the_golden_checkpoint(tmp_path: Path, data_dir: Path) -> None:
    model = TinyK31(Config(**SMALL | {"layers": 8, "full_layers": (3, 7), "experts": 8}))
    export(model, tmp_path)
    ours = load_file(tmp_path / "model.safetensors")
    golden = load_file(data_dir / "k31-text" / "model.safetensors")
    assert {n: t.dtype for n, t in ours.items()} == {n: t.dtype for n, t in golden.items()}
    assert ours["language_model.model.layers.0.self_attn.A_log"].shape == (128,)
    config = json.loads((tmp_path / "config.json").read_text())
    golden_config = json.loads((data_dir / "k31-text" / "config.json").read_text())
    assert config["architectures"] == golden_config["architectures"]
    assert golden_config["text_config"].keys() - {"dtype"} <= config["text_config"].keys()


def test_experts_beyond_capacity_are_the_only_difference_of_training() -> None:
    torch.manual_seed(3)
    model = TinyK31(Config(**SMALL, compute_dtype=torch.float32))
    ids = torch.randint(0, 384, (2, 64))
    with torch.no_grad():
        model.c.capacity = 4.0  # as many rows per expert as there are
        boxed = model(ids).hidden
        model.c.capacity = 0.0
        torch.testing.assert_close(model(ids).hidden, boxed)


def test_the_indexer_learns_from_its_own_loss_only() -> None:
    torch.manual_seed(4)
    model = TinyK31(Config(**SMALL, compute_dtype=torch.float32))
    out = model(torch.randint(0, 384, (2, 64)), "sparse", torch.arange(0, 64, 4))
    sum(i.kl for i in out.index).backward()
    with_gradient = {n for n, p in model.named_parameters() if p.grad is not None and p.grad.abs().sum() > 0}
    assert with_gradient
    assert all(".indexer." in name for name in with_gradient)


def test_orthogonalize_brings_singular_values_near_one() -> None:
    values = torch.linalg.svdvals(
        orthogonalize(torch.randn(3, 32, 48, generator=torch.Generator().manual_seed(5)))
    )
    assert values.min() > 0.5
    assert values.max() < 1.5


def test_the_tokenizer_never_merges_digits_and_has_the_special_offsets(tmp_path: Path) -> None:
    counts = tokenizer_training.count_pieces(["the thing that 123 the 1234 there"] * 3)
    tokenizer_training.write(tokenizer_training.train(counts, 265), tmp_path)
    tokenizer = Tokenizer.from_dir(tmp_path)
    assert tokenizer.n_base == 265
    assert len(tokenizer.encode("1234")) == 4
    assert len(tokenizer.encode("the")) < 3
    for offset, name in tokenizer_training.SPECIAL.items():
        assert tokenizer.special[name] == 265 + offset


def test_the_tokenizer_is_trained_on_text_and_on_every_kind_of_conversation(tiny_dir: Path) -> None:
    text = Text.read(tiny_dir / "heldout.txt")
    texts = "\n".join(tokenizer_texts(text, conversations=20))
    assert text.sentences[0] in texts
    assert all(part in texts for part in ("argument", "I look for", "I copy the text", "# Tools"))


@pytest.mark.parametrize("thinking", [True, False])
def test_a_packed_conversation_is_what_render_gives_for_the_whole(tiny_dir: Path, thinking: bool) -> None:
    tokenizer = Tokenizer.from_dir(tiny_dir)
    text = Text("In the beginning was the word. And the earth was without form. Let there be light now.")
    builder, rng = Builder(tokenizer, text), random.Random(6)
    declared = tool_skill.declare(rng, 2)
    options = Options([d.tool for d in declared], "Be brief.", thinking, "high")
    turns = [*tool_skill.call(rng, declared), *skills.addition(rng, thinking), *skills.copy(rng, text)]
    sequence = builder.begin(options)
    messages: list[dict] = [{"role": "system", "content": options.system}]
    for turn in turns:
        builder.add(sequence, turn, options)
        messages += [*turn.messages, turn.answer]
    segments = render(
        messages, options.tools, thinking=thinking, thinking_effort="high", add_generation_prompt=False
    )
    assert sequence.ids == tokenizer.encode_segments(segments)
    assert len(sequence.weights) == len(sequence.ids)


def test_the_config_lists_layers_from_one() -> None:
    text = config_json(Config(), 1792)["text_config"]
    assert text["dsa_config"]["dsa_layers"] == text["linear_attn_config"]["full_attn_layers"] == [4, 8]
    assert text["eos_token_id"] == 1794
