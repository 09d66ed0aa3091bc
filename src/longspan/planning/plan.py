"""The plan itself: for each side the best legal split that fits, with the numbers that decided.

A split fits if weights, activations and one sequence of the whole context stay within the part of memory an
engine may use. Of those that fit, decoding takes the one with the shortest time for each token when as many
sequences run as fit (at most MAX_SEQUENCES a replica), if the prefill side can take the same TP and DCP:
connectors hand states over rank by rank, and prefill waits for arithmetic more than for memory. A step is
the largest chunk of a prompt whose activations stay within a tenth of the usable memory and leave room for a
sequence.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from longspan.config import ModelConfig
from longspan.errors import CapacityError
from longspan.memory.activations import activation_bytes
from longspan.planning.engines import Engine
from longspan.planning.hardware import Hardware
from longspan.planning.memory import RankMemory, local_config, memory_of
from longspan.planning.schemes import SCHEMES, Scheme
from longspan.planning.split import Split, legal_splits, reasons_against
from longspan.planning.topology import Side, parse_topology
from longspan.planning.traffic import (
    MemoryTraffic,
    NetworkTraffic,
    decode_reads,
    handoff_bytes,
    received_per_token,
    step_seconds,
)
from longspan.planning.units import show_bytes
from longspan.plugin_vllm.policy import default_block_size

CHUNKS = (16384, 8192, 4096, 2048, 1024, 512)  # tokens of a step that prefills
ACTIVATION_PART = 0.1  # of the usable memory, at most, unless even the smallest chunk takes more
MAX_SEQUENCES = 64  # of a replica at once
LONG_CONTEXT = 128 * 1024  # from here on DCP belongs on the go-live list
_NODES_TRIED = 64  # when looking for how many would be enough
_DOES = {"server": "serve", "prefill": "prefill", "decode": "decode"}


@dataclass(frozen=True)
class Workload:
    """What is asked for."""

    config: ModelConfig
    hardware: Hardware
    engine: Engine
    scheme: Scheme
    context: int
    index_key_dtype: str = "auto"

    @property
    def without_dcp(self) -> str:
        """Why the engine has no DCP for this model on this hardware; "" if it has."""
        return self.engine.without_sparse_dcp.get(self.hardware.name, "") if self.config.indexer else ""


@dataclass(frozen=True)
class Fit:
    """One split on one machine. Sequences are of the whole context, of one replica."""

    split: Split
    memory: RankMemory
    activations: int
    step_tokens: int
    budget: int  # of the device, without the reserve
    sequences: int
    seconds_per_token: float  # of one replica, with that many sequences

    @property
    def cache_room(self) -> int:
        """Bytes left for pages and states."""
        return self.budget - self.memory.weight_bytes - self.activations


@dataclass(frozen=True)
class SidePlan:
    """What one side does, and why."""

    side: Side
    fit: Fit
    reads: MemoryTraffic
    reads_alone: MemoryTraffic  # with a single sequence
    received: NetworkTraffic
    reasons: tuple[str, ...]

    @property
    def role(self) -> str:
        return self.side.role

    @property
    def pages(self) -> int:
        """Pages of a rank, if nothing but pages filled the room and each sequence had its state."""
        states = self.max_num_seqs * self.fit.memory.state_per_sequence
        return max(0, self.fit.cache_room - states) // self.fit.memory.page_bytes

    @property
    def max_num_seqs(self) -> int:
        """Most requests are shorter than the whole context, so more may run than fit at full length."""
        return min(MAX_SEQUENCES, max(16, self.fit.sequences))


@dataclass(frozen=True)
class Plan:
    """All of it."""

    model: str
    workload: Workload
    nodes: int
    topology: str
    sides: tuple[SidePlan, ...]
    handoff: tuple[int, int]  # bytes of state, and of the cache of a whole context

    @property
    def disaggregated(self) -> bool:
        return len(self.sides) > 1

    @property
    def not_to_start(self) -> str:
        """Why no scripts are made of it, the go-live list would refuse them; "" if it would not."""
        if not self.workload.without_dcp or self.workload.context < LONG_CONTEXT:
            return ""
        return f"{self.workload.without_dcp}; from {LONG_CONTEXT // 1024}K tokens on DCP is wanted"


def make_plan(
    model: str,
    config: ModelConfig,
    hardware: Hardware,
    engine: Engine,
    *,
    nodes: int,
    context: int,
    scheme: str,
    topology: str,
    index_key_dtype: str = "auto",
) -> Plan:
    """Raises CapacityError if the machine is not for this model, or too small for it."""
    if not 1 <= context <= config.max_position:
        raise CapacityError(
            f"A context of {context} tokens was asked for, the model was made for {config.max_position}.",
            remedy=f"Ask for at most {config.max_position}.",
        )
    if index_key_dtype != "auto" and config.indexer is None:
        raise CapacityError(
            f"index_key_dtype is {index_key_dtype!r}, but this model has no sparse indexer.",
            remedy="Leave --index-key-dtype out.",
        )
    hardware.require(config.family, scheme)
    if scheme == "mxfp4" and not config.experts_packed:
        raise CapacityError("This model is not published in MXFP4.", remedy="Choose --scheme bf16.")
    workload = Workload(config, hardware, engine, SCHEMES[scheme], context, index_key_dtype)
    sides = parse_topology(topology, nodes)
    decode, prefill = _best(workload, sides)
    planned = [_side_plan(workload, sides[-1], decode, _decode_reasons(workload, sides[-1], decode))]
    if prefill:
        planned.insert(0, _side_plan(workload, sides[0], prefill, _prefill_reasons(workload, prefill)))
    return Plan(
        model=model,
        workload=workload,
        nodes=nodes,
        topology=topology,
        sides=tuple(planned),
        handoff=handoff_bytes(config, context, index_key_dtype=index_key_dtype),
    )


def _side_plan(workload: Workload, side: Side, fit: Fit, reasons: tuple[str, ...]) -> SidePlan:
    config, context = workload.config, workload.context
    return SidePlan(
        side=side,
        fit=fit,
        reads=decode_reads(config, fit.split, fit.memory, sequences=fit.sequences, context=context),
        reads_alone=decode_reads(config, fit.split, fit.memory, sequences=1, context=context),
        received=received_per_token(config, fit.split, context),
        reasons=reasons,
    )


def fit_of(workload: Workload, split: Split, step_tokens: int) -> Fit:
    """How much of `workload` this split holds; no sequence at all if even the weights are too much."""
    config, hardware, context = workload.config, workload.hardware, workload.context
    page_tokens = workload.engine.page_tokens
    memory = memory_of(
        config,
        split,
        workload.scheme,
        index_key_dtype=workload.index_key_dtype,
        indexes_whole=workload.engine.indexes_whole,
        vision=workload.engine.vision,
        page_tokens=page_tokens or default_block_size(config, split.tensor, element_bytes=2),
        states_in_blocks=page_tokens is None,
    )
    budget = hardware.memory_bytes - hardware.reserve_bytes
    rows = min(step_tokens, MAX_SEQUENCES)
    activations = activation_bytes(local_config(config, split), step_tokens, rows, element_bytes=2)
    fit = Fit(split, memory, activations, step_tokens, budget, sequences=0, seconds_per_token=float("inf"))
    sequences = min(MAX_SEQUENCES, max(0, fit.cache_room) // memory.sequence_bytes(context))
    if not sequences:
        return fit
    reads = decode_reads(config, split, memory, sequences=sequences, context=context)
    received = received_per_token(config, split, context)
    seconds = step_seconds(hardware, split, reads, received, sequences)
    return replace(fit, sequences=sequences, seconds_per_token=seconds / (sequences * split.data))


def _candidates(workload: Workload, side: Side) -> Iterator[Split]:
    for split in legal_splits(workload.config, side.nodes, workload.hardware.devices):
        if _runs(workload, side, split):
            yield split


def _runs(workload: Workload, side: Side, split: Split) -> bool:
    """Whether the model can be dealt so, and the engine does it."""
    config, engine = workload.config, workload.engine
    if _splits_wholly(workload, side) and split.context not in (1, split.tensor):
        return False
    if split.context > 1 and workload.without_dcp:
        return False
    if engine.even_experts and config.moe.num_experts % split.expert:
        return False
    return not reasons_against(config, split)


def _splits_wholly(workload: Workload, side: Side) -> bool:
    """Whether DCP takes the whole tensor group or nothing: the engine hands shards over so."""
    return workload.engine.split_dcp_whole and side.role != "server"


def _chunks(side: Side) -> tuple[int, ...]:
    """Steps of a decode node are its sequences, and the last token of a prompt here and there."""
    return CHUNKS[-1:] if side.role == "decode" else CHUNKS


def _best(workload: Workload, sides: Sequence[Side]) -> tuple[Fit, Fit | None]:
    """The fastest split that fits, and the prefill side's to go with it, if there is one.

    Raises CapacityError, with how many nodes would do, for a side where none does.
    """
    *others, decode = sides
    found = _fits(workload, decode)
    if not found:
        raise _too_small(workload, decode)
    found.sort(key=lambda fit: (fit.seconds_per_token, fit.split.tensor, fit.split.context))
    if not others:
        return found[0], None
    pairs = ((fit, _prefill(workload, others[0], fit.split)) for fit in found)
    best = next((pair for pair in pairs if pair[1]), None)
    if best is None:
        raise _too_small(workload, others[0])
    return best


def _fits(workload: Workload, side: Side) -> list[Fit]:
    """Splits that hold one sequence, each with its largest chunk."""
    fits = (_largest_step(workload, split, _chunks(side)) for split in _candidates(workload, side))
    return [fit for fit in fits if fit]


def _largest_step(workload: Workload, split: Split, chunks: tuple[int, ...]) -> Fit | None:
    for chunk in chunks:
        fit = fit_of(workload, split, chunk)
        modest = fit.activations <= ACTIVATION_PART * fit.budget or chunk == chunks[-1]
        if fit.sequences and modest:
            return fit
    return None


def _prefill(workload: Workload, side: Side, decode: Split) -> Fit | None:
    """Decode's TP and DCP on these nodes, with the largest chunk."""
    split = replace(decode, data=side.nodes * workload.hardware.devices // decode.tensor)
    return _largest_step(workload, split, CHUNKS) if _runs(workload, side, split) else None


def _too_small(workload: Workload, side: Side) -> CapacityError:
    hardware = workload.hardware
    tried = [fit_of(workload, split, CHUNKS[-1]) for split in _candidates(workload, side)]
    if not tried:
        return CapacityError(
            f"The model can't be dealt over {hardware.devices} devices a node: no tensor split divides its "
            "heads.",
            remedy="Choose other hardware.",
        )
    nearest = max(tried, key=lambda fit: fit.cache_room - fit.memory.sequence_bytes(workload.context))
    need = nearest.memory.weight_bytes + nearest.activations + nearest.memory.sequence_bytes(workload.context)
    more = range(side.nodes + 1, _NODES_TRIED + 1)
    dealt = workload.config.moe.num_experts // hardware.devices  # nodes whose devices all get an expert
    fewer = () if _fits(workload, side) else range(min(side.nodes - 1, max(_NODES_TRIED, dealt)), 0, -1)
    enough, most = (
        next((n for n in counts if _fits(workload, Side(side.role, n))), None) for counts in (more, fewer)
    )
    shorter = max(fit.memory.tokens_in(fit.cache_room) for fit in tried)
    remedies = [
        *([f"Give this side {enough} nodes ({side.nodes} now)."] if enough else []),
        *([f"Give this side {most} nodes: experts can't be dealt over {side.nodes}."] if most else []),
        *([f"Plan for --context {shorter}."] if shorter else []),
    ]
    return CapacityError(
        f"{side.nodes} x {hardware.title} can't {_DOES[side.role]}: the nearest split, {nearest.split}, "
        f"needs {show_bytes(need)} a device (weights {show_bytes(nearest.memory.weight_bytes)}, "
        f"activations {show_bytes(nearest.activations)}, one sequence of {workload.context:,} tokens "
        f"{show_bytes(nearest.memory.sequence_bytes(workload.context))}), "
        f"and {show_bytes(nearest.budget)} may be used.",
        remedy=" Or: ".join(remedies) or "Choose weights of fewer bits, or other hardware.",
    )


def _decode_reasons(workload: Workload, side: Side, best: Fit) -> tuple[str, ...]:
    """Each knob against its neighbour, all else equal."""
    split, hardware = best.split, workload.hardware
    reasons = [
        f"{_rate(best)}, the best of {len(_fits(workload, side))} splits that fit, of "
        f"{len(list(_candidates(workload, side)))} that are legal: TP divides "
        f"{workload.config.kda.num_heads} KDA and {workload.config.mla.num_heads} MLA heads and stays inside "
        f"a node ({hardware.devices} devices), DCP "
        + ("is 1 or TP" if _splits_wholly(workload, side) else "divides TP"),
    ]

    def against(what: str, other: Split) -> None:
        if other == split or not _runs(workload, side, other):
            return
        fit = fit_of(workload, other, best.step_tokens)
        reasons.append(f"{what}: with {other} {_rate(fit)}")

    half = split.tensor // 2
    if split.tensor % 2 == 0 and half:
        against(
            f"TP {split.tensor} and not {half}",
            replace(split, tensor=half, data=split.data * 2, context=min(split.context, half)),
        )
    if split.data > 1:
        against(f"experts over all {split.devices} devices", replace(split, experts_over_data=False))
    if workload.without_dcp:
        reasons.append(f"DCP stays 1: {workload.without_dcp}")
    elif split.context > 1:
        for less in sorted({1, split.context // 2}):
            against(f"DCP {split.context} and not {less}", replace(split, context=less))
    elif split.tensor > 1:
        against("no DCP", replace(split, context=split.tensor))
    if workload.config.indexer and workload.engine.indexes_whole and split.context > 1:
        reasons.append(
            f"{workload.engine.title} keeps all index keys on each rank of a DCP group: "
            f"{show_bytes(best.memory.index_per_token * workload.context)} of the "
            f"{show_bytes(best.memory.sequence_bytes(workload.context))} a sequence takes of a rank"
        )
    return tuple(reasons)


def _prefill_reasons(workload: Workload, fit: Fit) -> tuple[str, ...]:
    received = received_per_token(workload.config, fit.split, workload.context)
    reasons = [
        f"TP {fit.split.tensor} and DCP {fit.split.context} as on the decode side: states and pages are "
        "handed over rank by rank (vLLM's NIXL connector refuses unequal DCP with recurrent states)",
        f"chunks of {fit.step_tokens:,} tokens: the largest whose activations "
        f"({show_bytes(fit.activations)}) are no more than {ACTIVATION_PART:.0%} "
        f"of the {show_bytes(fit.budget)} that may be used and leave room for a sequence "
        f"({show_bytes(fit.memory.sequence_bytes(workload.context))})",
    ]
    if fit.split.context > 1:
        exchanged = received.candidates + received.outputs
        reasons.append(
            f"the price of DCP {fit.split.context}: at most {show_bytes(exchanged * workload.context)} "
            f"received by a rank for a whole prompt of {workload.context:,} tokens, "
            f"{exchanged * workload.context / workload.hardware.link_gb_s.value / 1e9:.0f} s at "
            f"{workload.hardware.link_gb_s.value:g} GB/s"
        )
    return tuple(reasons)


def _rate(fit: Fit) -> str:
    if not fit.sequences:
        short = fit.memory.weight_bytes - fit.budget
        return (
            f"weights of {show_bytes(fit.memory.weight_bytes)} do not fit"
            if short > 0
            else "no sequence fits"
        )
    step = fit.seconds_per_token * fit.sequences * fit.split.data
    return (
        f"{fit.sequences} x {fit.split.data} sequences, a step of {1000 * step:.1f} ms, "
        f"{1 / fit.seconds_per_token:,.0f} tokens/s at the most"
    )
