"""Reading and writing safetensors: right tensors or a clear error, never anything else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import safetensors
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from longspan.errors import CheckpointError
from longspan.formats.safetensors import open_checkpoint, save_checkpoint, save_file

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]


def random_tensor(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=g).bool()
    if dtype.is_floating_point:
        return torch.randn(shape, generator=g).to(dtype)
    return torch.randint(0, 100, shape, generator=g).to(dtype)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    raw = [t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b)]
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*raw)


def sample() -> dict[str, torch.Tensor]:
    shapes = [(3, 4), (5,), (), (0, 7), (2, 1, 3)]
    return {f"t.{i}": random_tensor(d, shapes[i % 5], i) for i, d in enumerate(DTYPES)}


def write_raw(path: Path, header: object, data: bytes = b"") -> Path:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + data)
    return path


tensors_strategy = st.dictionaries(
    st.text(min_size=1, max_size=12).filter(lambda name: name != "__metadata__"),
    st.tuples(
        st.sampled_from(DTYPES),
        st.lists(st.integers(0, 4), max_size=3).map(tuple),
        st.integers(0, 2**32),
    ),
    max_size=6,
)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(tensors_strategy)
def test_what_is_written_is_read_back_by_us_and_by_the_reference_library(tmp_path, recipe):
    tensors = {name: random_tensor(*how) for name, how in recipe.items()}
    path = tmp_path / "x.safetensors"
    save_file(tensors, path, {"format": "pt"})
    ours, theirs = open_checkpoint(path), safetensors.torch.load_file(path)
    assert set(ours.names) == set(theirs) == set(tensors)
    for name, tensor in tensors.items():
        assert same(ours.tensor(name), tensor)
        assert same(theirs[name], tensor)
        assert ours.info(name).shape == tuple(tensor.shape)
        assert ours.info(name).nbytes == tensor.nbytes


def test_files_of_the_reference_library_are_read(tmp_path):
    safetensors.torch.save_file(sample(), tmp_path / "x.safetensors", {"a": "b"})
    ours = open_checkpoint(tmp_path / "x.safetensors")
    assert ours.metadata == {"a": "b"}
    assert all(same(ours.tensor(name), t) for name, t in sample().items())


def test_non_contiguous_tensors_are_written_in_reading_order(tmp_path):
    base = torch.arange(12.0).reshape(3, 4)
    save_file({"t": base.T}, tmp_path / "x.safetensors")
    assert same(open_checkpoint(tmp_path / "x.safetensors").tensor("t"), base.T)


def test_tensors_are_views_of_one_mapping_and_outlive_the_checkpoint(tmp_path):
    save_file({"a": torch.arange(8.0), "b": torch.arange(4)}, tmp_path / "x.safetensors")
    checkpoint = open_checkpoint(tmp_path / "x.safetensors")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        a, again, b = checkpoint.tensor("a"), checkpoint.tensor("a"), checkpoint.tensor("b")
    assert a.data_ptr() == again.data_ptr()
    assert a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
    del checkpoint, again, b
    assert a.sum() == 28


def test_misaligned_data_is_still_read_rightly(tmp_path):
    values = torch.arange(6.0)
    header = {
        "a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},
        "b": {"dtype": "F32", "shape": [6], "data_offsets": [1, 25]},
    }
    path = write_raw(tmp_path / "x.safetensors", header, b"\1" + values.numpy().tobytes())
    assert same(open_checkpoint(path).tensor("b"), values)


def test_reading_headers_does_not_import_torch(tmp_path):
    save_file({"a": torch.zeros(3)}, tmp_path / "model.safetensors")
    code = (
        "import sys; from longspan.formats.safetensors import open_checkpoint;"
        f"c = open_checkpoint({str(tmp_path)!r}); assert c.info('a').shape == (3,);"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_failed_write_leaves_the_old_file_and_no_litter(tmp_path):
    path = tmp_path / "x.safetensors"
    save_file({"a": torch.ones(3)}, path)
    with pytest.raises(CheckpointError, match="complex64"):
        save_file({"a": torch.zeros(3, dtype=torch.complex64)}, path)
    assert os.listdir(tmp_path) == ["x.safetensors"]
    assert open_checkpoint(path).tensor("a").sum() == 3


# --- sharded ---


def sharded(directory: Path, n: int = 6) -> dict[str, torch.Tensor]:
    tensors = {f"layer.{i}": torch.full((4,), float(i)) for i in range(n)}
    save_checkpoint(tensors, directory, max_shard_bytes=32)
    return tensors


def edit_index(directory: Path, change) -> None:
    path = directory / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    change(index)
    path.write_text(json.dumps(index))


def test_shards_hold_what_was_given_within_their_limit(tmp_path):
    tensors = sharded(tmp_path, 7)
    assert sorted(p.name for p in tmp_path.glob("*.safetensors")) == [
        f"model-0000{i}-of-00004.safetensors" for i in (1, 2, 3, 4)
    ]
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.names == list(tensors)
    assert all(same(checkpoint.tensor(name), t) for name, t in tensors.items())
    assert (
        checkpoint.nbytes
        == json.loads((tmp_path / "model.safetensors.index.json").read_text())["metadata"]["total_size"]
    )


def test_a_small_checkpoint_is_one_file_without_index(tmp_path):
    save_checkpoint(sample(), tmp_path)
    assert os.listdir(tmp_path) == ["model.safetensors"]
    assert set(open_checkpoint(tmp_path).names) == set(sample())


def test_writing_over_a_checkpoint_of_other_shards_is_refused(tmp_path):
    sharded(tmp_path)
    with pytest.raises(CheckpointError, match="holds other weights: 'model-00001-of-00003"):
        save_checkpoint({"a": torch.zeros(2)}, tmp_path)
    sharded(tmp_path)


def test_missing_shards_are_named(tmp_path):
    sharded(tmp_path)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"1 of the 3 shards .* missing: 'model-00002-of-00003"):
        open_checkpoint(tmp_path)


def test_a_tensor_the_index_promises_but_the_shard_lacks_is_named(tmp_path):
    sharded(tmp_path)
    edit_index(tmp_path, lambda i: i["weight_map"].update({"layer.9": "model-00001-of-00003.safetensors"}))
    with pytest.raises(CheckpointError, match=r"lacks 1 tensors .*'layer\.9'"):
        open_checkpoint(tmp_path)


def test_a_tensor_in_two_shards_is_refused(tmp_path):
    sharded(tmp_path)
    save_file(
        {"layer.2": torch.zeros(4), "layer.3": torch.zeros(4), "layer.0": torch.ones(4)},
        tmp_path / "model-00002-of-00003.safetensors",
    )
    with pytest.raises(CheckpointError, match=r"'layer\.0'; .* places it in model-00001-of-00003"):
        open_checkpoint(tmp_path)


def test_a_tensor_the_index_does_not_list_is_refused(tmp_path):
    sharded(tmp_path)
    edit_index(tmp_path, lambda i: i["weight_map"].pop("layer.5"))
    with pytest.raises(CheckpointError, match=r"'layer\.5'; .* does not list it"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    "name", ["../x.safetensors", "/etc/passwd", "a/b.safetensors", "..", "", "a\\b", "a\0b"]
)
def test_shard_names_that_leave_the_directory_are_refused(tmp_path, name):
    sharded(tmp_path / "c")
    save_file({"layer.0": torch.zeros(4)}, tmp_path / "x.safetensors")
    edit_index(tmp_path / "c", lambda i: i["weight_map"].update({"layer.0": name}))
    with pytest.raises(CheckpointError, match="only plain file names"):
        open_checkpoint(tmp_path / "c")


def test_a_link_out_of_the_checkpoint_is_refused_but_a_hub_cache_works(tmp_path):
    save_file({"a": torch.ones(2)}, tmp_path / "elsewhere")
    plain = tmp_path / "plain"
    plain.mkdir()
    (plain / "model.safetensors").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="links out of the checkpoint"):
        open_checkpoint(plain)
    snapshot, blobs = tmp_path / "models--k" / "snapshots" / "abc", tmp_path / "models--k" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    save_file({"a": torch.ones(2)}, blobs / "123")
    (snapshot / "model.safetensors").symlink_to(Path("..", "..", "blobs", "123"))
    assert open_checkpoint(snapshot).tensor("a").sum() == 2


def test_a_directory_with_a_single_file_and_a_foreign_index_is_refused(tmp_path):
    sharded(tmp_path)
    save_file({"layer.0": torch.zeros(4)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="holds both"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {}}', "[" * 100_000]
)
def test_a_broken_index_is_refused(tmp_path, content):
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"model\.safetensors\.index\.json"):
        open_checkpoint(tmp_path)


def test_an_index_value_that_is_no_name_is_refused(tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": 3}}')
    with pytest.raises(CheckpointError, match="places 'a' in 3"):
        open_checkpoint(tmp_path)


def test_paths_without_weights_say_what_is_there(tmp_path):
    with pytest.raises(CheckpointError, match="does not exist"):
        open_checkpoint(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"holds no \.safetensors file"):
        open_checkpoint(tmp_path)
    save_file({"a": torch.zeros(1)}, tmp_path / "model-00001-of-00002.safetensors")
    with pytest.raises(CheckpointError, match=r"neither .* it holds 'model-00001-of-00002"):
        open_checkpoint(tmp_path)


def test_asking_for_an_absent_tensor_names_it(tmp_path):
    save_file({"a": torch.zeros(1)}, tmp_path / "x.safetensors")
    with pytest.raises(CheckpointError, match="no tensor 'b'"):
        open_checkpoint(tmp_path / "x.safetensors").tensor("b")


# --- damage ---


def entry(dtype="F32", shape=(2,), offsets=(0, 8), **extra):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets), **extra}


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ({"a": entry(dtype="F5")}, "dtype 'F5'; known are"),
        ({"a": entry(dtype=3)}, "dtype 3; known are"),
        ({"a": entry(shape=[-2])}, "sizes of at least 0"),
        ({"a": entry(shape=[True, 2])}, "sizes of at least 0"),
        ({"a": entry(shape=[2.0])}, "sizes of at least 0"),
        ({"a": entry(offsets=[8])}, r"\[begin, end\]"),
        ({"a": entry(offsets=[8, 0])}, "span -8"),
        ({"a": entry(shape=[3])}, "takes 12 bytes, its data_offsets .* span 8"),
        ({"a": entry(shape=[2**62, 2**62])}, "larger than any memory"),
        ({"a": entry(shape=[2**62, 2**62, 0], offsets=(0, 0))}, "larger than any memory"),
        ({"a": entry(), "b": entry(offsets=(4, 12))}, "overlaps"),
        ({"a": entry(), "b": entry()}, "overlaps"),
        ({"a": entry(offsets=(4, 12))}, "leaves a hole"),
        ({"a": entry(), "b": entry(offsets=(8, 16))}, "is cut short"),
        ({}, "belong to no tensor"),
        ({"a": entry(extra=1)}, "and nothing else"),
        ({"a": 3}, "must have dtype, shape"),
        ({"__metadata__": {"a": 1}, "a": entry()}, "not an object of strings"),
        ([], "not a JSON object"),
        (b"\xff\xff", "not JSON"),
        (b"[" * 50_000, "not JSON"),
        (b' {"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}', "not a JSON object"),
    ],
)
def test_a_broken_header_says_what_is_wrong(tmp_path, header, message):
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(write_raw(tmp_path / "x.safetensors", header, bytes(8)))


def test_absurd_header_lengths_are_refused_before_reading(tmp_path):
    path = tmp_path / "x.safetensors"
    for length in (2**64 - 1, 100_000_001):
        path.write_bytes(length.to_bytes(8, "little") + b"{}")
        with pytest.raises(CheckpointError, match="at most 100000000 are legal"):
            open_checkpoint(path)
    path.write_bytes((50).to_bytes(8, "little") + b"{}")
    with pytest.raises(CheckpointError, match="shorter than its header"):
        open_checkpoint(path)


@pytest.fixture(scope="module")
def small_file(tmp_path_factory) -> bytes:
    path = tmp_path_factory.mktemp("fuzz") / "x.safetensors"
    save_file(sample(), path)
    return path.read_bytes()


def test_every_truncation_is_an_error(tmp_path, small_file):
    path = tmp_path / "x.safetensors"
    for length in range(0, len(small_file), 7):
        path.write_bytes(small_file[:length])
        with pytest.raises(CheckpointError):
            open_checkpoint(path)


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_random_damage_gives_an_error_or_exactly_what_the_reference_library_reads(tmp_path, small_file, data):
    damaged = bytearray(small_file)
    header_end = 8 + int.from_bytes(small_file[:8], "little")
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, header_end - 1) | st.integers(0, 9))
        kind = data.draw(st.sampled_from(["set", "insert", "delete", "digit"]))
        if kind == "set":
            damaged[at] = data.draw(st.integers(0, 255))
        elif kind == "digit":
            damaged[at] = data.draw(st.sampled_from(b'0123456789[]{}",:- '))
        elif kind == "insert":
            damaged[at:at] = data.draw(st.binary(max_size=4))
        else:
            del damaged[at : at + data.draw(st.integers(1, 4))]
    path = tmp_path / "x.safetensors"
    path.write_bytes(damaged)
    try:
        ours = open_checkpoint(path)
    except CheckpointError:
        return
    with safetensors.safe_open(path, "pt") as theirs:
        assert set(ours.names) == set(theirs.keys())
        for name in ours.names:
            assert same(ours.tensor(name), theirs.get_tensor(name))


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=200))
def test_random_bytes_are_never_a_checkpoint(tmp_path, junk):
    path = tmp_path / "x.safetensors"
    path.write_bytes(junk)
    with pytest.raises(CheckpointError):
        open_checkpoint(path)
