"""A plan as JSON and as tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from longspan.planning.derivation import scheme_text, show
from longspan.planning.plan import Plan, SidePlan

Summary = tuple[str, Plan | str]
"""An engine and its plan, or why there is none."""


def as_json(plan: Plan, others: Sequence[Summary] = ()) -> dict[str, Any]:
    """The object that `longspan plan --json` prints; its fields are described in command.py."""
    workload = plan.workload
    return {
        "model": plan.model,
        "family": workload.config.family,
        "engine": workload.engine.name,
        "scheme": workload.scheme.name,
        "context": workload.context,
        "topology": plan.topology,
        "nodes": plan.nodes,
        "index_key_dtype": workload.index_key_dtype,
        "hardware": {
            "name": workload.hardware.name,
            "title": workload.hardware.title,
            "numbers": {name: asdict(number) for name, number in workload.hardware.numbers.items()},
        },
        "sides": [_side_json(side, workload.context) for side in plan.sides],
        "handoff": {"state": plan.handoff[0], "cache": plan.handoff[1]} if plan.disaggregated else None,
        "engines": {name: _summary_json(found) for name, found in others},
    }


def _side_json(side: SidePlan, context: int) -> dict[str, Any]:
    fit, memory = side.fit, side.fit.memory
    split = fit.split
    return {
        "role": side.role,
        "nodes": side.side.nodes,
        "split": {
            "tensor": split.tensor,
            "data": split.data,
            "expert": split.expert,
            "context": split.context,
        },
        "reasons": list(side.reasons),
        "memory": {
            "weights": memory.weights,
            "weights_total": memory.weight_bytes,
            "latent_per_token": memory.latent_per_token,
            "index_per_token": memory.index_per_token,
            "recurrent_per_sequence": memory.recurrent_per_sequence,
            "conv_per_sequence": memory.conv_per_sequence,
            "page_tokens": memory.page_tokens,
            "page_bytes": memory.page_bytes,
            "sequence": memory.sequence_bytes(context),
            "activations": fit.activations,
            "usable": fit.budget,
            "room": fit.cache_room,
        },
        "fits": {
            "sequences": fit.sequences,
            "sequences_of_side": fit.sequences * split.data,
            "pages": side.pages,
            "max_num_seqs": side.max_num_seqs,
            "step_tokens": fit.step_tokens,
        },
        "decode_step": {
            "memory": asdict(side.reads),
            "memory_alone": asdict(side.reads_alone),
            "network_per_token": asdict(side.received),
            "seconds": fit.seconds_per_token * fit.sequences * split.data,
            "tokens_per_second": 1 / fit.seconds_per_token,
        },
    }


def _summary_json(found: Plan | str) -> dict[str, Any]:
    if isinstance(found, str):
        return {"error": found}
    side = found.sides[-1]
    return {
        "error": None,
        "split": str(side.fit.split),
        "sequences_of_side": side.fit.sequences * side.fit.split.data,
        "notes": list(found.workload.engine.notes),
        "not_to_start": found.not_to_start,
    }


def print_plan(plan: Plan, others: Sequence[Summary] = ()) -> None:
    from rich.console import Console

    console = Console(markup=False, highlight=False, soft_wrap=True)
    workload = plan.workload
    console.print(
        f"{plan.model} on {plan.nodes} x {workload.hardware.title}, {plan.topology}, "
        f"{workload.context:,} tokens, laid out as {workload.engine.title}"
    )
    console.print(f"{scheme_text(workload)}\n")
    for side in plan.sides:
        _print_side(console, plan, side)
    if plan.disaggregated:
        state, cache = plan.handoff
        per_token = cache / workload.context
        console.print(
            f"Hand-off of a request: {show(state)} of state and {show(per_token)} a token, "
            f"{show(state + cache)} for {workload.context:,} tokens.\n"
        )
    if others:
        _table(
            console,
            "Engines (network figures above are Longspan's; others exchange differently)",
            ("engine", "decode side", "sequences", "remark"),
            [_engine_row(name, found) for name, found in others],
        )
    assumed = {name: n for name, n in workload.hardware.numbers.items() if n.assumed}
    for name, number in assumed.items():
        console.print(f"assumed: {name} {number.value:g} ({number.reason})")
    if plan.not_to_start:
        console.print(f"note: No scripts of {workload.engine.title}: {plan.not_to_start}.")
    for note in workload.engine.notes:
        console.print(f"note: {note}")
    if workload.engine.name == "longspan" and workload.hardware.kind != "cpu":
        console.print(
            "note: Longspan computes on CPUs and refuses to start here; this is its layout of memory."
        )
        if able := [name for name, found in others if name != "longspan" and _starts(found)]:
            console.print(f"note: Start {' or '.join(able)} on this hardware.")


def _print_side(console: Any, plan: Plan, side: SidePlan) -> None:
    workload, fit, memory = plan.workload, side.fit, side.fit.memory
    hardware, n, split = workload.hardware, workload.context, side.fit.split
    nodes = f"{side.side.nodes} node{'s' * (side.side.nodes > 1)}"
    console.print(f"{side.role.upper()}: {nodes}, {split}, steps of {fit.step_tokens:,} tokens")
    whole = hardware.memory_bytes
    sequences = fit.sequences * memory.sequence_bytes(n)
    rows = [(part, size) for part, size in memory.weights.items()]
    rows += [("activations", fit.activations), ("runtime reserve", hardware.reserve_bytes)]
    cache = [
        (
            f"{fit.sequences} sequence{'s' * (fit.sequences > 1)}: latents",
            fit.sequences * memory.latent_per_token * n,
        ),
        ("  index keys", fit.sequences * memory.index_per_token * n),
        ("  KDA states", fit.sequences * memory.recurrent_per_sequence),
        ("  convolution windows", fit.sequences * memory.conv_per_sequence),
    ]
    rows += [
        *cache,
        ("  unfilled pages", sequences - sum(size for _, size in cache)),
        ("free", fit.cache_room - sequences),
        ("device", whole),
    ]
    _table(
        console,
        "Memory of a device",
        ("part", "bytes", "share"),
        [(name, show(size), f"{100 * size / whole:.1f} %") for name, size in rows if size],
        right=2,
    )
    console.print(
        f"Fits: {fit.sequences} x {n:,} tokens in each of {split.data} replica{'s' * (split.data > 1)} "
        f"({fit.sequences * split.data} on this side), or {side.pages:,} pages of "
        f"{memory.page_tokens * split.context:,} tokens.\n"
    )
    if side.role != "prefill":
        _print_traffic(console, side)
    console.print("Why")
    for reason in side.reasons:
        console.print(f"- {reason}")
    console.print()


def _print_traffic(console: Any, side: SidePlan) -> None:
    fit = side.fit
    busy, alone = asdict(side.reads), asdict(side.reads_alone)
    rows = [
        (f"memory: {name}", show(alone[name]), show(busy[name] / fit.sequences))
        for name in busy
        if busy[name]
    ]
    rows.append(("memory", show(side.reads_alone.total), show(side.reads.total / fit.sequences)))
    received = asdict(side.received)
    rows += [(f"network: {name}", show(size), show(size)) for name, size in received.items() if size]
    rows.append(("network", show(side.received.total), show(side.received.total)))
    _table(
        console,
        "Bytes of a rank for a decoded token",
        ("", "one sequence", f"{fit.sequences} a replica"),
        rows,
        right=2,
    )


def _starts(found: Plan | str) -> bool:
    return not isinstance(found, str) and not found.not_to_start


def _engine_row(name: str, found: Plan | str) -> tuple[str, str, str, str]:
    if isinstance(found, str):
        return name, "", "0", found
    side = found.sides[-1]
    whole = found.workload.config.indexer and found.workload.engine.indexes_whole
    remark = "index keys whole on each rank" if whole else ""
    if found.not_to_start:
        remark = f"no scripts: {found.not_to_start}"
    elif found.workload.without_dcp:
        remark = found.workload.without_dcp
    return name, str(side.fit.split), str(side.fit.sequences * side.fit.split.data), remark


def _table(
    console: Any, title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], right: int = 0
) -> None:
    """The last `right` columns are numbers."""
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=None, pad_edge=False, show_header=any(columns))
    for n, column in enumerate(columns):
        table.add_column(column, justify="right" if n >= len(columns) - right else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    console.print(table)
    console.print()
