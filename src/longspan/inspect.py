"""`longspan inspect`: what a checkpoint is, what it needs, what is wrong with it. Reads headers only.

`--json` prints one object. Layer numbers count from 0, sizes are in bytes, and fields are only ever added:

- path, family: where it was read and "kimi-linear", "k3" or "k3.1"
- config: every field of longspan.config.ModelConfig by its name
- layers: {kda, full_attention, dense, moe}: lists of layer numbers
- tensors, bytes: what the config calls for, in all
- parameters: {text, vision, active}: counts; active is what one token of text passes through
- parts: {PART: {tensors, parameters, bytes}} that the config calls for
- memory: {cache_per_token: {latent, index_key, total}, state_per_sequence: {recurrent, conv, total}, context,
  context_total, with_weights}: for one sequence of `context` tokens, cached in bfloat16
- weights: null if none are there, else {error, tensors, bytes, parts: {PART: bytes}, missing, unexpected,
  wrong}. error is null or says why the files cannot be opened, and then the other fields are absent.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from longspan.config import ModelConfig, load_config
from longspan.errors import CheckpointError, ConfigError
from longspan.formats.check import compare
from longspan.formats.inventory import VISION, active_parameters, totals
from longspan.formats.safetensors import has_weights, open_checkpoint
from longspan.memory.sizes import bytes_per_sequence, bytes_per_token

UNEXPECTED = "unexpected"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", help="checkpoint directory, or a config.json alone")
    parser.add_argument("--context", type=int, metavar="N", help="tokens to plan memory for (default: all)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")


def main(args: argparse.Namespace) -> int:
    """0 if nothing is wrong, 1 if the weights do not fit the config. Raises ConfigError."""
    report = inspect(args.path, args.context)
    if args.json:
        print(json.dumps(report, indent=2))
    else:
        _print_tables(report)
    weights = report["weights"]
    faults = ("error", "missing", "unexpected", "wrong")
    return 1 if weights and any(weights.get(fault) for fault in faults) else 0


def inspect(path: str | Path, context: int | None = None) -> dict[str, Any]:
    """The report, as described above. Weights are looked at only if `path` is a directory that has some.

    `context` None means the longest the model allows. Raises ConfigError.
    """
    config = load_config(path)
    if context is None:
        context = config.max_position
    if not 1 <= context <= config.max_position:
        raise ConfigError(
            f"A context of {context} tokens was asked for; legal is 1 to max_position_embeddings = "
            f"{config.max_position}."
        )
    parts = totals(config)
    nbytes = sum(part.nbytes for part in parts.values())
    token, sequence = bytes_per_token(config), bytes_per_sequence(config)
    context_total = token.total * context + sequence.total
    vision = parts[VISION].parameters if VISION in parts else 0
    layers = range(config.num_layers)
    weights = _weights(config, Path(path))
    return {
        "path": str(path),
        "family": config.family,
        "config": dataclasses.asdict(config),
        "layers": {
            "kda": [n for n in layers if not config.is_full_attention(n)],
            "full_attention": list(config.full_attention_layers),
            "dense": [n for n in layers if not config.is_moe(n)],
            "moe": list(config.moe_layers),
        },
        "tensors": sum(part.tensors for part in parts.values()),
        "bytes": nbytes,
        "parameters": {
            "text": sum(part.parameters for part in parts.values()) - vision,
            "vision": vision,
            "active": active_parameters(config),
        },
        "parts": {
            name: {"tensors": part.tensors, "parameters": part.parameters, "bytes": part.nbytes}
            for name, part in parts.items()
        },
        "memory": {
            "cache_per_token": dataclasses.asdict(token) | {"total": token.total},
            "state_per_sequence": dataclasses.asdict(sequence) | {"total": sequence.total},
            "context": context,
            "context_total": context_total,
            "with_weights": context_total + (weights or {}).get("bytes", nbytes),
        },
        "weights": weights,
    }


def _weights(config: ModelConfig, path: Path) -> dict[str, Any] | None:
    if not (path.is_dir() and has_weights(path)):
        return None
    try:
        checkpoint = open_checkpoint(path)
        found = compare(config, checkpoint)
    except CheckpointError as error:
        return {"error": str(error)}
    parts: Counter[str] = Counter()
    for name in checkpoint:
        parts[found.parts.get(name, UNEXPECTED)] += checkpoint.info(name).nbytes
    return {
        "error": None,
        "tensors": len(checkpoint),
        "bytes": checkpoint.nbytes,
        "parts": dict(parts),
        "missing": found.missing,
        "unexpected": found.unexpected,
        "wrong": found.wrong,
    }


def _print_tables(report: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(markup=False, highlight=False, soft_wrap=True)

    def facts(title: str, rows: Iterable[tuple[str, str]]) -> None:
        table = Table(title=title, title_justify="left", show_header=False, box=None, pad_edge=False)
        table.add_column(style="dim")
        table.add_column(overflow="fold")
        for name, value in rows:
            table.add_row(name, value)
        console.print(table)
        console.print()

    config, parameters, memory = report["config"], report["parameters"], report["memory"]
    total = parameters["text"] + parameters["vision"]
    console.print(f"{report['path']}: {_FAMILY_NAMES[report['family']]}")
    console.print(
        f"{report['tensors']:,} tensors, {_amount(total)} parameters, "
        f"{_amount(parameters['active'])} active, {_size(report['bytes'])}\n"
    )
    facts("Architecture", _architecture(config))
    facts("Layer map (K = KDA, M = full attention; small letter = dense feed-forward)", _layer_map(report))

    weights = report["weights"]
    in_files = weights["parts"] if weights and not weights["error"] else None
    table = Table(title="Parts", title_justify="left", box=None, pad_edge=False)
    table.add_column("part")
    for column in ("tensors", "parameters", "bytes", *(["bytes in files"] if in_files is not None else [])):
        table.add_column(column, justify="right")
    for name, part in report["parts"].items():
        row = [name, f"{part['tensors']:,}", _amount(part["parameters"]), _size(part["bytes"])]
        table.add_row(*row, *([_size(in_files.get(name, 0))] if in_files is not None else []))
    console.print(table)
    console.print()

    token, sequence = memory["cache_per_token"], memory["state_per_sequence"]
    index = f" + {token['index_key']:,} B index keys" if token["index_key"] else ""
    facts(
        "Memory of one sequence",
        [
            ("cache per token", f"{token['total']:,} B ({token['latent']:,} B latent{index}, bfloat16)"),
            (
                "state, any length",
                f"{sequence['total']:,} B ({sequence['recurrent']:,} B recurrent float32 + "
                f"{sequence['conv']:,} B conv)",
            ),
            (f"{memory['context']:,} tokens", _size(memory["context_total"])),
            ("with the weights", _size(memory["with_weights"])),
        ],
    )
    if weights is None:
        console.print("No weights here: this is what the config calls for.")
    elif weights["error"]:
        console.print(f"Weights cannot be opened. {weights['error']}")
    else:
        console.print(f"Weights: {weights['tensors']:,} tensors, {_size(weights['bytes'])}.")
        for fault in ("missing", "unexpected", "wrong"):
            _print_names(console, fault, weights[fault])
        if not any(weights[fault] for fault in ("missing", "unexpected", "wrong")):
            console.print("Nothing missing, unexpected or of the wrong shape or dtype.")


_FAMILY_NAMES = {"kimi-linear": "Kimi-Linear", "k3": "Kimi K3", "k3.1": "Kimi K3.1 Pro"}
_SHOWN = 20


def _print_names(console: Any, fault: str, names: list[str]) -> None:
    if not names:
        return
    console.print(f"{len(names):,} {fault}:")
    for name in names[:_SHOWN]:
        console.print(f"  {name}")
    if len(names) > _SHOWN:
        console.print(f"  ... and {len(names) - _SHOWN:,} more (--json lists all)")


def _architecture(config: dict[str, Any]) -> list[tuple[str, str]]:
    kda, mla, moe, indexer = config["kda"], config["mla"], config["moe"], config["indexer"]
    activation, vision = config["activation"], config["vision"]
    block = config["attn_res_block_size"]
    bound = kda["gate_lower_bound"]
    decay = "softplus decay" if bound is None else f"decay bounded at {bound:g}"
    linear = activation["linear_beta"]
    up = "identity on up" if linear is None else f"linear beta {linear:g}"
    rows = [
        ("hidden size, layers", f"{config['hidden_size']:,} x {config['num_layers']}"),
        ("vocabulary, context", f"{config['vocab_size']:,}, {config['max_position']:,} tokens"),
        ("residuals", "plain" if block is None else f"attention residuals, blocks of {block} layers"),
        (
            "KDA",
            f"{kda['num_heads']} heads x {kda['head_dim']}, conv {kda['conv_kernel_size']}, {decay}, "
            f"{'full-rank' if kda['full_rank_gate'] else 'low-rank'} output gate",
        ),
        (
            "MLA",
            f"{mla['num_heads']} heads, latent {mla['kv_lora_rank']} + {mla['qk_rope_head_dim']}, query "
            f"{mla['q_lora_rank'] or 'direct'}, {'gated' if mla['output_gate'] else 'no gate'}, no positions",
        ),
        (
            "indexer",
            f"{indexer['num_heads']} heads x {indexer['head_dim']}, top {indexer['top_k']:,}"
            if indexer
            else "none (dense attention)",
        ),
        (
            "experts",
            f"{moe['num_experts']} routed, {moe['top_k']} a token, {moe['num_shared_experts']} shared, "
            f"{moe['latent_size'] or config['hidden_size']} x {moe['intermediate_size']}, "
            f"{'MXFP4' if config['experts_packed'] else 'bfloat16'}",
        ),
        (
            "activation",
            "SwiGLU" if activation["kind"] == "silu" else f"SiTU, beta {activation['beta']:g}, {up}",
        ),
    ]
    if vision:
        rows.append(
            (
                "vision",
                f"{vision['num_layers']} layers x {vision['hidden_size']}, patch {vision['patch_size']}",
            )
        )
    return rows


def _layer_map(report: dict[str, Any]) -> list[tuple[str, str]]:
    """One letter a layer, a row for each block of attention residuals."""
    full, dense = set(report["layers"]["full_attention"]), set(report["layers"]["dense"])
    count = report["config"]["num_layers"]
    letters = ["M" if n in full else "K" for n in range(count)]
    letters = [letter.lower() if n in dense else letter for n, letter in enumerate(letters)]
    width = report["config"]["attn_res_block_size"] or 16
    return [
        (f"{start}-{min(start + width, count) - 1}", "".join(letters[start : start + width]))
        for start in range(0, count, width)
    ]


def _amount(n: int) -> str:
    """2.78 T, 104.2 B, 447.4 M."""
    for size, unit, digits in ((10**12, "T", 2), (10**9, "B", 1), (10**6, "M", 1), (10**3, "K", 1)):
        if n >= size:
            return f"{n / size:.{digits}f} {unit}"
    return str(n)


def _size(n: int) -> str:
    """Decimal units: 1.561 TB, 113.5 GB."""
    for size, unit, digits in ((10**12, "TB", 3), (10**9, "GB", 2), (10**6, "MB", 1), (10**3, "kB", 1)):
        if n >= size:
            return f"{n / size:.{digits}f} {unit}"
    return f"{n} B"
