"""Every number of a plan as formula, inserted values and result, in Markdown.

The inserted values are an expression that Python can evaluate; `derive` refuses to print one that does not
give the number that the plan was made with, so a document made by it cannot say something else.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil, floor

from longspan.errors import ConfigError
from longspan.formats.inventory import A_LOG_PADDING
from longspan.planning.memory import RankMemory
from longspan.planning.plan import ACTIVATION_PART, MAX_SEQUENCES, Plan, SidePlan, Workload
from longspan.planning.traffic import handoff_bytes, step_seconds
from longspan.planning.units import show_bytes

_TOLERANCE = 1e-9


@dataclass(frozen=True)
class Line:
    """One number. `inserted` is the formula with values, as Python would have it."""

    name: str
    formula: str
    inserted: str
    value: float
    unit: str = "B"

    def check(self) -> None:
        """ConfigError if the inserted values give another number. They are this module's own text."""
        found = eval(
            self.inserted.replace(",", "").replace(";", ","), {"ceil": ceil, "floor": floor, "min": min}
        )
        if abs(found - self.value) > _TOLERANCE * abs(self.value) + 1:
            raise ConfigError(f"{self.name}: {self.inserted} is {found}, but the plan has {self.value}.")

    def row(self) -> str:
        shown = self.inserted.replace(";", ",").replace("**", "^").replace("*", "·")
        return f"| {self.name} | `{self.formula}` | `{shown}` | {show(self.value, self.unit)} |"


def show(value: float, unit: str = "B") -> str:
    """1.56 TB; counts with separators; times in ms."""
    if unit == "B":
        return show_bytes(value)
    if unit == "ms":
        return f"{value:.2f} ms"
    return f"{value:,.0f} {unit}".strip()


def weight_lines(workload: Workload, memory: RankMemory, side: SidePlan) -> Iterator[Line]:
    """One line a part of the weights of a rank, and their sum."""
    config, split, scheme = workload.config, side.fit.split, workload.scheme
    d, kda, mla, moe = config.hidden_size, config.kda, config.mla, config.moe
    t, c = split.tensor, split.context
    full, moe_layers = len(config.full_attention_layers), len(config.moe_layers)
    linear, dense = config.num_layers - full, config.num_layers - moe_layers
    b = f"{scheme.matrix_bits // 8}"
    p = kda.num_heads * kda.head_dim
    low_rank = 1 if kda.full_rank_gate else 2
    cut = f"(5 * {p:,} * {d:,} + {kda.num_heads} * {d:,} + {p:,} * {kda.head_dim})"
    whole = f"{kda.head_dim} * {d:,}"
    if low_rank == 2:
        cut = f"(4 * {p:,} * {d:,} + {kda.num_heads} * {d:,} + 2 * {p:,} * {kda.head_dim})"
        whole = f"2 * {kda.head_dim} * {d:,}"
    padded = ceil(kda.num_heads / A_LOG_PADDING) * A_LOG_PADDING
    a_log = kda.num_heads if config.family == "kimi-linear" else padded
    wide = f"4 * ((3 * {p:,} * {kda.conv_kernel_size} + {p:,} + {a_log}) / {t} + {kda.head_dim})"
    kda_expression = f"{linear} * ({b} * ({cut} / {t} + {whole}) + {wide})"
    query = mla.num_heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim)
    value = mla.num_heads * mla.v_head_dim
    rank = mla.q_lora_rank
    from_x = f"{query:,} * {rank or d:,} * {c} / {t}"
    lora = f"{rank:,} * {d:,} + " if rank else ""
    norms = f"2 * ({rank:,} + {mla.kv_lora_rank})" if rank else f"2 * {mla.kv_lora_rank}"
    outs = 2 if mla.output_gate else 1
    up = f"{mla.num_heads} * ({mla.qk_nope_head_dim} * {c} + {mla.v_head_dim}) / {t} * {mla.kv_lora_rank}"
    mla_expression = (
        f"{full} * ({b} * ({lora}{mla.kv_lora_rank + mla.qk_rope_head_dim} * {d:,} + {from_x} + {up} "
        f"+ {outs} * {value:,} * {d:,} / {t}) + {norms})"
    )
    index_expression = "0"
    if config.indexer:
        heads, dim = config.indexer.num_heads, config.indexer.head_dim
        index_expression = (
            f"{full} * 2 * ({heads * dim:,} * {rank or d:,} + ({dim} + {heads}) * {d:,} + 2 * {dim})"
        )
    yield Line(
        "attention",
        "KDA + MLA + indexers, cut by heads",
        f"{kda_expression} + {mla_expression} + {index_expression}",
        memory.weights["attention"],
    )
    width = moe.latent_size or d
    yield Line(
        "routed experts",
        "layers * ceil(E / EP) * 3 * inner * width * bits / 8",
        f"{moe_layers} * ceil({moe.num_experts} / {split.expert}) * 3 * {moe.intermediate_size:,} * "
        f"{width:,} * {scheme.expert_bits:g} / 8",
        memory.weights["routed experts"],
    )
    if "shared experts" in memory.weights:
        inner = moe.num_shared_experts * moe.intermediate_size
        yield Line(
            "shared experts",
            "layers * 3 * ceil(inner / TP) * hidden * bytes",
            f"{moe_layers} * 3 * ceil({inner:,} / {t}) * {d:,} * {b}",
            memory.weights["shared experts"],
        )
    yield Line(
        "dense layers",
        "layers * 3 * ceil(inner / TP) * hidden * bytes",
        f"{dense} * 3 * ceil({config.intermediate_size:,} / {t}) * {d:,} * {b}",
        memory.weights["dense layers"],
    )
    latent = ""
    if moe.latent_size:
        n = f"{moe.latent_size:,}"
        latent = f" + {b} * ({n} + ceil({n} / {t})) * {d:,} + 2 * {n}"
    yield Line(
        "router and latent",
        "layers * (router + bias + (down + up / TP) + norm)",
        f"{moe_layers} * (2 * {moe.num_experts} * {d:,} + 4 * {moe.num_experts}{latent})",
        memory.weights["router and latent"],
    )
    tables = 1 if config.tie_word_embeddings else 2
    yield Line(
        "embedding and head",
        "tables * ceil(vocabulary / TP) * hidden * 2",
        f"{tables} * ceil({config.vocab_size:,} / {t}) * {d:,} * 2",
        memory.weights["embedding and head"],
    )
    vectors = "6 + 3" if config.attn_res_block_size is not None else "2 + 1"
    per_layer, final = vectors.split(" + ")
    yield Line(
        "norms",
        "(layers * vectors + final) * hidden * 2",
        f"({config.num_layers} * {per_layer} + {final}) * {d:,} * 2",
        memory.weights["norms"],
    )
    if "vision" in memory.weights:
        yield Line("vision", "whole on each rank", f"{memory.weights['vision']:,}", memory.weights["vision"])
    yield Line("weights", "sum", " + ".join(f"{n:,}" for n in memory.weights.values()), memory.weight_bytes)


def cache_lines(workload: Workload, side: SidePlan) -> Iterator[Line]:
    """Cache, states and how many sequences there is room for."""
    config, fit, memory, n = workload.config, side.fit, side.fit.memory, workload.context
    hardware, split = workload.hardware, side.fit.split
    full = len(config.full_attention_layers)
    linear = config.num_layers - full
    mla, kda = config.mla, config.kda
    width = mla.kv_lora_rank + mla.qk_rope_head_dim
    yield Line(
        "latent of a token",
        "layers * (rank + rope) * 2 / DCP",
        f"{full} * {width} * 2 / {split.context}",
        memory.latent_per_token,
    )
    if config.indexer:
        dim = config.indexer.head_dim
        key = f"{dim} * 2" if workload.index_key_dtype == "auto" else f"({ceil(dim / 4) * 4} + 4)"
        whole = workload.engine.indexes_whole
        yield Line(
            "index key of a token",
            "layers * key" if whole else "layers * key / DCP",
            f"{full} * {key}" + ("" if whole else f" / {split.context}"),
            memory.index_per_token,
        )
    yield Line(
        "KDA state of a sequence",
        "layers * heads * dim^2 * 4 / TP",
        f"{linear} * {kda.num_heads} * {kda.head_dim} * {kda.head_dim} * 4 / {split.tensor}",
        memory.recurrent_per_sequence,
    )
    p = kda.num_heads * kda.head_dim
    yield Line(
        "convolution window",
        "layers * (kernel - 1) * 3 * heads * dim * 2 / TP",
        f"{linear} * {kda.conv_kernel_size - 1} * 3 * {p:,} * 2 / {split.tensor}",
        memory.conv_per_sequence,
    )
    pages = memory.pages_of(n)
    yield Line(
        "pages of a sequence",
        "ceil(n / (P * DCP))",
        f"ceil({n:,} / ({memory.page_tokens} * {split.context}))",
        pages,
        "pages",
    )
    yield Line(
        "a sequence",
        "pages * bytes of a page + state + window",
        f"{pages:,} * {memory.page_bytes:,} + {memory.recurrent_per_sequence:,} + "
        f"{memory.conv_per_sequence:,}",
        memory.sequence_bytes(n),
    )
    yield Line(
        "usable memory",
        "memory * usable",
        f"{hardware.memory_gib.value:g} * 2**30 * {hardware.usable.value:g}",
        fit.budget,
    )
    yield Line(
        "activations",
        f"bound for a step of {fit.step_tokens:,} tokens, at most {ACTIVATION_PART:.0%} of that",
        f"{fit.activations:,}",
        fit.activations,
    )
    yield Line(
        "room for cache and states",
        "usable - weights - activations",
        f"{fit.budget:,} - {memory.weight_bytes:,} - {fit.activations:,}",
        fit.cache_room,
    )
    yield Line(
        "sequences of the whole context, a replica",
        f"floor(room / sequence), at most {MAX_SEQUENCES}",
        f"min(floor({fit.cache_room:,} / {memory.sequence_bytes(n):,}); {MAX_SEQUENCES})",
        fit.sequences,
        "",
    )


def traffic_lines(workload: Workload, side: SidePlan) -> Iterator[Line]:
    """What a decode step with all these sequences moves, and the time it takes at the machine's rates."""
    config, hardware, fit, n = workload.config, workload.hardware, side.fit, workload.context
    split, memory, reads, received = fit.split, fit.memory, side.reads, side.received
    moe, s, t, c = config.moe, fit.sequences, split.tensor, split.context
    full, d = len(config.full_attention_layers), config.hidden_size
    experts = memory.weights["routed experts"]
    tables = 1 if config.tie_word_embeddings else 2
    vision = memory.weights.get("vision", 0)
    yield Line(
        "weights read",
        "weights - routed - embedding table - vision + rows",
        f"{memory.weight_bytes:,} - {experts:,} - floor({memory.weights['embedding and head']:,} / {tables}) "
        f"- {vision} + {s} * {d:,} * 2",
        reads.weights,
    )
    replicas = split.data if split.experts_over_data else 1
    yield Line(
        "routed experts read",
        "routed * (1 - (1 - k / E)^T), T = sequences * replicas",
        f"{experts:,} * (1 - (1 - {moe.top_k} / {moe.num_experts}) ** ({s} * {replicas}))",
        reads.experts,
    )
    if reads.index:
        yield Line(
            "index keys scored",
            "sequences * n * key bytes of the rank",
            f"{s} * {n:,} * {memory.index_per_token:g}",
            reads.index,
        )
    top_k = config.indexer.top_k if config.indexer else n
    width = config.mla.kv_lora_rank + config.mla.qk_rope_head_dim
    yield Line(
        "latents attended to",
        "sequences * layers * (rank + rope) * 2 * min(n, top_k) / DCP",
        f"{s} * {full} * {width} * 2 * min({n:,}; {top_k:,}) / {c}",
        reads.latent,
    )
    yield Line(
        "states read and written",
        "2 * sequences * state",
        f"2 * {s} * {memory.state_per_sequence:,}",
        reads.state,
    )
    yield Line(
        "memory a step",
        "sum",
        " + ".join(repr(x) for x in (reads.weights, reads.experts, reads.index, reads.latent, reads.state)),
        reads.total,
    )
    yield Line(
        "all-reduces and logits, a token",
        "(2 L + 1) * 2 (T-1)/T hidden * 2 + (T-1) ceil(vocabulary / T) * 4",
        f"(2 * {config.num_layers} + 1) * 2 * ({t} - 1) / {t} * {d:,} * 2 + ({t} - 1) * "
        f"ceil({config.vocab_size:,} / {t}) * 4",
        received.tensor,
    )
    latent, layers = moe.latent_size or d, len(config.moe_layers)
    if received.experts and replicas > 1:
        x = split.expert
        yield Line(
            "expert dispatch and combine, a token",
            "layers * (X (1 - (1 - 1/X)^k) (1 - 1/X) (8 k + latent (2 + 4)) / T + (T-1)/T latent 2), X = EP",
            f"{layers} * ({x} * (1 - (1 - 1 / {x}) ** {moe.top_k}) * (1 - 1 / {x}) * (8 * {moe.top_k} + "
            f"{latent:,} * 6) / {t} + ({t} - 1) / {t} * {latent:,} * 2)",
            received.experts,
        )
    elif received.experts:
        yield Line(
            "sums of experts, a token",
            "layers * 2 (T-1)/T latent * 4",
            f"{layers} * 2 * ({t} - 1) / {t} * {latent:,} * 4",
            received.experts,
        )
    if received.candidates:
        yield Line(
            "DCP candidates, a token",
            "layers * (D-1) * min(top_k, ceil(n / D)) * 8",
            f"{full} * ({c} - 1) * min({top_k}; ceil({n} / {c})) * 8",
            received.candidates,
        )
    if received.outputs:
        yield Line(
            "DCP outputs, a token",
            "layers * (D-1)/D * heads of the group * (rank + 1) * 4",
            f"{full} * ({c} - 1) / {c} * {config.mla.num_heads} * {c} / {t} * "
            f"({config.mla.kv_lora_rank} + 1) * 4",
            received.outputs,
        )
    yield Line(
        "network a token",
        "sum, received by a rank",
        " + ".join(
            repr(x) for x in (received.tensor, received.experts, received.candidates, received.outputs)
        ),
        received.total,
    )
    outside = max(0.0, 1 - hardware.devices / split.expert)
    near = received.total - received.experts * outside
    milliseconds = 1000 * step_seconds(hardware, split, reads, received, s)
    yield Line(
        "a decode step",
        "memory / rate + sequences * (in the node / link + out of it / network)",
        f"({reads.total!r} / {hardware.memory_gb_s.value:g} + {s} * ({near!r} / "
        f"{hardware.link_gb_s.value:g} + {received.experts * outside!r} / {hardware.network_gb_s.value:g})) "
        "/ 1e6",
        milliseconds,
        "ms",
    )
    yield Line(
        "tokens a second of the side, at the most",
        "sequences * DP / step",
        f"{s} * {split.data} / {milliseconds!r} * 1000",
        1 / fit.seconds_per_token,
        "",
    )


def handoff_lines(plan: Plan) -> Iterator[Line]:
    """One request from prefill to decode."""
    workload = plan.workload
    config, n = workload.config, workload.context
    state, cache = plan.handoff
    full = len(config.full_attention_layers)
    linear = config.num_layers - full
    kda, p = config.kda, config.kda.num_heads * config.kda.head_dim
    yield Line(
        "state",
        "layers * (heads * dim^2 * 4 + (kernel - 1) * 3 * heads * dim * 2)",
        f"{linear} * ({kda.num_heads} * {kda.head_dim} * {kda.head_dim} * 4 + {kda.conv_kernel_size - 1} * "
        f"3 * {p:,} * 2)",
        state,
    )
    token = handoff_bytes(config, 1, index_key_dtype=workload.index_key_dtype)[1]
    width = config.mla.kv_lora_rank + config.mla.qk_rope_head_dim
    key = (token - full * width * 2) // full
    yield Line(
        "latents and index keys of a token",
        "layers * ((rank + rope) * 2 + key)",
        f"{full} * ({width} * 2 + {key})",
        token,
    )
    yield Line("cache of the whole context", "n * token", f"{n:,} * {token:,}", cache)
    yield Line("a request", "state + cache", f"{state:,} + {cache:,}", state + cache)


def scheme_text(workload: Workload) -> str:
    """What the weights are, here and in general."""
    here = workload.hardware.schemes[workload.scheme.name]
    return f"{workload.scheme.name}: {here + '; ' if here else ''}{workload.scheme.note}."


def derive(plan: Plan, model: str = "", hardware_name: str = "") -> str:
    """The document. Raises ConfigError if formula and plan disagree.

    `model` and `hardware_name`: as the user gave them, a path perhaps, for the command that it states.
    """
    workload = plan.workload
    hardware = workload.hardware
    command = (
        f"longspan plan {model or plan.model} --hardware {hardware_name or hardware.name} "
        f"--nodes {plan.nodes} --context {workload.context} --scheme {workload.scheme.name} "
        f"--topology {plan.topology} --engine {workload.engine.name} "
        + (f"--index-key-dtype {workload.index_key_dtype} " if workload.index_key_dtype != "auto" else "")
        + "--markdown"
    )
    parts = [
        f"# {plan.model} on {plan.nodes} x {hardware.name}, {plan.topology}, {workload.context:,} tokens, "
        f"{workload.scheme.name}",
        f"`{command}` writes this page. Every number is of one rank of a replica unless it says otherwise; "
        f"P is {plan.sides[-1].fit.memory.page_tokens} tokens a page, units are decimal.",
        f"{hardware.title}. {scheme_text(workload)} Memory is laid out as {workload.engine.title} does.",
        "\n".join(
            [
                "| hardware | value | where from |",
                "| --- | --- | --- |",
                *(
                    f"| {name} | {number.value:g} | {'assumed: ' if number.assumed else ''}{number.reason} |"
                    for name, number in hardware.numbers.items()
                ),
            ]
        ),
    ]
    for side in plan.sides:
        parts += [
            f"## {side.role.capitalize()}: {side.fit.split}, on {side.side.nodes} nodes",
            "\n".join(f"- {reason}" for reason in side.reasons),
            _table("Weights", weight_lines(workload, side.fit.memory, side)),
            _table("Cache and room", cache_lines(workload, side)),
        ]
        if side.role != "prefill":
            parts.append(_table("Bytes moved by a decode step", traffic_lines(workload, side)))
    if plan.disaggregated:
        parts += ["## Hand-off of a request", _table("", handoff_lines(plan))]
    return "\n\n".join(part for part in parts if part) + "\n"


def _table(title: str, lines: Iterator[Line]) -> str:
    rows = [
        *([f"### {title}", ""] if title else []),
        "| what | formula | inserted | result |",
        "| --- | --- | --- | --- |",
    ]
    for line in lines:
        line.check()
        rows.append(line.row())
    return "\n".join(rows)
