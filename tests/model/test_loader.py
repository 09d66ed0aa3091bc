"""Loading: spellings and shapes that exist in the wild, refusals, and what is not copied or read."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.random_checkpoint import published_config, random_tensors, write_checkpoint
from support.serving import make_engine, make_request, run
from torch import Tensor

import longspan
from longspan.errors import CheckpointError, ConfigError, NonFiniteError
from longspan.formats.safetensors import save_checkpoint
from longspan.ops.moe import MxfpWeight

IDS = list(range(0, 60, 3))


def write(directory: Path, values: dict, tensors: dict[str, Tensor]) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(values))
    save_checkpoint(tensors, directory)
    return directory


@pytest.mark.parametrize("prefix", ["", "language_model."])
def test_names_load_with_and_without_the_prefix(prefix: str, tmp_path: Path) -> None:
    plain = write_checkpoint(tmp_path / "plain", "k3", prefix="language_model.")
    other = write_checkpoint(tmp_path / "other", "k3", prefix=prefix)
    want = longspan.load_model(plain, dtype="float32").forward(IDS)
    assert torch.equal(longspan.load_model(other, dtype="float32").forward(IDS), want)


def test_quirks_of_shape_and_dtype_change_nothing(tmp_path: Path) -> None:
    """A_log flat or padded, convolutions [P, kernel] or [P, 1, kernel], float32 stored as bfloat16."""
    values = published_config("kimi-linear")
    tensors = random_tensors(values)
    for name in tensors:
        if any(part in name for part in ("A_log", "dt_bias", "conv1d", "o_norm", "correction_bias")):
            tensors[name] = tensors[name].bfloat16().float()
    want = longspan.load_model(write(tmp_path / "a", values, tensors), dtype="float32").forward(IDS)

    odd = dict(tensors)
    for name, tensor in tensors.items():
        if name.endswith("A_log"):
            odd[name] = torch.cat([tensor.reshape(-1), torch.zeros(128 - tensor.numel())])
        if "conv1d" in name:
            odd[name] = tensor.squeeze(1)
        if name.endswith(("dt_bias", "o_norm.weight", "correction_bias")):
            odd[name] = tensor.bfloat16()
    assert torch.equal(
        longspan.load_model(write(tmp_path / "b", values, odd), dtype="float32").forward(IDS), want
    )


def test_packed_and_plain_experts_of_the_same_values_agree(tmp_path: Path) -> None:
    from longspan.formats.mx import dequantize_mxfp4

    packed_values, plain_values = published_config("k3", packed=True), published_config("k3")
    packed = random_tensors(packed_values)
    plain = {
        name.replace("_packed", ""): dequantize_mxfp4(
            tensor, packed[name.replace("_packed", "_scale")]
        ).bfloat16()
        if name.endswith("_packed")
        else tensor
        for name, tensor in packed.items()
        if not name.endswith("_scale")
    }
    a, b = write(tmp_path / "packed", packed_values, packed), write(tmp_path / "plain", plain_values, plain)
    for dtype in ("float32", "bfloat16"):
        one, other = (longspan.load_model(path, dtype=dtype, backend="torch").forward(IDS) for path in (a, b))
        assert torch.equal(one, other)
    # The native kernels add in another order where codes are packed.
    one, other = (longspan.load_model(path, dtype="float32").forward(IDS) for path in (a, b))
    torch.testing.assert_close(one, other, atol=1e-4, rtol=0)


def test_bfloat16_weights_lie_in_the_mapped_file_and_float32_ones_are_converted(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "k3", "k3", packed=True)

    def in_file(tensor: Tensor) -> bool:
        for line in Path("/proc/self/maps").read_text().splitlines():
            if str(path) in line:
                begin, end = (int(x, 16) for x in line.split()[0].split("-"))
                if begin <= tensor.data_ptr() < end:
                    return True
        return False

    low = longspan.load_model(path, dtype="bfloat16")
    for tensor in (low.weights.embed, low.weights.lm_head, low.weights.layers[0].attention.output):
        assert in_file(tensor)
    wide = longspan.load_model(path, dtype="float32")
    assert not in_file(wide.weights.embed)
    for model in (low, wide):
        expert = model.weights.layers[1].ffn.bank[3].down
        assert isinstance(expert, MxfpWeight) and in_file(expert.packed) and in_file(expert.scale)


@pytest.mark.parametrize("layer", [1, 4])
@pytest.mark.parametrize("matrix", ["w1", "w2", "w3"])
@pytest.mark.parametrize(("byte", "found"), [(255, "255"), (254, r"2\*\*127")])
def test_a_corrupt_expert_is_logged_once_and_ends_only_requests_that_hit_it(
    layer: int, matrix: str, byte: int, found: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    values = published_config("k3.1", packed=True)
    tensors = random_tensors(values)
    clean = longspan.load_model(write(tmp_path / "clean", values, tensors), dtype="float32")
    name = f"model.layers.{layer}.block_sparse_moe.experts.4.{matrix}.weight_scale"
    tensors[name][1, 0] = byte
    model = longspan.load_model(write(tmp_path / "corrupt", values, tensors), dtype="float32")
    requests = [make_request(str(token), [token], max_tokens=1) for token in range(3, 35)]
    expected = run(make_engine(clean, num_slots=32), *requests)
    answers = run(make_engine(model, num_slots=32), *requests)
    failed = [answer for answer in answers.values() if answer.reason == "error"]
    assert 0 < len(failed) < len(answers)
    assert all(isinstance(answer.finish and answer.finish.error, NonFiniteError) for answer in failed)
    for key, answer in answers.items():
        assert answer in failed or answer.token_ids == expected[key].token_ids
    (record,) = caplog.records
    assert re.search(rf"{name}: .*{found}", record.message)


def test_loading_touches_no_expert(tmp_path: Path, monkeypatch) -> None:
    from longspan.formats.safetensors import Checkpoint

    read: list[str] = []
    tensor = Checkpoint.tensor
    monkeypatch.setattr(Checkpoint, "tensor", lambda self, name: read.append(name) or tensor(self, name))
    model = longspan.load_model(write_checkpoint(tmp_path / "k3", "k3", packed=True))
    assert read and not [name for name in read if ".experts." in name]
    model.forward([1])
    hit = {
        name.split(".experts.")[1].split(".")[0]
        for name in read
        if "layers.1" in name and ".experts." in name
    }
    assert len(hit) == 2  # top-k of one token


@pytest.mark.parametrize("lost", ["model.norm.weight", "model.layers.4.self_attn.indexer.wk.weight"])
def test_a_missing_tensor_is_named(lost: str, tmp_path: Path) -> None:
    values = published_config("k3.1", packed=True)
    tensors = random_tensors(values)
    del tensors[lost]
    with pytest.raises(CheckpointError, match=lost.replace(".", r"\.")):
        longspan.load_model(write(tmp_path / "x", values, tensors))


def test_an_unexpected_tensor_is_named(tmp_path: Path) -> None:
    values = published_config("k3")
    tensors = random_tensors(values) | {"model.layers.0.self_attn.rotary.weight": torch.zeros(3)}
    with pytest.raises(CheckpointError, match="rotary"):
        longspan.load_model(write(tmp_path / "x", values, tensors))


@pytest.mark.parametrize(
    "changed",
    [torch.zeros(61, 35).bfloat16(), torch.zeros(61, 36, dtype=torch.uint8)],
    ids=["shape", "dtype"],
)
def test_a_wrong_shape_or_dtype_is_named_with_what_was_expected(changed: Tensor, tmp_path: Path) -> None:
    values = published_config("k3")
    tensors = random_tensors(values) | {"lm_head.weight": changed}
    with pytest.raises(CheckpointError, match=r"lm_head\.weight.*BF16.*\[61, 36\]"):
        longspan.load_model(write(tmp_path / "x", values, tensors))


@pytest.mark.parametrize("dtype", ["bfloat16", torch.bfloat16])
def test_dtype_may_be_a_name_or_a_torch_dtype(dtype, checkpoint_of: Callable[[str], Path]) -> None:
    assert longspan.load_model(checkpoint_of("k3"), dtype=dtype).dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", ["float16", "fp8", torch.float64])
def test_an_unknown_dtype_is_refused_with_the_legal_ones(dtype, checkpoint_of: Callable[[str], Path]) -> None:
    with pytest.raises(ConfigError, match="'bfloat16', 'float32'"):
        longspan.load_model(checkpoint_of("k3"), dtype=dtype)


def test_an_unknown_backend_is_refused(checkpoint_of: Callable[[str], Path]) -> None:
    with pytest.raises(ConfigError, match="'torch'"):
        longspan.load_model(checkpoint_of("k3"), backend="warp")
