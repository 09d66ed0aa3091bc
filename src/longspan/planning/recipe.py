"""Launch scripts of a plan, for one engine: a script a node, and a router.

Flags and variables are those of engines.toml, where each has its source. Every replica of a side answers over
HTTP by itself, so that the router balances them; SGLang's instances have one address for all their nodes.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from longspan.errors import CapacityError
from longspan.planning.plan import Plan, SidePlan
from longspan.planning.scripts import (
    HTTP_PORTS,
    PLACEHOLDER_NETWORK,
    ROUTER_PORT,
    Command,
    Flag,
    Script,
    host_names,
    or_default,
    packed,
)

MODEL = "$MODEL_PATH"
SERVED_NAME = "kimi"
RPC_PORTS = {"server": 13345, "prefill": 13345, "decode": 13346}
# Mooncake on Ascend takes 20000 to 35999 of a node with 16 devices for itself.
KV_PORTS = {"prefill": 36000, "decode": 36200}
BOOTSTRAP_PORT = 8998
STORE_PORT = 24669  # of MemFabric, on the first prefill node
INIT_PORT = 5000  # where SGLang's nodes of an instance meet
_KV_ROLES = {"prefill": "kv_producer", "decode": "kv_consumer"}


@dataclass(frozen=True)
class Recipe:
    """Files of one engine, by name."""

    engine: str
    scripts: tuple[Script, ...]
    others: dict[str, str]

    def write(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        for script in self.scripts:
            path = directory / script.name
            path.write_text(script.text())
            path.chmod(0o755)
        for name, text in self.others.items():
            (directory / name).write_text(text)


def make_recipe(plan: Plan, hosts: Sequence[str] = (), model_path: str = "") -> Recipe:
    """`hosts`: an address for each node, prefill first; without them, placeholders. Raises CapacityError."""
    if hosts and len(hosts) != plan.nodes:
        raise CapacityError(
            f"{len(hosts)} addresses were given for {plan.nodes} nodes.", remedy="Give one for each node."
        )
    engine = plan.workload.engine.name
    addresses = host_names([(side.role, side.side.nodes) for side in plan.sides], hosts)
    node = {"longspan": _longspan, "vllm-ascend": _vllm_ascend, "sglang": _sglang}[engine]
    scripts = [
        node(plan, side, addresses, number, model_path or f"/models/{plan.model}")
        for side in plan.sides
        for number in range(side.side.nodes)
    ]
    routers, others = _routers(engine, scripts)
    return Recipe(engine, (*scripts, *routers), others)


def _name(side: SidePlan, number: int) -> str:
    return f"{side.role}-{number}.sh"


def _comment(plan: Plan, side: SidePlan, host: str) -> str:
    placeholder = host.startswith(PLACEHOLDER_NETWORK)
    lines = [
        f"{plan.workload.engine.title}: {side.role} node at {host}, {side.fit.split}, on "
        f"{plan.workload.hardware.title}."
    ]
    if placeholder:
        lines.append("The address is a placeholder: write the scripts again with --hosts.")
    return "\n".join(lines)


def _node_variables(model_path: str) -> dict[str, str]:
    return {"MODEL_PATH": or_default("MODEL_PATH", model_path)}


def _replicas(plan: Plan, side: SidePlan, number: int) -> list[tuple[int, int]]:
    """(number on the node, rank among all replicas) of those on this node."""
    local = plan.workload.hardware.devices // side.fit.split.tensor
    return [(n, number * local + n) for n in range(local)]


def _parallel_flags(side: SidePlan, rank: int, first_host: str) -> list[Flag]:
    """What vLLM and vLLM Ascend call the split."""
    split = side.fit.split
    flags: list[Flag] = [("--tensor-parallel-size", str(split.tensor))]
    if split.data > 1:
        flags += [
            ("--data-parallel-size", str(split.data)),
            ("--data-parallel-size-local", "1"),
            ("--data-parallel-rank", str(rank)),
            ("--data-parallel-address", first_host),
            ("--data-parallel-rpc-port", str(RPC_PORTS[side.role])),
        ]
    if split.experts_over_data and split.devices > 1:
        flags.append(("--enable-expert-parallel", None))
    block = str(side.fit.memory.page_tokens)
    flags.append(("--block-size", block))
    if split.context > 1:
        flags += [
            ("--decode-context-parallel-size", str(split.context)),
            ("--cp-kv-cache-interleave-size", block),
        ]
    return flags


def _length_flags(plan: Plan, side: SidePlan) -> list[Flag]:
    return [
        ("--max-model-len", str(plan.workload.context)),
        ("--max-num-seqs", str(side.max_num_seqs)),
        ("--max-num-batched-tokens", str(side.fit.step_tokens)),
        ("--enable-prefix-caching", None),
        ("--mamba-cache-mode", "align"),
    ]


def _longspan(
    plan: Plan, side: SidePlan, addresses: dict[str, list[str]], number: int, model_path: str
) -> Script:
    hosts = addresses[side.role]
    host = hosts[number]
    variables = _node_variables(model_path)
    is_cpu = plan.workload.hardware.kind == "cpu"
    if is_cpu:
        memory: list[Flag] = [("--kv-cache-memory-bytes", str(side.fit.cache_room))]
    else:
        memory = [("--gpu-memory-utilization", f"{plan.workload.hardware.usable.value:g}")]
    role: list[Flag] = []
    if plan.disaggregated:
        variables["VLLM_NIXL_SIDE_CHANNEL_HOST"] = host
        role = [("--role", side.role)]
    commands, urls = [], []
    for local, rank in _replicas(plan, side, number):
        port = HTTP_PORTS[side.role] + local
        urls.append(f"http://{host}:{port}")
        flags: list[Flag] = [
            ("--host", "0.0.0.0"),
            ("--port", str(port)),
            ("--served-model-name", SERVED_NAME),
            ("--dtype", "bfloat16"),
            *_parallel_flags(side, rank, hosts[0]),
            *_length_flags(plan, side),
            ("--enable-chunked-prefill", None),
            *memory,
            *role,
        ]
        head = ("longspan", "cluster", "serve", MODEL)
        if is_cpu and side.fit.split.tensor < plan.workload.hardware.devices:
            # Each process sees the cores of its own sockets only, and shares them out among its ranks.
            first, last = local * side.fit.split.tensor, (local + 1) * side.fit.split.tensor - 1
            sockets = f"{first}-{last}" if last > first else str(first)
            head = ("numactl", f"--cpunodebind={sockets}", f"--membind={sockets}", *head)
        commands.append(Command(head, tuple(flags)))
    return Script(
        _name(side, number), side.role, _comment(plan, side, host), tuple(commands), variables, tuple(urls)
    )


def _vllm_ascend(
    plan: Plan, side: SidePlan, addresses: dict[str, list[str]], number: int, model_path: str
) -> Script:
    hosts = addresses[side.role]
    host, split = hosts[number], side.fit.split
    mooncake = "/usr/local/Ascend/ascend-toolkit/latest/python/site-packages/mooncake"
    variables = _node_variables(model_path) | {
        "HCCL_IF_IP": host,
        "HCCL_SOCKET_IFNAME": "${NIC:-eth0}",
        "GLOO_SOCKET_IFNAME": "${NIC:-eth0}",
        "HCCL_BUFFSIZE": "1024" if plan.disaggregated else "800",
        "PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True",
    }
    options: dict[str, bool] = {"enable_cpu_binding": True, "enable_flashcomm1": True}
    mode: list[Flag] = [("--compilation-config", packed({"cudagraph_mode": "FULL_DECODE_ONLY"}))]
    transfer: list[Flag] = []
    if plan.disaggregated:
        variables |= {
            "ASCEND_ENABLE_USE_FABRIC_MEM": "1",
            "LD_LIBRARY_PATH": f"{mooncake}:${{LD_LIBRARY_PATH:-}}",
            "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": "30000",
            "PYTHONHASHSEED": "0",
        }
        options = {"recompute_scheduler_enable": False, "multistream_overlap_shared_expert": True}
        if side.role == "prefill":
            options["enable_flashcomm1"] = True
            mode = [("--enforce-eager", None)]
        else:
            variables["HCCL_OP_EXPANSION_MODE"] = "AIV"
        sizes = {s.role: {"dp_size": s.fit.split.data, "tp_size": s.fit.split.tensor} for s in plan.sides}
        connector = {
            "kv_connector": "MooncakeConnectorV1",
            "kv_role": _KV_ROLES[side.role],
            "kv_port": str(KV_PORTS[side.role]),
            "kv_connector_extra_config": sizes,
        }
        transfer = [("--kv-transfer-config", packed(connector))]
    quantized = plan.workload.scheme.name in ("w4a8", "w8a8")
    commands, urls = [], []
    for local, rank in _replicas(plan, side, number):
        port = HTTP_PORTS[side.role] + local
        urls.append(f"http://{host}:{port}")
        devices = range(local * split.tensor, (local + 1) * split.tensor)
        flags: list[Flag] = [
            ("--host", "0.0.0.0"),
            ("--port", str(port)),
            ("--served-model-name", SERVED_NAME),
            ("--trust-remote-code", None),
            *([("--quantization", "ascend")] if quantized else []),
            *_parallel_flags(side, rank, hosts[0]),
            *_length_flags(plan, side),
            ("--gpu-memory-utilization", f"{plan.workload.hardware.usable.value:g}"),
            *mode,
            ("--additional-config", packed(options)),
            ("--seed", "1024"),
            ("--safetensors-load-strategy", "prefetch"),
            ("--mm-encoder-tp-mode", "data"),
            ("--skip-mm-profiling", None),
            ("--limit-mm-per-prompt", packed({"vision_chunk": 2})),
            ("--tokenizer-mode", "kimi_k3"),
            ("--enable-auto-tool-choice", None),
            ("--reasoning-parser", "kimi_k3"),
            ("--tool-call-parser", "kimi_k3"),
            *transfer,
        ]
        visible = {"ASCEND_RT_VISIBLE_DEVICES": ",".join(map(str, devices))}
        commands.append(Command(("vllm", "serve", MODEL), tuple(flags), visible))
    return Script(
        _name(side, number), side.role, _comment(plan, side, host), tuple(commands), variables, tuple(urls)
    )


def _sglang(
    plan: Plan, side: SidePlan, addresses: dict[str, list[str]], number: int, model_path: str
) -> Script:
    hosts, split = addresses[side.role], side.fit.split
    host, hardware = hosts[number], plan.workload.hardware
    variables = _node_variables(model_path)
    platform: list[Flag] = [("--moe-runner-backend", "marlin")]
    backend = "mooncake"
    if hardware.kind == "ascend":
        variables |= {
            "HCCL_SOCKET_IFNAME": "${NIC:-eth0}",
            "GLOO_SOCKET_IFNAME": "${NIC:-eth0}",
            "HCCL_BUFFSIZE": "1200",
            "PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True",
            "STREAMS_PER_DEVICE": "32",
        }
        if plan.disaggregated:
            variables["ASCEND_MF_STORE_URL"] = f"tcp://{addresses['prefill'][0]}:{STORE_PORT}"
        platform = [("--device", "npu"), ("--attention-backend", "ascend"), ("--moe-a2a-backend", "deepep")]
        platform.append(
            ("--deepep-mode", {"prefill": "normal", "decode": "low_latency"}.get(side.role, "auto"))
        )
        if plan.workload.scheme.name in ("w4a8", "w8a8"):
            platform.append(("--quantization", "modelslim"))
        backend = "ascend"
    else:
        variables |= {
            "NCCL_SOCKET_IFNAME": "${NIC:-eth0}",
            "GLOO_SOCKET_IFNAME": "${NIC:-eth0}",
            "SGLANG_HOST_IP": host,
        }
    port = HTTP_PORTS[side.role]
    flags: list[Flag] = [
        ("--model-path", MODEL),
        ("--served-model-name", SERVED_NAME),
        ("--trust-remote-code", None),
        ("--host", "0.0.0.0"),
        ("--port", str(port)),
        ("--dtype", "bfloat16"),
        ("--tp-size", str(split.devices)),
    ]
    if split.data > 1:
        flags += [("--dp-size", str(split.data)), ("--enable-dp-attention", None)]
    flags.append(("--ep-size", str(split.expert)))
    if split.context > 1:
        flags.append(("--dcp-size", str(split.context)))
    if len(hosts) > 1:
        flags += [
            ("--nnodes", str(len(hosts))),
            ("--node-rank", str(number)),
            ("--dist-init-addr", f"{hosts[0]}:{INIT_PORT}"),
        ]
    flags += [
        ("--context-length", str(plan.workload.context)),
        ("--max-running-requests", str(side.max_num_seqs * split.data)),
        ("--chunked-prefill-size", str(side.fit.step_tokens)),
        ("--mem-fraction-static", f"{1 - side.fit.activations / hardware.memory_bytes - 0.1:.2f}"),
        ("--reasoning-parser", "kimi_k3"),
        ("--tool-call-parser", "kimi_k3"),
        ("--enable-metrics", None),
        *platform,
    ]
    if plan.disaggregated:
        flags += [
            ("--disaggregation-mode", side.role),
            ("--disaggregation-transfer-backend", backend),
        ]
        if side.role == "prefill":
            flags.append(("--disaggregation-bootstrap-port", str(BOOTSTRAP_PORT)))
    head = ("python3", "-m", "sglang.launch_server")
    urls = (f"http://{host}:{port}",) if number == 0 else ()
    return Script(
        _name(side, number),
        side.role,
        _comment(plan, side, host),
        (Command(head, tuple(flags)),),
        variables,
        urls,
    )


def _routers(engine: str, scripts: Sequence[Script]) -> tuple[list[Script], dict[str, str]]:
    """Routers in front of these, and the files they read; none in front of a single address."""
    urls = {role: [url for s in scripts if s.role == role for url in s.urls] for role in HTTP_PORTS}
    if len(urls["server"]) == 1:
        return [], {}
    where: list[Flag] = [("--host", "0.0.0.0"), ("--port", str(ROUTER_PORT))]
    if urls["server"]:
        return _balancers(urls["server"], where), {}
    prefill: list[Flag] = [("--prefill", url) for url in urls["prefill"]]
    decode: list[Flag] = [("--decode", url) for url in urls["decode"]]
    if engine == "sglang":
        command = Command(
            ("python3", "-m", "sglang_router.launch_router"),
            (
                ("--pd-disaggregation", None),
                *(("--prefill", (url, str(BOOTSTRAP_PORT))) for url in urls["prefill"]),
                *decode,
                *where,
            ),
        )
        return [_router("router.sh", "SGLang's router.", command)], {}
    if engine == "vllm-ascend":
        return [_router("router.sh", "The proxy of vLLM Ascend's examples.", _ascend_proxy(urls, where))], {}
    check: Flag = ("--health-check-interval-secs", "5")
    vllm_router = Command(
        ("vllm-router",),
        (("--vllm-pd-disaggregation", None), ("--kv-connector", "nixl"), *prefill, *decode, *where, check),
    )
    smg = Command(
        ("smg", "launch"),
        (
            ("--pd-disaggregation", None),
            ("--discovery-provider", "file"),
            ("--discovery-file", '$(dirname "$0")/workers.json'),
            *where,
            check,
        ),
    )
    workers = [
        {"id": f"{role}-{n}", "url": url, "worker_type": role, "kv_connector": "NixlConnector"}
        for role in ("prefill", "decode")
        for n, url in enumerate(urls[role])
    ]
    return (
        [
            _router("router-smg.sh", "smg; workers.json says who prefills and who decodes.", smg),
            _router("router-vllm.sh", "vllm-router, instead of smg.", vllm_router),
        ],
        {"workers.json": json.dumps({"version": 1, "workers": workers}, indent=1) + "\n"},
    )


def _router(name: str, comment: str, command: Command) -> Script:
    return Script(name, "router", comment, (command,))


def _balancers(urls: Sequence[str], where: list[Flag]) -> list[Script]:
    flags: tuple[Flag, ...] = (("--worker-urls", tuple(urls)), ("--policy", "cache_aware"), *where)
    return [
        _router("router-smg.sh", "smg in front of all replicas.", Command(("smg", "launch"), flags)),
        _router("router-vllm.sh", "vllm-router, instead of smg.", Command(("vllm-router",), flags)),
    ]


def _ascend_proxy(urls: dict[str, list[str]], where: list[Flag]) -> Command:
    def parts(role: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
        pairs = [url.removeprefix("http://").rsplit(":", 1) for url in urls[role]]
        return tuple(host for host, _ in pairs), tuple(port for _, port in pairs)

    (prefill_hosts, prefill_ports), (decode_hosts, decode_ports) = parts("prefill"), parts("decode")
    example = "examples/disaggregated_prefill_v1/load_balance_proxy_server_example.py"
    return Command(
        ("python3", f"${{VLLM_ASCEND:-/vllm-workspace/vllm-ascend}}/{example}"),
        (
            *where,
            ("--prefiller-hosts", prefill_hosts),
            ("--prefiller-ports", prefill_ports),
            ("--decoder-hosts", decode_hosts),
            ("--decoder-ports", decode_ports),
        ),
    )
