"""`longspan inspect` says what a checkpoint is, what it needs and what is wrong with it."""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from longspan import inspect
from longspan.errors import ConfigError
from longspan.formats.safetensors import open_checkpoint, save_checkpoint, save_file

CONFIGS = Path(__file__).parent / "data" / "configs"


def run(*arguments: object) -> int:
    parser = argparse.ArgumentParser()
    inspect.add_arguments(parser)
    return inspect.main(parser.parse_args([str(a) for a in arguments]))


def copy_of(data_dir: Path, tmp_path: Path, folder: str = "k31-text") -> tuple[Path, dict[str, torch.Tensor]]:
    """A directory with the golden config, and the tensors to save into it."""
    target = tmp_path / "checkpoint"
    target.mkdir()
    shutil.copy(data_dir / folder / "config.json", target)
    source = open_checkpoint(data_dir / folder)
    return target, {name: source.tensor(name) for name in source.names}


def test_k3s_config_alone_says_its_published_numbers(capsys):
    assert run(CONFIGS / "k3.json") == 0
    out = capsys.readouterr().out
    assert "497,220 tensors, 2.78 T parameters, 104.2 B active, 1.561 TB" in out
    assert "27,648 B" in out
    assert "434,110,464 B recurrent" in out
    assert "15,261,696 B" in out
    assert "kKKMKKKMKKKM" in out
    assert "KKKMKKKMM" in out
    assert "No weights here" in out


def test_json_has_the_documented_fields(capsys):
    assert run(CONFIGS / "k31-pro.json", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert set(report) == {
        "path",
        "family",
        "config",
        "layers",
        "tensors",
        "bytes",
        "parameters",
        "parts",
        "memory",
        "weights",
    }
    assert report["family"] == "k3.1"
    assert report["tensors"] == 497_340
    assert report["weights"] is None
    assert report["layers"]["full_attention"] == [*range(3, 92, 4), 92]
    assert report["layers"]["dense"] == [0]
    assert report["config"]["indexer"]["top_k"] == 2048
    assert report["parts"]["indexer"]["tensors"] == 120
    memory = report["memory"]
    assert memory["cache_per_token"] == {"latent": 27_648, "index_key": 6_144, "total": 33_792}
    assert memory["state_per_sequence"] == {
        "recurrent": 434_110_464,
        "conv": 15_261_696,
        "total": 449_372_160,
    }
    assert memory["context"] == 1_048_576
    assert memory["with_weights"] == report["bytes"] + memory["context_total"]


def test_memory_grows_by_the_cache_of_each_token():
    one, many = (inspect.inspect(CONFIGS / "kimi-linear.json", n)["memory"] for n in (1, 1001))
    assert one["context_total"] == 8064 + 41_943_040 + 1_474_560
    assert many["context_total"] - one["context_total"] == 1000 * 8064


@pytest.mark.parametrize("context", [0, -1, 1_048_577])
def test_a_context_the_model_cannot_have_is_refused_with_the_limit(context):
    with pytest.raises(ConfigError, match="legal is 1 to max_position_embeddings = 1048576"):
        inspect.inspect(CONFIGS / "k3.json", context)


@pytest.mark.parametrize("folder", ["k3-text", "k31-text"])
def test_golden_checkpoints_inspect_clean(data_dir, capsys, folder):
    assert run(data_dir / folder) == 0
    out = capsys.readouterr().out
    assert "Nothing missing, unexpected or of the wrong shape or dtype." in out


def test_bytes_in_files_equal_bytes_expected_part_by_part(data_dir):
    report = inspect.inspect(data_dir / "k31-text")
    assert report["weights"]["parts"] == {name: part["bytes"] for name, part in report["parts"].items()}
    assert report["weights"]["bytes"] == report["bytes"]


def test_every_kind_of_fault_is_listed_and_fails(data_dir, tmp_path, capsys):
    target, tensors = copy_of(data_dir, tmp_path)
    prefix = "language_model.model.layers.3.self_attn"
    del tensors["language_model.model.norm.weight"]
    tensors[f"{prefix}.rotary_emb.inv_freq"] = torch.zeros(8)
    tensors[f"{prefix}.indexer.wk.weight"] = torch.zeros(31, 128, dtype=torch.bfloat16)
    save_checkpoint(tensors, target, max_shard_bytes=1_000_000)
    assert run(target) == 1
    out = capsys.readouterr().out
    assert "1 missing:\n  model.norm.weight\n" in out
    assert f"1 unexpected:\n  {prefix}.rotary_emb.inv_freq\n" in out
    assert f"1 wrong:\n  {prefix}.indexer.wk.weight is BF16 [31, 128]; expected" in out
    assert run(target, "--json") == 1
    weights = json.loads(capsys.readouterr().out)["weights"]
    assert (len(weights["missing"]), len(weights["unexpected"]), len(weights["wrong"])) == (1, 1, 1)
    assert weights["parts"]["unexpected"] == 32


def test_long_lists_are_cut_on_the_terminal_but_whole_in_json(data_dir, tmp_path, capsys):
    target, tensors = copy_of(data_dir, tmp_path)
    save_file({"lm_head.weight": tensors["language_model.lm_head.weight"]}, target / "model.safetensors")
    assert run(target) == 1
    out = capsys.readouterr().out
    assert "557 missing:" in out
    assert "... and 537 more" in out
    assert len(inspect.inspect(target)["weights"]["missing"]) == 557


def test_weights_that_cannot_be_opened_still_show_what_the_config_says(data_dir, tmp_path, capsys):
    target, tensors = copy_of(data_dir, tmp_path)
    save_checkpoint(tensors, target, max_shard_bytes=1_000_000)
    next(target.glob("model-00002*")).unlink()
    assert run(target) == 1
    out = capsys.readouterr().out
    assert "558 tensors" in out
    assert "Weights cannot be opened. 1 of the 4 shards" in out
    assert run(target, "--json") == 1
    assert "missing: 'model-00002" in json.loads(capsys.readouterr().out)["weights"]["error"]


def test_a_config_given_as_a_file_is_inspected_alone(data_dir):
    assert inspect.inspect(data_dir / "k3-text" / "config.json")["weights"] is None


def test_inspecting_weights_does_not_import_torch(data_dir):
    code = (
        "import sys; from longspan.inspect import inspect;"
        f"assert inspect({str(data_dir / 'k3-text')!r})['weights']['tensors'] == 548;"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
