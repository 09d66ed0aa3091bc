"""The go-live list: what must be so before a deployment takes traffic.

Of a directory of launch scripts: weights for the hardware, roles and addresses, DCP for long contexts, prefix
cache and chunked prefill, an accuracy report. Of a running server: health, its model and the length it takes,
metrics. What can't be seen from here is "unknown", with how to find out.

An accuracy report is a JSON object with "passed" (true or false), or with "score" and "baseline" (and
"tolerance", 0 if left out), or what `longspan eval --json` writes: rows of percentages, each of which must
reach MIN_EXACT. A perplexity row has none and is passed over.
"""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from longspan.errors import ConfigError, LongspanError
from longspan.planning.engines import load_engine
from longspan.planning.hardware import bundled
from longspan.planning.launched import ROLES, Launch, Process, find_launches
from longspan.planning.plan import LONG_CONTEXT
from longspan.planning.scripts import PLACEHOLDER_NETWORK

Status = Literal["pass", "fail", "unknown"]

ACCURACY_FILE = "accuracy.json"
MIN_EXACT = 90.0  # percent of a skill
_TIMEOUT = 5.0  # seconds
# One of each: a server that has none of a line's names lacks it.
_METRICS = (
    ("vllm:num_requests_running", "sglang:num_running_reqs"),
    ("vllm:time_to_first_token_seconds", "sglang:time_to_first_token_seconds"),
    ("vllm:kv_cache_usage_perc", "sglang:token_usage"),
    ("vllm:prefix_cache_hits", "sglang:cache_hit_rate"),
)
# What all processes of a side must say with one voice, and prefill and decode too.
_ALIKE = {
    "TP": ("--tensor-parallel-size", "--tp-size"),
    "DP": ("--data-parallel-size", "--dp-size"),
    "EP": ("--enable-expert-parallel", "--ep-size"),
    "DCP": ("--decode-context-parallel-size", "--dcp-size"),
    "block size": ("--block-size",),
}
_ALIKE_ON_BOTH_SIDES = ("DCP", "block size")
_DIVISOR = "Set it to a divisor of TP."
_LENGTH = ("--max-model-len", "--context-length")
_MOONCAKE_PORTS = range(20000, 36000)  # that it takes for itself on nodes of 16 devices


@dataclass(frozen=True)
class Finding:
    """One point of the list."""

    where: str
    point: str
    status: Status
    found: str
    remedy: str = ""

    def as_json(self) -> dict[str, str]:
        return {key: str(value) for key, value in vars(self).items()}


def check_targets(targets: Sequence[str], accuracy: Path | None = None) -> list[Finding]:
    """All points of all targets, a directory or an address each. Raises ConfigError for neither."""
    findings: list[Finding] = []
    launches: list[Launch] = []
    urls = [target for target in targets if re.fullmatch(r"https?://[^/\s]+(/\S*)?", target)]
    for target in targets:
        if target in urls:
            continue
        if not Path(target).is_dir():
            raise ConfigError(
                f"{target} is no directory, and no http:// address.",
                remedy="Give one of `plan --output`, or an address such as http://10.0.0.1:8100.",
            )
        launches += find_launches(Path(target))
    for launch in launches:
        findings += check_launch(launch, accuracy)
    context = max((launch.plan["context"] for launch in launches), default=None)
    for url in urls:
        findings += check_server(url, context)
    if launches and not urls:
        findings.append(
            Finding(
                "servers",
                "health and metrics",
                "unknown",
                "no address was given",
                "Start the scripts and give --check their addresses too.",
            )
        )
    if accuracy and not launches:
        findings.append(_accuracy("accuracy", accuracy))
    return findings


def check_launch(launch: Launch, accuracy: Path | None = None) -> Iterator[Finding]:
    where = str(launch.directory)
    yield _weights(where, launch)
    yield _roles(where, launch)
    yield _addresses(where, launch)
    yield _length(where, launch)
    yield _context_parallel(where, launch)
    yield _prefix_cache(where, launch)
    yield _chunked_prefill(where, launch)
    yield _accuracy(where, accuracy or launch.directory / ACCURACY_FILE)
    if launch.engine == "sglang":
        dark = _scripts_of(p for p in launch.processes if "--enable-metrics" not in p.flags)
        yield _judge(where, "metrics", not dark, f"off in {dark}" if dark else "on", "Add --enable-metrics.")


def _judge(where: str, point: str, good: bool, found: str, remedy: str) -> Finding:
    return Finding(where, point, "pass" if good else "fail", found, "" if good else remedy)


def _scripts_of(processes: Iterable[Process]) -> str:
    return ", ".join(sorted({process.script for process in processes}))


def _weights(where: str, launch: Launch) -> Finding:
    point = "weights fit the hardware"
    name, scheme, family = launch.plan["hardware"]["name"], launch.plan["scheme"], launch.plan["family"]
    hardware = bundled().get(name)
    if hardware is None:
        return Finding(
            where, point, "unknown", f"{name} is not among the known hardware", "Check it with its vendor."
        )
    try:
        hardware.require(family, scheme)
    except LongspanError as error:
        return Finding(where, point, "fail", error.message, error.remedy)
    wanted = _quantization(launch.engine, hardware.kind, scheme)
    wrong = _scripts_of(p for p in launch.processes if p.value("--quantization") != wanted)
    if wrong:
        return Finding(
            where,
            point,
            "fail",
            f"--quantization of {wrong} is not {wanted or 'left out'}",
            f"{scheme} on {hardware.title} is {hardware.schemes[scheme] or 'plain bfloat16'}.",
        )
    return Finding(where, point, "pass", f"{scheme}: {hardware.schemes[scheme] or 'plain bfloat16'}")


def _quantization(engine: str, kind: str, scheme: str) -> str | None:
    """What the flag must say: only Ascend's engines need to be told."""
    if kind != "ascend" or scheme not in ("w4a8", "w8a8"):
        return None
    return {"vllm-ascend": "ascend", "sglang": "modelslim"}.get(engine)


def _roles(where: str, launch: Launch) -> Finding:
    """As many scripts of each role as nodes, each saying its role, the two sides alike."""
    faults = []
    for side in launch.plan["sides"]:
        role, nodes = side["role"], side["nodes"]
        scripts = {process.script for process in launch.of_role(role)}
        if len(scripts) != nodes:
            faults.append(f"{len(scripts)} {role} scripts for {nodes} nodes")
    for process in launch.processes:
        if process.role == "server":
            continue
        said = process.value("--disaggregation-mode")
        if launch.engine != "sglang":
            kv_role = process.json("--kv-transfer-config").get("kv_role")
            kv_said = {"kv_producer": "prefill", "kv_consumer": "decode"}.get(kv_role or "")
            said = process.value("--role") or kv_said
        if said != process.role:
            faults.append(f"{process.script} says {said or 'no role'}")
    for name, flags in _ALIKE.items():
        said = {role: {p.value(*flags) for p in launch.of_role(role)} for role in ROLES}
        if any(len(found) > 1 for found in said.values()):
            faults.append(f"{name} differs between nodes of one side")
        elif name in _ALIKE_ON_BOTH_SIDES and said["prefill"] != said["decode"]:
            both = [", ".join(str(value or 1) for value in said[role]) for role in ("prefill", "decode")]
            faults.append(f"{name} is {both[0] or 'none'} for prefill, {both[1] or 'none'} for decode")
    text = "; ".join(dict.fromkeys(faults)) or launch.plan["topology"]
    return _judge(where, "roles", not faults, text, "Write the scripts again with `longspan plan --output`.")


def _addresses(where: str, launch: Launch) -> Finding:
    """No placeholders, ports as planned and none twice, ranks complete, routers that know every server."""
    urls = [url for each in launch.plan["urls"].values() for url in each]
    faults = []
    if any(PLACEHOLDER_NETWORK in url for url in urls):
        faults.append("placeholders for addresses")
    if len(set(urls)) < len(urls):
        faults.append("two servers at one address")
    for script, planned in launch.plan["urls"].items():
        ports = [p.value("--port") or "none" for p in launch.processes if p.script == script]
        wanted = [url.rpartition(":")[2] for url in planned]
        if planned and ports and sorted(ports) != sorted(wanted):
            faults.append(f"{script} listens on {', '.join(ports)}, and is asked on {', '.join(wanted)}")
    for role in ROLES:
        processes = launch.of_role(role)
        masters = {p.value("--data-parallel-address", "--dist-init-addr") for p in processes}
        if len(masters) > 1:
            faults.append(f"{role} nodes meet at {len(masters)} addresses")
        ranks = sorted(p.number("--data-parallel-rank", "--node-rank", default=-1) for p in processes)
        if len(processes) > 1 and ranks != list(range(len(processes))):
            faults.append(f"ranks of {role} are {ranks}")
        for process in processes:
            bootstrap = process.value("--disaggregation-bootstrap-port")
            if bootstrap and not any(bootstrap in text.split() for text in launch.routers.values()):
                faults.append(f"no router knows the bootstrap port {bootstrap} of {process.script}")
            port = process.json("--kv-transfer-config").get("kv_port")
            if str(port).isdecimal() and int(str(port)) in _MOONCAKE_PORTS:
                faults.append(f"kv_port {port} of {process.script} is Mooncake's own")
    for name, text in launch.routers.items():
        missing = [url for url in urls if not _names(text, url)]
        if missing:
            faults.append(f"{name} does not know {', '.join(missing)}")
    if len(urls) > 1 and not launch.routers:
        faults.append(f"no router in front of {len(urls)} servers")
    text = "; ".join(dict.fromkeys(faults)) or f"{len(urls)} servers, {len(launch.routers)} routers"
    return _judge(where, "addresses", not faults, text, "Write the scripts again with --hosts A,B,...")


def _names(text: str, url: str) -> bool:
    """A router names a whole address, or host and port in separate lists."""
    host, _, port = url.removeprefix("http://").rpartition(":")
    return url in text or ("-hosts" in text and host in text.split() and port in text.split())


def _length(where: str, launch: Launch) -> Finding:
    context = launch.plan["context"]
    short = _scripts_of(p for p in launch.processes if p.number(*_LENGTH, default=context) < context)
    found = f"{short} takes less than {context:,} tokens" if short else f"{context:,} tokens"
    return _judge(where, "context", not short, found, f"Give {' or '.join(_LENGTH)} {context}.")


def _context_parallel(where: str, launch: Launch) -> Finding:
    """On for long contexts, unless the plan found that a rank holds them alone; legal beside TP."""
    point, context = "DCP for long contexts", launch.plan["context"]
    uneven = [p for p in launch.processes if _attention_tensor(p) % max(1, p.number(*_ALIKE["DCP"]))]
    if uneven:
        return Finding(where, point, "fail", f"does not divide TP in {_scripts_of(uneven)}", _DIVISOR)
    partial = [
        p
        for p in launch.processes
        if p.role != "server" and p.number(*_ALIKE["DCP"]) not in (1, _attention_tensor(p))
    ]
    if partial and load_engine(launch.engine).split_dcp_whole:
        return Finding(
            where, point, "fail", f"less than TP in {_scripts_of(partial)}", "Set it to 1 or to TP."
        )
    longest = max((p.number(*_LENGTH, default=context) for p in launch.processes), default=context)
    if longest < LONG_CONTEXT:
        return Finding(where, point, "pass", f"{longest:,} tokens need none")
    sizes = {p.number(*_ALIKE["DCP"]) for p in launch.processes}
    if sizes and min(sizes) > 1:
        return Finding(where, point, "pass", f"DCP {', '.join(map(str, sorted(sizes)))}")
    if why := load_engine(launch.engine).without_sparse_dcp.get(launch.plan["hardware"]["name"]):
        remedy = "Choose another engine or a shorter context."
        return Finding(where, point, "fail", f"off, for {longest:,} tokens: {why}", remedy)
    planned = {side["split"].get("context", 1) for side in launch.plan["sides"]}
    if planned == {1} and longest <= context:
        return Finding(where, point, "pass", "off, as planned: a rank holds the whole context alone")
    return Finding(where, point, "fail", f"off, for {longest:,} tokens", _DIVISOR)


def _attention_tensor(process: Process) -> int:
    """Ranks that share the heads of a sequence; SGLang counts all devices of an instance."""
    tensor = process.number(*_ALIKE["TP"])
    return tensor // max(1, process.number("--dp-size")) if "--tp-size" in process.flags else tensor


def _prefix_cache(where: str, launch: Launch) -> Finding:
    if launch.engine == "sglang":
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
    return _judge(where, "prefix cache", not off, f"off in {_scripts_of(off)}" if off else "on", remedy)


def _chunked_prefill(where: str, launch: Launch) -> Finding:
    """Chunks shorter than the context; where the context is short, no longer than planned."""
    planned = [side.get("fits", {}).get("step_tokens", 0) for side in launch.plan["sides"]]
    longest = max([launch.plan["context"] - 1, *planned])
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
    bad = _scripts_of([*off, *whole])
    return _judge(
        where,
        "chunked prefill",
        not bad,
        f"off, or chunks as long as the context, in {bad}" if bad else "on",
        "Give a chunk shorter than the context, and no --no-enable-chunked-prefill.",
    )


def _accuracy(where: str, file: Path) -> Finding:
    point = "accuracy regression"
    remedy = "Compare with the published weights, and give the report with --accuracy."
    try:
        report = json.loads(file.read_text())
    except OSError:
        return Finding(where, point, "unknown", f"no report at {file}", remedy)
    except ValueError:
        return Finding(where, point, "fail", f"{file} is not JSON", remedy)
    verdict = _verdict(report)
    if verdict is None:
        return Finding(
            where, point, "unknown", f"{file} has neither passed, score and baseline, nor rows", remedy
        )
    good, text = verdict
    return _judge(where, point, good, text, "Find out which weights or kernels lost it before going live.")


def _verdict(report: Any) -> tuple[bool, str] | None:
    """(good, what it says), None if it says nothing that is understood."""
    if not isinstance(report, dict):
        return None
    if isinstance(report.get("passed"), bool):
        return report["passed"], "passed" if report["passed"] else "not passed"
    score, baseline, tolerance = report.get("score"), report.get("baseline"), report.get("tolerance", 0)
    if all(isinstance(number, int | float) for number in (score, baseline, tolerance)):
        return score >= baseline - tolerance, f"{score:g}, baseline {baseline:g}, tolerance {tolerance:g}"
    rows = report.get("rows")
    exact = {
        row.get("skill"): row["exact"]
        for row in (rows if isinstance(rows, list) else ())
        if isinstance(row, dict) and isinstance(row.get("exact"), int | float)
    }
    if not exact:
        return None
    worst = min(exact, key=lambda skill: exact[skill])
    return exact[worst] >= MIN_EXACT, f"worst of {len(exact)} skills: {worst}, {exact[worst]:.1f} %"


def check_server(url: str, context: int | None = None) -> Iterator[Finding]:
    """Health, model and metrics of a running server; `context`: tokens it must take."""
    base = url.rstrip("/").removesuffix("/v1")
    status, _ = _get(f"{base}/health")
    yield _judge(
        base, "health", status == 200, f"HTTP {status}" if status else "nothing answers", "Look at its log."
    )
    if not status:
        return
    yield _models(base, context)
    status, text = _get(f"{base}/metrics")
    missing = [" or ".join(names) for names in _METRICS if not any(name in text for name in names)]
    found = f"HTTP {status}" if status != 200 else f"lacks {', '.join(missing)}" if missing else "present"
    yield _judge(
        base,
        "metrics",
        status == 200 and not missing,
        found,
        "SGLang needs --enable-metrics; a router has its own.",
    )


def _models(base: str, context: int | None) -> Finding:
    point, remedy = "model", "Compare --max-model-len (or --context-length) with the plan."
    status, text = _get(f"{base}/v1/models")
    try:
        models = json.loads(text)["data"]
        names = [model["id"] for model in models]
    except (ValueError, KeyError, TypeError):
        return Finding(base, point, "fail", f"HTTP {status}, no list of models", remedy)
    lengths = [model.get("max_model_len") for model in models if model.get("max_model_len")]
    if context and lengths and max(lengths) < context:
        return Finding(base, point, "fail", f"takes {max(lengths):,} of {context:,} tokens", remedy)
    if context and not lengths:
        return Finding(base, point, "unknown", f"{', '.join(names)}; it does not say how long", remedy)
    length = f", {max(lengths):,} tokens" if lengths else ""
    return _judge(base, point, bool(names), ", ".join(names) + length or "none", remedy)


def _get(url: str) -> tuple[int, str]:
    """(HTTP status, text); status 0 if nothing answers."""
    try:
        with urllib.request.urlopen(url, timeout=_TIMEOUT) as response:
            return response.status, response.read().decode(errors="replace")
    except urllib.error.HTTPError as error:
        return error.code, ""
    except (OSError, ValueError):
        return 0, ""


def print_findings(findings: Sequence[Finding]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(markup=False, highlight=False, soft_wrap=True)
    for where in dict.fromkeys(finding.where for finding in findings):
        table = Table(title=where, title_justify="left", box=None, pad_edge=False, show_header=False)
        for _ in range(3):
            table.add_column(overflow="fold")
        for finding in findings:
            if finding.where == where:
                remedy = f" {finding.remedy}" if finding.remedy else ""
                table.add_row(finding.status, finding.point, f"{finding.found}.{remedy}")
        console.print(table)
        console.print()
    counts = {status: sum(f.status == status for f in findings) for status in ("pass", "fail", "unknown")}
    console.print(", ".join(f"{count} {status}" for status, count in counts.items()))
