"""What the servers of a plan are started with: scripts, values, roles, layout of the caches, features."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from longspan.errors import LongspanError
from longspan.planning.engines import load_engine
from longspan.planning.finding import WRITE_AGAIN, Finding, by_script, judge, judge_faults
from longspan.planning.hardware import ENGINES, bundled
from longspan.planning.launched import ROLES, Launch, Process, scripts_of, whole_number
from longspan.planning.plan import LONG_CONTEXT

_TENSOR = ("--tensor-parallel-size", "--tp-size")
_DCP = ("--decode-context-parallel-size", "--dcp-size")
_LENGTH = ("--max-model-len", "--context-length")
_BLOCK, _INTERLEAVE = "--block-size", "--cp-kv-cache-interleave-size"


@dataclass(frozen=True)
class _Setting:
    """What all processes of a side must say with one voice."""

    flags: tuple[str, ...]
    default: str
    both_sides: tuple[str, ...] = ()  # engines of which both sides must be alike

    def said(self, process: Process) -> str:
        if any(f"--no-{flag[2:]}" in process.flags for flag in self.flags):
            return self.default
        value = process.value(*self.flags)
        return self.default if value is None else value or "on"


_ALIKE = {
    # NIXL hands over between ranks of one number; Mooncake's and SGLang's connectors may have others.
    "TP": _Setting(_TENSOR, "1", both_sides=("longspan",)),
    "DP": _Setting(("--data-parallel-size", "--dp-size"), "1"),
    "EP": _Setting(("--enable-expert-parallel", "--ep-size"), "off"),
    "DCP": _Setting(_DCP, "1", both_sides=ENGINES),
    "block size": _Setting((_BLOCK,), "the engine's own", both_sides=ENGINES),
    "dtype": _Setting(("--dtype",), "auto", both_sides=("longspan",)),
    "served name": _Setting(("--served-model-name",), "the path", both_sides=ENGINES),
}

# Flags that take a number; the lowest that makes sense.
_COUNTS = {
    "--tensor-parallel-size": 1,
    "--tp-size": 1,
    "--data-parallel-size": 1,
    "--data-parallel-size-local": 1,
    "--data-parallel-rank": 0,
    "--data-parallel-rpc-port": 1,
    "--dp-size": 1,
    "--ep-size": 1,
    "--nnodes": 1,
    "--node-rank": 0,
    "--port": 1,
    "--disaggregation-bootstrap-port": 1,
    _BLOCK: 1,
    _INTERLEAVE: 1,
    "--max-num-seqs": 1,
    "--max-running-requests": 1,
    "--context-length": 1,
    "--chunked-prefill-size": -1,  # -1: off, which is a point of its own
}
_SIZES = ("--max-model-len", "--max-num-batched-tokens", "--kv-cache-memory-bytes")  # 64K is a number too
_PARTS = ("--gpu-memory-utilization", "--mem-fraction-static")


def check_files(where: str, launch: Launch) -> Finding:
    """Every script of the plan starts something, and there are no others."""
    remedy = WRITE_AGAIN
    faults = []
    for name in launch.plan.urls:
        if not (launch.directory / name).is_file():
            faults.append(f"{name} is missing")
        elif not any(process.script == name for process in launch.processes):
            faults.append(f"{name} starts no server")
    if launch.strangers:
        faults += [f"{name} is not of this plan" for name in launch.strangers]
        remedy = f"Delete {', '.join(launch.strangers)}, or write the plan into an empty directory."
    return judge_faults(where, "scripts", faults, f"{len(launch.plan.urls)}, all of this plan", remedy)


def check_weights(where: str, launch: Launch) -> Finding:
    point = "weights fit the hardware"
    plan = launch.plan
    name, scheme = plan.hardware.name, plan.scheme
    hardware = bundled().get(name)
    if hardware is None:
        return Finding(
            where, point, "unknown", f"{name} is not among the known hardware", "Check it with its vendor."
        )
    try:
        hardware.require(plan.family, scheme)
    except LongspanError as error:
        return Finding(where, point, "fail", error.message, error.remedy)
    wanted = _quantization(plan.engine, hardware.kind, scheme)
    wrong = scripts_of(p for p in launch.processes if p.value("--quantization") != wanted)
    means = hardware.schemes[scheme] or "plain bfloat16"
    if wrong:
        found = f"--quantization of {wrong} is not {wanted or 'left out'}"
        return Finding(where, point, "fail", found, f"{scheme} on {hardware.title} is {means}.")
    return Finding(where, point, "pass", f"{scheme}: {means}")


def _quantization(engine: str, kind: str, scheme: str) -> str | None:
    """What the flag must say: only Ascend's engines need to be told."""
    if kind != "ascend" or scheme not in ("w4a8", "w8a8"):
        return None
    return {"vllm-ascend": "ascend", "sglang": "modelslim"}.get(engine)


def check_values(where: str, launch: Launch) -> Finding:
    """Numbers where numbers are needed, in their range, and caches of a type that the engine has."""
    faults = ((p.script, fault) for p in launch.processes for fault in _wrong_values(launch, p))
    return judge_faults(
        where, "values", by_script(faults), "all in range", f"Correct them. Or: {WRITE_AGAIN}"
    )


def _wrong_values(launch: Launch, process: Process) -> Iterator[str]:
    def wrong(flag: str, expected: str) -> str:
        return f"{flag} is {process.value(flag) or 'empty'}, not {expected},"

    sizes = () if launch.plan.engine == "sglang" else _SIZES
    for flag in (flag for flag in process.flags if flag in _COUNTS or flag in _SIZES):
        value, lowest = process.value(flag) or "", _COUNTS.get(flag, 1)
        number = -1 if value == "-1" else whole_number(value)
        if number is None or (flag not in sizes and not value.lstrip("-").isdecimal()):
            form = ", such as 65536 or 64K" if flag in sizes else ""
            yield wrong(flag, f"a whole number{form}")
        elif number < lowest or (lowest == -1 and number == 0):
            yield wrong(flag, f"at least {max(lowest, 0)}")
        elif flag.endswith("-port") and number > 65535:
            yield wrong(flag, "a port")
    for flag in _PARTS:
        if flag in process.flags and not 0 < _part(process.value(flag)) <= 1:
            yield wrong(flag, "above 0 and at most 1")
    cache = process.value("--kv-cache-dtype")
    if launch.plan.engine == "longspan" and cache not in (None, "auto", process.value("--dtype")):
        yield wrong("--kv-cache-dtype", "auto")


def _part(text: str | None) -> float:
    try:
        return float(text or "")
    except ValueError:
        return -1.0


def check_roles(where: str, launch: Launch) -> Finding:
    """Each script says its role, nodes of a side are alike, and both sides where the connector needs it."""
    faults = [*_own_roles(launch), *_unlike(launch), *_unlike_the_plan(launch)]
    faults += by_script((p.script, fault) for p in launch.processes for fault in _wrong_sizes(launch, p))
    return judge_faults(where, "roles", faults, launch.plan.topology, WRITE_AGAIN)


def _own_roles(launch: Launch) -> Iterator[str]:
    for process in launch.processes:
        if process.role == "server":
            continue
        said = process.value("--disaggregation-mode")
        if launch.plan.engine != "sglang":
            kv_role = process.json("--kv-transfer-config").get("kv_role")
            kv_said = {"kv_producer": "prefill", "kv_consumer": "decode"}.get(str(kv_role))
            said = process.value("--role") or kv_said
        if said != process.role:
            yield f"{process.script} says {said or 'no role'}"


def _unlike(launch: Launch) -> Iterator[str]:
    for name, setting in _ALIKE.items():
        said = _said(launch, setting)
        uneven = [role for role in ROLES if len(said[role]) > 1]
        for role in uneven:
            yield f"{name} differs between {role} nodes: {', '.join(sorted(said[role]))}"
        both = launch.plan.engine in setting.both_sides
        if both and not uneven and said["prefill"] != said["decode"]:
            prefill, decode = (", ".join(said[role]) or "none" for role in ("prefill", "decode"))
            yield f"{name} is {prefill} for prefill, {decode} for decode"


def _said(launch: Launch, setting: _Setting) -> dict[str, set[str]]:
    return {role: {setting.said(process) for process in launch.of_role(role)} for role in ROLES}


def _unlike_the_plan(launch: Launch) -> Iterator[str]:
    """Experts are where the plan, whose memory they take, put them."""
    said = _said(launch, _ALIKE["EP"])
    for side in launch.plan.sides:
        wanted = "on" if side.experts_over_data else "off"
        if launch.plan.engine == "sglang":
            wanted = str(side.split.expert)
        if len(said[side.role]) == 1 and said[side.role] != {wanted}:
            yield f"EP of {side.role} is {', '.join(said[side.role])}, not {wanted} as planned"


def _wrong_sizes(launch: Launch, process: Process) -> Iterator[str]:
    """vLLM Ascend's connector is told the sizes of both sides, which may differ."""
    sizes = process.json("--kv-transfer-config").get("kv_connector_extra_config")
    for role in ("prefill", "decode"):
        told = sizes.get(role) if isinstance(sizes, dict) else None
        for key, name in {"tp_size": "TP", "dp_size": "DP"}.items():
            said = _said(launch, _ALIKE[name])[role]
            if isinstance(told, dict) and len(said) == 1 and said != {str(told.get(key))}:
                yield f"{key} of {role} is {told.get(key)}, and {name} is {', '.join(said)},"


def check_blocks(where: str, launch: Launch) -> Finding:
    """Tokens are dealt over DCP by whole blocks in a split, else by parts of blocks."""
    faults = ((p.script, fault) for p in launch.processes for fault in _wrong_blocks(launch, p))
    return judge_faults(where, "blocks", by_script(faults), "dealt as the engine can", WRITE_AGAIN)


def _wrong_blocks(launch: Launch, process: Process) -> Iterator[str]:
    engine, old = launch.plan.engine, "--dcp-kv-cache-interleave-size"
    if engine == "sglang":
        return
    if engine == "longspan" and old in process.flags:
        yield f"{old} is there, and the plugin takes only {_INTERLEAVE},"
    block, given = process.number(_BLOCK, default=0), process.value(_INTERLEAVE)
    interleave = process.number(_INTERLEAVE)
    in_split = process.role != "server"
    if given is None:
        if in_split and engine == "vllm-ascend" and process.number(*_DCP) > 1:
            yield f"{_INTERLEAVE} is missing, and the connector hands over blocks of {block},"
    elif not block:
        yield f"{_INTERLEAVE} is {given}, and {_BLOCK} is missing,"
    elif in_split and interleave != block:
        yield f"{_INTERLEAVE} is {given}, and the connector hands over blocks of {block},"
    elif block % max(1, interleave):
        yield f"{_INTERLEAVE} is {given}, and does not divide blocks of {block},"


def check_length(where: str, launch: Launch) -> Finding:
    context = launch.plan.context
    short = scripts_of(p for p in launch.processes if p.number(*_LENGTH, default=context) < context)
    found = f"less than {context:,} tokens in {short}" if short else f"{context:,} tokens"
    return judge(where, "context", not short, found, f"Give {' or '.join(_LENGTH)} {context}.")


def check_context_parallel(where: str, launch: Launch) -> Finding:
    """On for long contexts, unless the plan found that a rank holds them alone; legal beside TP."""
    point, plan = "DCP for long contexts", launch.plan
    engine = load_engine(plan.engine)
    longest = max((p.number(*_LENGTH, default=plan.context) for p in launch.processes), default=plan.context)
    needed = longest >= LONG_CONTEXT
    if plan.split_in_two and engine.split_dcp_whole:
        remedy = "Set it to TP." if needed else "Set it to 1 or to TP."
    else:
        remedy = f"Set it to a divisor of TP{' above 1' if needed else ''}."

    def failed(found: str) -> Finding:
        return Finding(where, point, "fail", found, remedy)

    dcp = {process.script: process.value(*_DCP) or "" for process in launch.processes if _has_dcp(process)}
    strange = {name: value for name, value in dcp.items() if not value.isdecimal() or not value.strip("0")}
    if strange:
        values = ", ".join(sorted({value or "empty" for value in strange.values()}))
        return failed(f"is {values}, no whole number from 1, in {', '.join(strange)}")
    if uneven := [p for p in launch.processes if _attention_tensor(p) % p.number(*_DCP)]:
        return failed(f"does not divide TP in {scripts_of(uneven)}")
    partial = [
        p for p in launch.processes if p.role != "server" and p.number(*_DCP) not in (1, _attention_tensor(p))
    ]
    if partial and engine.split_dcp_whole:
        return failed(f"less than TP in {scripts_of(partial)}")
    if not needed:
        return Finding(where, point, "pass", f"{longest:,} tokens need none")
    sizes = {p.number(*_DCP) for p in launch.processes}
    if sizes and min(sizes) > 1:
        return Finding(where, point, "pass", f"DCP {', '.join(map(str, sorted(sizes)))}")
    if why := engine.without_sparse_dcp.get(plan.hardware.name):
        remedy = "Choose another engine or a shorter context."
        return failed(f"off, for {longest:,} tokens: {why}")
    if {side.split.context for side in plan.sides} == {1} and longest <= plan.context:
        return Finding(where, point, "pass", "off, as planned: a rank holds the whole context alone")
    return failed(f"off, for {longest:,} tokens")


def _has_dcp(process: Process) -> bool:
    return any(flag in process.flags for flag in _DCP)


def _attention_tensor(process: Process) -> int:
    """Ranks that share the heads of a sequence; SGLang counts all devices of an instance."""
    tensor = process.number(*_TENSOR)
    return tensor // max(1, process.number("--dp-size")) if "--tp-size" in process.flags else tensor


def check_prefix_cache(where: str, launch: Launch) -> Finding:
    if launch.plan.engine == "sglang":
        off = [p for p in launch.processes if "--disable-radix-cache" in p.flags]
        remedy = "Take out --disable-radix-cache."
    else:
        off = [
            p
            for p in launch.processes
            if "--enable-prefix-caching" not in p.flags
            or "--no-enable-prefix-caching" in p.flags
            or p.value("--mamba-cache-mode") != "align"
        ]
        remedy = "Give --enable-prefix-caching and --mamba-cache-mode align."
    return judge(where, "prefix cache", not off, f"off in {scripts_of(off)}" if off else "on", remedy)


def check_chunked_prefill(where: str, launch: Launch) -> Finding:
    """Chunks shorter than the context; where the context is short, no longer than planned."""
    longest = max([launch.plan.context - 1, *(side.fits.step_tokens for side in launch.plan.sides)])
    off = [
        p
        for p in launch.processes
        if "--no-enable-chunked-prefill" in p.flags or p.value("--chunked-prefill-size") == "-1"
    ]
    whole = [
        p
        for p in launch.processes
        if p.number("--max-num-batched-tokens", "--chunked-prefill-size") > longest
    ]
    bad = scripts_of([*off, *whole])
    return judge(
        where,
        "chunked prefill",
        not bad,
        f"off, or chunks as long as the context, in {bad}" if bad else "on",
        "Give a chunk shorter than the context, and no --no-enable-chunked-prefill.",
    )


def check_metrics(where: str, launch: Launch) -> Finding:
    """Of SGLang, which has none unless it is told to."""
    dark = scripts_of(p for p in launch.processes if "--enable-metrics" not in p.flags)
    return judge(where, "metrics", not dark, f"off in {dark}" if dark else "on", "Add --enable-metrics.")
