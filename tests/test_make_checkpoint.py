"""`longspan make-checkpoint` writes what the published format asks for, sane at any depth."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

import longspan
from longspan.cli import main
from longspan.formats.mx import dequantize_mxfp4
from longspan.formats.safetensors import open_checkpoint
from longspan.make_checkpoint import make_checkpoint
from longspan.shapes import SHAPES, published_config


def shrunk(shape: str) -> dict[str, Any]:
    """The sizes of a shape with its own layer map, but narrow."""
    sizes = copy.deepcopy(SHAPES[shape]) | {
        "vocab_size": 97,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 3,
        "q_lora_rank": 24,
        "kv_lora_rank": 16,
        "num_experts": 5,
        "num_experts_per_token": 2,
        "moe_intermediate_size": 32,
        "routed_expert_hidden_size": 64,
    }
    sizes["linear_attn_config"] |= {"num_heads": 3, "head_dim": 16}
    sizes["dsa_config"] = {"index_n_heads": 3, "index_head_dim": 16, "index_topk": 7}
    return sizes


@pytest.fixture(autouse=True)
def narrow_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    for shape in SHAPES:
        monkeypatch.setitem(SHAPES, shape, shrunk(shape))


@pytest.mark.parametrize("family", ["k3.1", "k3"])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_written_checkpoint_inspects_clean_and_computes_sane_values(
    shape: str, family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "new" / shape
    assert main(["make-checkpoint", str(path), "--shape", shape, "--family", family]) == 0
    assert shape in capsys.readouterr().out
    assert main(["inspect", str(path)]) == 0
    assert "Nothing missing, unexpected or of the wrong shape or dtype." in capsys.readouterr().out

    spread = []
    model = longspan.load_model(path, backend="torch")
    logits = model.forward(list(range(40)), lambda kind, _, x: spread.append((kind, x.float().std())))
    outputs = [deviation for kind, deviation in spread if kind == "layer_output"]
    assert len(outputs) == model.config.num_layers
    assert all(0.1 < deviation < 10 for deviation in outputs)
    assert 0.3 < logits.std() < 3
    assert any(kind == "selected" for kind, _ in spread) == (family == "k3.1")


@pytest.mark.parametrize("width", [32, 96, 512])
def test_packed_experts_have_nearly_the_gain_of_a_matrix(width: int, tmp_path: Path) -> None:
    sizes = SHAPES["real-layer"] | {"routed_expert_hidden_size": width}
    make_checkpoint(tmp_path, published_config(sizes))
    checkpoint = open_checkpoint(tmp_path)
    stem = "language_model.model.layers.1.block_sparse_moe.experts.0.w1.weight"
    values = dequantize_mxfp4(checkpoint.tensor(f"{stem}_packed"), checkpoint.tensor(f"{stem}_scale"))
    assert values.shape == (32, width)
    assert 0.35 < values.std() * width**0.5 < 0.85
    assert len(checkpoint.tensor(f"{stem}_packed").unique()) > 100


def test_the_seed_decides_the_weights(tmp_path: Path) -> None:
    files = []
    for name, seed in (("a", "3"), ("b", "3"), ("c", "4")):
        assert main(["make-checkpoint", str(tmp_path / name), "--shape", "real-layer", "--seed", seed]) == 0
        files.append((tmp_path / name / "model.safetensors").read_bytes())
    assert files[0] == files[1] != files[2]


def test_a_directory_in_use_is_refused_and_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert main(["make-checkpoint", str(tmp_path), "--shape", "mini"]) == 2
    assert str(tmp_path) in capsys.readouterr().err
    assert [file.name for file in tmp_path.iterdir()] == ["config.json"]
    assert main(["make-checkpoint", str(tmp_path / "config.json"), "--shape", "mini"]) == 2


def test_a_disk_too_small_is_told_before_anything_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 10}))
    assert main(["make-checkpoint", str(tmp_path), "--shape", "mini"]) == 2
    assert "GB free" in capsys.readouterr().err
    assert not any(tmp_path.iterdir())
