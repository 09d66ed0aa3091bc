"""Who is where: addresses and ports, ranks that meet, routers that know every server for what it is."""

from __future__ import annotations

import re
from collections.abc import Iterator

from pydantic import BaseModel, ValidationError

from longspan.planning.finding import WRITE_AGAIN, Finding, judge_faults
from longspan.planning.launched import ROLES, Launch, Process, Router
from longspan.planning.plan_file import faults_of, host_and_port, is_loopback
from longspan.planning.scripts import PLACEHOLDER_NETWORK

_MOONCAKE_PORTS = range(20000, 36000)  # that it takes for itself on nodes of 16 devices
_ALL_INTERFACES = ("0.0.0.0", "::", "[::]", "*", "")
# Variables that say this node's address.
_OWN_ADDRESS = ("VLLM_NIXL_SIDE_CHANNEL_HOST", "HCCL_IF_IP", "SGLANG_HOST_IP")
_SPLIT_FLAGS = {
    "smg": "--pd-disaggregation",
    "sglang_router": "--pd-disaggregation",
    "vllm-router": "--vllm-pd-disaggregation",
}
_WORKER_TYPES = {"prefill": "prefill", "decode": "decode", "regular": "server"}


def check_addresses(where: str, launch: Launch) -> Finding:
    """No placeholders, ports as planned and none twice, reachable from other hosts, ranks complete."""
    urls = [url for each in launch.plan.urls.values() for url in each]
    faults = [
        *_planned(launch, urls),
        *(fault for role in ROLES for fault in _ranks(launch, role)),
        *(fault for process in launch.processes for fault in _own_host(launch, process)),
    ]
    remedy = "Write the scripts again with --hosts A,B,..."
    return judge_faults(where, "addresses", faults, f"{len(urls)} servers", remedy)


def _planned(launch: Launch, urls: list[str]) -> Iterator[str]:
    if any(PLACEHOLDER_NETWORK in url for url in urls):
        yield "placeholders for addresses"
    if len(set(urls)) < len(urls):
        yield "two servers at one address"
    for script, planned in launch.plan.urls.items():
        ports = [p.value("--port") or "none" for p in launch.processes if p.script == script]
        wanted = [host_and_port(url)[1] for url in planned]
        if planned and ports and sorted(ports) != sorted(wanted):
            yield f"{script} listens on {', '.join(ports)}, and is asked on {', '.join(wanted)}"
    for process in launch.processes:
        port = process.json("--kv-transfer-config").get("kv_port")
        if str(port).isdecimal() and int(str(port)[:6]) in _MOONCAKE_PORTS:
            yield f"kv_port {port} of {process.script} is Mooncake's own"


def _ranks(launch: Launch, role: str) -> Iterator[str]:
    """Each rank once, as many as every one of them says, and one place where they meet."""
    processes = launch.of_role(role)
    for what, flags in {
        "addresses": ("--data-parallel-address", "--dist-init-addr"),
        "ports": ("--data-parallel-rpc-port",),
    }.items():
        said = sorted({p.value(*flags) or "none" for p in processes})
        if len(said) > 1:
            yield f"{role} nodes meet at {len(said)} {what}: {', '.join(said)}"
    ranks = sorted(p.number("--data-parallel-rank", "--node-rank", default=-1) for p in processes)
    if len(processes) > 1 and ranks != list(range(len(processes))):
        yield f"ranks of {role} are {ranks}"
    first = next((p for p in processes if p.number("--data-parallel-rank", "--node-rank") == 0), None)
    own = launch.plan.host_of(first.script) if first else None
    meeting = first and first.value("--data-parallel-address", "--dist-init-addr")
    if own and meeting and _is_other(host := meeting.partition(":")[0], own):
        yield f"{role} nodes meet at {host}, and rank 0 is at {own}"
    count = "--nnodes" if launch.plan.engine == "sglang" else "--data-parallel-size"
    wrong = sorted({p.number(count) for p in processes} - {len(processes)})
    if wrong:
        yield f"{count} of {role} is {', '.join(map(str, wrong))}, and {len(processes)} are started"


def _own_host(launch: Launch, process: Process) -> Iterator[str]:
    """It listens where it is asked, and tells others its own address."""
    own = launch.plan.host_of(process.script)
    name = process.script
    # SGLang listens on 127.0.0.1 where nothing is said.
    listens = process.value("--host") or ("127.0.0.1" if launch.plan.engine == "sglang" else "")
    if launch.plan.spread and is_loopback(listens):
        yield f"{name} listens on {listens}, where no other host reaches it"
    elif own and listens not in _ALL_INTERFACES and not is_loopback(listens) and _is_other(listens, own):
        yield f"{name} listens on {listens}, and is asked on {own}"
    if own is None:
        return
    for variable in _OWN_ADDRESS:
        said = process.variables.get(variable, own)
        if _is_other(said, own):
            yield f"{variable} of {name} is {said}, and its node is {own}"
    if launch.plan.engine == "longspan" and process.role != "server" and launch.plan.spread:
        told = process.variables.get(_OWN_ADDRESS[0])
        if told is None and listens in _ALL_INTERFACES:
            yield f"{name} has no {_OWN_ADDRESS[0]}, so the other side can't reach it"


def _is_other(said: str, own: str) -> bool:
    """Whether it is another node for sure: a name may stand for an address, a variable for anything."""
    if "$" in said or said == own or (is_loopback(said) and is_loopback(own)):
        return False
    return is_loopback(said) or _is_ip(said) == _is_ip(own)


def _is_ip(host: str) -> bool:
    return re.fullmatch(r"[0-9.]+", host) is not None or ":" in host


class _Worker(BaseModel):
    url: str
    worker_type: str


class _Workers(BaseModel):
    workers: list[_Worker]


def check_routers(where: str, launch: Launch) -> Finding:
    """Each knows every server, for what it is, and no other."""
    count = sum(map(len, launch.plan.urls.values()))
    faults = [fault for router in launch.routers for fault in _router(launch, router)]
    if count > 1 and not launch.routers:
        faults.append(f"no router in front of {count} servers")
    for process in launch.processes:
        port = process.value("--disaggregation-bootstrap-port")
        if port and not any(port in router.flags.get("--prefill", ()) for router in launch.routers):
            faults.append(f"no router knows the bootstrap port {port} of {process.script}")
    fine = ", ".join(router.name for router in launch.routers) or "none needed for one server"
    return judge_faults(where, "routers", faults, fine, WRITE_AGAIN)


def _router(launch: Launch, router: Router) -> Iterator[str]:
    flag = _SPLIT_FLAGS.get(router.program)
    if launch.plan.split_in_two and flag and flag not in router.flags:
        yield f"{router.name} has no {flag}"
    wanted = {url: role for role in ROLES for url in launch.plan.urls_of(role)}
    try:
        named = list(_named(router))
    except OSError:
        yield f"{router.discovery}, which {router.name} reads, can't be read"
        return
    except ValidationError as error:
        yield f"{router.discovery} is no list of workers: {faults_of(error)}"
        return
    for role, url in named:
        if url not in wanted:
            yield f"{router.name} sends to {url}, which is no server of this plan"
        elif role != wanted[url]:
            yield f"{router.name} takes {url} for a {role} server, and it is {wanted[url]}"
    missing = [url for url in wanted if url not in {known for _, known in named}]
    if missing:
        yield f"{router.name} does not know {', '.join(missing)}"


def _named(router: Router) -> Iterator[tuple[str, str]]:
    """(role, address) of the servers it sends to. Raises OSError or ValidationError for its file."""
    flags = router.flags
    for role, name in {"server": "--worker-urls", "prefill": "--prefill", "decode": "--decode"}.items():
        yield from ((role, word.rstrip("/")) for word in flags.get(name, ()) if "://" in word)
    for role, name in {"prefill": "--prefiller", "decode": "--decoder"}.items():
        pairs = zip(flags.get(f"{name}-hosts", ()), flags.get(f"{name}-ports", ()), strict=False)
        yield from ((role, f"http://{host}:{port}") for host, port in pairs)
    if router.discovery:
        for worker in _Workers.model_validate_json(router.discovery.read_bytes()).workers:
            yield _WORKER_TYPES.get(worker.worker_type, worker.worker_type), worker.url.rstrip("/")
