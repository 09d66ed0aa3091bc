"""safetensors files and sharded checkpoints: headers read and checked at once, tensors mapped when asked for.

A file is 8 bytes little-endian header length, a JSON header {name: {dtype, shape, data_offsets}}, the data.
Offsets count from the end of the header. Reading headers needs no torch; `Checkpoint.tensor` imports it.
"""

from __future__ import annotations

import ctypes
import gc
import json
import math
import mmap
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from longspan.errors import CheckpointError
from longspan.formats.progress import track

if TYPE_CHECKING:
    from torch import Tensor

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
MAX_HEADER_BYTES = 100_000_000  # the format's own limit
_CORRUPT = "The file is damaged or was cut short: download or copy it again."

# dtype in the file -> (bytes per value, name in torch)
DTYPES = {
    "BOOL": (1, "bool"),
    "U8": (1, "uint8"),
    "I8": (1, "int8"),
    "F8_E4M3": (1, "float8_e4m3fn"),
    "F8_E5M2": (1, "float8_e5m2"),
    "F8_E8M0": (1, "float8_e8m0fnu"),
    "U16": (2, "uint16"),
    "I16": (2, "int16"),
    "F16": (2, "float16"),
    "BF16": (2, "bfloat16"),
    "U32": (4, "uint32"),
    "I32": (4, "int32"),
    "F32": (4, "float32"),
    "U64": (8, "uint64"),
    "I64": (8, "int64"),
    "F64": (8, "float64"),
}
_DTYPE_OF_TORCH = {name: dtype for dtype, (_, name) in DTYPES.items()}


class TensorInfo(NamedTuple):
    """One tensor in a file. `start` is the absolute byte position of its data."""

    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    file: Path
    start: int


class Checkpoint:
    """The tensors of one file or of all shards. Files are mapped read-only on first use and stay mapped."""

    def __init__(self, tensors: dict[str, TensorInfo], source: Path, metadata: dict[str, str]) -> None:
        self._tensors = tensors
        self._maps: dict[Path, Tensor] = {}
        self.source = source
        self.metadata = metadata

    @property
    def names(self) -> list[str]:
        return list(self._tensors)

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def __len__(self) -> int:
        return len(self._tensors)

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors together, headers not counted."""
        return sum(info.nbytes for info in self._tensors.values())

    def info(self, name: str) -> TensorInfo:
        """What the header says of a tensor. Raises CheckpointError if there is no such tensor."""
        try:
            return self._tensors[name]
        except KeyError:
            raise CheckpointError(
                f"{self.source} has no tensor {name!r} among its {len(self._tensors)}.",
                remedy="`longspan inspect` lists what is missing.",
            ) from None

    def tensor(self, name: str) -> Tensor:
        """The tensor, a view of the mapped file: no bytes are read before they are used, none are copied.

        The mapping is read-only: writing into the tensor faults. The one exception to the view is data that a
        foreign writer left misaligned for its dtype, which is copied.
        """
        import torch

        info = self.info(name)
        width, torch_name = DTYPES[info.dtype]
        dtype = getattr(torch, torch_name)
        if info.nbytes == 0:
            return torch.empty(info.shape, dtype=dtype)
        data = self._file_bytes(info.file)[info.start : info.start + info.nbytes]
        if info.start % width:
            data = data.clone()
        return data.view(dtype).reshape(info.shape)

    def _file_bytes(self, file: Path) -> Tensor:
        """[file size] uint8, the mapped file."""
        if file not in self._maps:
            self._maps[file] = _map_read_only(file)
        return self._maps[file]


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Open a directory (sharded by its index, or one model.safetensors) or one .safetensors file.

    Every header is read and checked against its file and the index, no weights are. Raises CheckpointError.
    """
    path = Path(path)
    if path.is_file():
        tensors, metadata = read_header(path)
        return Checkpoint(tensors, path, metadata)
    if not path.is_dir():
        raise CheckpointError(
            f"{path} does not exist.", remedy="Give a checkpoint directory or a file in it."
        )
    index, single = path / INDEX_FILE, path / SINGLE_FILE
    if index.is_file():
        with _collector_paused():
            return _open_sharded(path, index)
    if single.is_file():
        tensors, metadata = read_header(_contained(path, SINGLE_FILE, path))
        return Checkpoint(tensors, path, metadata)
    others = sorted(p.name for p in path.glob("*.safetensors"))
    found = f"it holds {_some(others)}" if others else "it holds no .safetensors file"
    raise CheckpointError(
        f"{path} has neither {INDEX_FILE} nor {SINGLE_FILE}; {found}.",
        remedy="Finish the download, or give the path of one .safetensors file.",
    )


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Headers of K3 are half a million objects, none of them garbage: a search takes longer than reading."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def has_weights(path: Path) -> bool:
    """Whether `open_checkpoint(path)` would find weights to open, whole or not."""
    return path.is_file() or (path / INDEX_FILE).is_file() or any(path.glob("*.safetensors"))


def _open_sharded(directory: Path, index: Path) -> Checkpoint:
    by_shard = _read_index(index)
    files = {shard: _contained(directory, shard, index) for shard in sorted(by_shard)}
    missing = [shard for shard, file in files.items() if not file.is_file()]
    if missing:
        raise CheckpointError(
            f"{len(missing)} of the {len(files)} shards named in {index} are missing: {_some(missing)}.",
            remedy="Finish the download.",
        )
    if (directory / SINGLE_FILE).is_file() and SINGLE_FILE not in files:
        raise CheckpointError(
            f"{directory} holds both {SINGLE_FILE} and an index of other shards.",
            remedy="Remove the one that is not meant.",
        )
    tensors: dict[str, TensorInfo] = {}
    for shard, file in track(files.items(), "Reading headers"):
        found, _ = read_header(file)
        listed = by_shard[shard]
        absent = [name for name in listed if name not in found]
        if absent:
            raise CheckpointError(
                f"{file} lacks {len(absent)} tensors that {index.name} places in it: {_some(absent)}.",
                remedy="Shard and index belong to different releases: download both again.",
            )
        unlisted = [name for name in found if name not in listed]
        if unlisted:
            elsewhere = next((s for s, names in by_shard.items() if unlisted[0] in names), None)
            where = (
                f"{index.name} places it in {elsewhere}" if elsewhere else f"{index.name} does not list it"
            )
            raise CheckpointError(
                f"{file} holds {len(unlisted)} tensors it should not: {_some(unlisted)}; {where}.",
                remedy="Shard and index belong to different releases: download both again.",
            )
        tensors.update(found)
    return Checkpoint(tensors, directory, {})


def _read_index(index: Path) -> dict[str, set[str]]:
    """{shard: names of its tensors}."""
    try:
        content = json.loads(index.read_bytes())
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{index} is not JSON: {error}.", remedy=_CORRUPT) from None
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(
            f"{index} has no weight_map, an object of tensor name to shard.", remedy=_CORRUPT
        )
    by_shard: dict[str, set[str]] = {}
    for name, shard in weight_map.items():
        if not isinstance(shard, str):
            raise CheckpointError(f"{index} places {name!r} in {shard!r}; a file name was expected.")
        by_shard.setdefault(shard, set()).add(name)
    return by_shard


def _contained(directory: Path, shard: str, source: Path) -> Path:
    """The path of a shard, which must be a plain file name inside the checkpoint.

    A link may lead to the `blobs` folder of the same hub cache (`REPO/snapshots/REVISION` -> `REPO/blobs`).
    """
    if not shard or shard in (".", "..") or any(c in shard for c in "/\\\0"):
        raise CheckpointError(
            f"{source} names the shard {shard!r}; only plain file names inside the checkpoint are legal.",
            remedy="Do not trust this checkpoint.",
        )
    root, target = directory.resolve(), (directory / shard).resolve()
    homes = [root, root.parent.parent / "blobs"] if root.parent.name == "snapshots" else [root]
    if not any(target.is_relative_to(home) for home in homes):
        raise CheckpointError(
            f"{directory / shard} links out of the checkpoint, to {target}.",
            remedy="Copy or move the file into the checkpoint's directory.",
        )
    return directory / shard


def read_header(file: Path) -> tuple[dict[str, TensorInfo], dict[str, str]]:
    """({name: TensorInfo}, metadata) of one file, with every offset checked. Raises CheckpointError."""
    try:
        with open(file, "rb") as f:
            size = os.fstat(f.fileno()).st_size
            prefix = f.read(8)
            length = int.from_bytes(prefix, "little")
            if len(prefix) < 8:
                raise CheckpointError(f"{file} is {size} bytes long; 8 are needed to begin.", remedy=_CORRUPT)
            if length > MAX_HEADER_BYTES:
                raise CheckpointError(
                    f"{file} claims a header of {length} bytes; at most {MAX_HEADER_BYTES} are legal.",
                    remedy="It is no safetensors file, or damaged.",
                )
            if 8 + length > size:
                raise CheckpointError(
                    f"{file} is {size} bytes long, shorter than its header of {length} bytes.",
                    remedy=_CORRUPT,
                )
            raw = f.read(length)
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}.") from None
    try:
        header = json.loads(raw.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"The header of {file} is not JSON: {error}.", remedy=_CORRUPT) from None
    if not isinstance(header, dict) or not raw.startswith(b"{"):
        raise CheckpointError(f"The header of {file} is not a JSON object.", remedy=_CORRUPT)
    metadata = header.pop("__metadata__", None) or {}
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise CheckpointError(f"__metadata__ of {file} is not an object of strings.", remedy=_CORRUPT)
    start = 8 + length
    tensors = {name: _tensor_info(name, entry, file, start) for name, entry in header.items()}
    _check_layout(tensors, file, start, size)
    return tensors, metadata


def _is_count(x: Any) -> bool:
    return type(x) is int and x >= 0


def _tensor_info(name: str, entry: Any, file: Path, data_start: int) -> TensorInfo:
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(
            f"{file}: the entry of {name!r} must have dtype, shape and data_offsets and nothing else.",
            remedy=_CORRUPT,
        )
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise CheckpointError(f"{file}: {name!r} has dtype {dtype!r}; known are {', '.join(DTYPES)}.")
    if not isinstance(shape, list) or not all(map(_is_count, shape)):
        raise CheckpointError(f"{file}: {name!r} has shape {shape!r}; sizes of at least 0 were expected.")
    if math.prod(size or 1 for size in shape) >= 2**63:  # an empty tensor too needs strides
        raise CheckpointError(f"{file}: {name!r} has shape {shape!r}, larger than any memory.")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_count, offsets)):
        raise CheckpointError(f"{file}: {name!r} has data_offsets {offsets!r}; [begin, end] was expected.")
    begin, end = offsets
    nbytes = math.prod(shape) * DTYPES[dtype][0]
    if end - begin != nbytes:
        raise CheckpointError(
            f"{file}: {name!r} of {dtype} {shape} takes {nbytes} bytes, "
            f"its data_offsets {offsets} span {end - begin}.",
            remedy=_CORRUPT,
        )
    return TensorInfo(dtype, tuple(shape), nbytes, file, data_start + begin)


def _check_layout(tensors: dict[str, TensorInfo], file: Path, data_start: int, file_size: int) -> None:
    """Data must follow the header without holes or overlaps and fill the file."""
    position = data_start
    for name, info in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].nbytes)):
        if info.start != position:
            what = "overlaps the tensor before it" if info.start < position else "leaves a hole before it"
            raise CheckpointError(
                f"{file}: {name!r} begins at byte {info.start} where {position} was expected; it {what}.",
                remedy=_CORRUPT,
            )
        position += info.nbytes
    if position != file_size:
        what = "is cut short" if position > file_size else "has bytes that belong to no tensor"
        raise CheckpointError(
            f"{file} {what}: its header describes {position} bytes, it has {file_size}.", remedy=_CORRUPT
        )


def _map_read_only(file: Path) -> Tensor:
    import numpy as np
    import torch

    with open(file, "rb") as f:
        mapped = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)
    pages = np.frombuffer(memoryview(mapped), dtype=np.uint8)
    # torch has no read-only tensors and warns of read-only buffers; the same pages by address stay quiet.
    buffer = (ctypes.c_uint8 * pages.nbytes).from_address(pages.ctypes.data)
    # The mapping must live as long as any tensor on it.
    buffer.owner = pages  # pyright: ignore[reportAttributeAccessIssue]
    return torch.frombuffer(buffer, dtype=torch.uint8)


def save_file(
    tensors: Mapping[str, Tensor], path: str | os.PathLike[str], metadata: dict[str, str] | None = None
) -> None:
    """Write one file, tensor by tensor, under a temporary name: readers see the old file or the new.

    Raises CheckpointError for a dtype the format does not know.
    """
    path = Path(path)
    # Wide dtypes first, and a header padded to 8, keep every tensor aligned to its own width.
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    position = 0
    for name in order:
        tensor = tensors[name]
        dtype = _DTYPE_OF_TORCH.get(str(tensor.dtype).removeprefix("torch."))
        if dtype is None:
            raise CheckpointError(f"{name!r} is {tensor.dtype}, which safetensors cannot hold.")
        end = position + tensor.nbytes
        header[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [position, end]}
        position = end
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    temporary = path.with_name(path.name + ".partial")
    try:
        with open(temporary, "wb") as f:
            f.write(len(encoded).to_bytes(8, "little") + encoded)
            for name in track(order, f"Writing {path.name}"):
                f.write(_bytes_of(tensors[name]))
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def save_checkpoint(
    tensors: Mapping[str, Tensor], directory: str | os.PathLike[str], max_shard_bytes: int = 5_000_000_000
) -> None:
    """Write model.safetensors, or shards of at most `max_shard_bytes` (one tensor at least) and their index.

    Refuses, with CheckpointError, a directory that holds weights under other file names.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    shards: list[list[str]] = [[]]
    filled = 0
    for name, tensor in tensors.items():
        if shards[-1] and filled + tensor.nbytes > max_shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += tensor.nbytes
    if len(shards) == 1:
        files = [SINGLE_FILE]
    else:
        files = [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    index = directory / INDEX_FILE
    stale = {p.name for p in directory.glob("*.safetensors")} - set(files)
    if stale or (index.exists() and len(shards) == 1):
        raise CheckpointError(
            f"{directory} holds other weights: {_some(sorted(stale) or [INDEX_FILE])}.",
            remedy="Write to an empty directory.",
        )
    for file, names in zip(files, shards, strict=True):
        save_file({name: tensors[name] for name in names}, directory / file, {"format": "pt"})
    if len(shards) > 1:
        content = {
            "metadata": {"total_size": sum(t.nbytes for t in tensors.values())},
            "weight_map": {name: file for file, names in zip(files, shards, strict=True) for name in names},
        }
        index.write_text(json.dumps(content, indent=2) + "\n")


def _bytes_of(tensor: Tensor) -> memoryview:
    import torch

    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


def _some(names: list[str]) -> str:
    """The first few names, and how many more."""
    shown = ", ".join(map(repr, names[:3]))
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
