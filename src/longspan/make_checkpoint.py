"""`longspan make-checkpoint`: random weights in the published format, to measure and to test with.

    matrix [out, in]     bfloat16, normal, variance 1 / in: what has unit variance keeps it
    MXFP4 expert         random codes, two neighbouring scales: 0.4 to 0.8 of the deviation of a matrix
    norms                1 + 0.1 normal
    embedding            normal
    convolutions         0.5 normal
    A_log, dt_bias       0.3 normal
    bias of the router   0.1 normal: it changes choices, yet every expert is hit

so activations stay near one at any depth. The same shape and seed give the same weights.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from longspan.errors import CapacityError, CheckpointError
from longspan.shapes import SHAPES, Config, published_config

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from longspan.config import ModelConfig
    from longspan.formats.inventory import TensorSpec

_PREFIX = "language_model."  # of all names in a published K3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", type=Path, help="where to write; must be new or empty")
    parser.add_argument(
        "--shape",
        choices=list(SHAPES),
        required=True,
        help="mini: 24 layers, 1.1 GB; small: 24 layers, 5.4 GB; real-layer: two layers of the true size of "
        "K3.1 Pro (KDA with the dense feed-forward, full attention with 64 experts), 4.8 GB",
    )
    parser.add_argument(
        "--family",
        choices=("k3.1", "k3"),
        default="k3.1",
        help="k3 has no sparse indexer (default: %(default)s)",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the weights (default: 0)")


def main(args: argparse.Namespace) -> int:
    """Raises CheckpointError for a directory in use, CapacityError where it does not fit."""
    nbytes = make_checkpoint(args.directory, published_config(SHAPES[args.shape], args.family), args.seed)
    print(f"{args.directory}: {args.shape}, {args.family}, {nbytes / 1e9:.2f} GB")
    return 0


def make_checkpoint(directory: Path, values: Config, seed: int = 0) -> int:
    """Writes config.json with the content `values`, and the weights it calls for -> bytes of the weights."""
    from longspan.config import parse_config
    from longspan.formats.inventory import totals
    from longspan.formats.safetensors import save_checkpoint

    config = parse_config(values)
    nbytes = sum(part.nbytes for part in totals(config).values())
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise CheckpointError(
            f"{directory} exists and is not an empty directory.", remedy="Give a new directory."
        )
    directory.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(directory).free
    if nbytes > free:
        raise CapacityError(
            f"The weights take {nbytes / 1e9:.1f} GB, {directory} has {free / 1e9:.1f} GB free.",
            remedy="Choose a smaller shape or another disk.",
        )
    tensors = random_tensors(config, seed)
    save_checkpoint({_PREFIX + name: tensor for name, tensor in tensors.items()}, directory)
    (directory / "config.json").write_text(json.dumps(values, indent=2) + "\n")
    return nbytes


def random_tensors(config: ModelConfig, seed: int = 0) -> dict[str, Tensor]:
    """A tensor for each that `config` calls for, by canonical name, of the published shape and dtype."""
    import torch

    from longspan.formats.inventory import expected_tensors
    from longspan.formats.progress import track

    noise = torch.Generator().manual_seed(seed)
    specs = expected_tensors(config)
    return {
        name: _random_tensor(name, spec, config, noise)
        for name, spec in track(specs.items(), "Drawing weights", len(specs))
    }


def _random_tensor(name: str, spec: TensorSpec, config: ModelConfig, noise: torch.Generator) -> Tensor:
    import torch

    from longspan.formats.mx import E8M0_BIAS, GROUP

    if name.endswith("weight_packed"):
        return _random_bytes(spec.shape, noise)
    if name.endswith("weight_scale"):
        gain = (spec.shape[-1] * GROUP) ** -0.5 / _RMS_OF_CODES
        highest = E8M0_BIAS + math.floor(math.log2(gain))
        return _random_bytes(spec.shape, noise) % 2 + (highest - 1)

    values = torch.empty(spec.shape, dtype=torch.float32 if spec.dtypes[0] == "F32" else torch.bfloat16)
    values.normal_(0, _deviation(name, spec), generator=noise)
    if "norm" in name and not name.endswith("bias"):
        values += 1
    if name.endswith("A_log"):
        values.view(-1)[config.kda.num_heads :] = 0  # the padding of the published files
    return values


_RMS_OF_CODES = math.sqrt((0 + 0.25 + 1 + 2.25 + 4 + 9 + 16 + 36) / 8)  # of the values of E2M1


def _deviation(name: str, spec: TensorSpec) -> float:
    if "norm" in name:
        return 0.1
    if "conv1d" in name:
        return 0.5
    if name.endswith("e_score_correction_bias"):
        return 0.1
    if name.endswith(("A_log", "dt_bias")):
        return 0.3
    if name.endswith("embed_tokens.weight"):
        return 1.0
    return spec.shape[-1] ** -0.5


def _random_bytes(shape: tuple[int, ...], noise: torch.Generator) -> Tensor:
    import torch

    count = math.prod(shape)
    words = torch.empty(-(-count // 8), dtype=torch.int64)
    words.random_(-(2**63), None, generator=noise)
    return words.view(torch.uint8)[:count].view(shape)
