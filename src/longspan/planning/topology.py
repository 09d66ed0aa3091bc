"""Who does what, and where: `plain` (every node both), or `4p4d` (so many nodes prefill, so many decode).

Addresses are host names or IPv4: scripts listen on 0.0.0.0, and not every engine's router takes IPv6.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from ipaddress import AddressValueError, IPv4Address, IPv6Address

from longspan.errors import CapacityError


@dataclass(frozen=True)
class Side:
    """Nodes of one role, which are one instance of the model."""

    role: str  # server, prefill or decode
    nodes: int


def parse_topology(text: str, nodes: int) -> tuple[Side, ...]:
    """Raises CapacityError if it is none, or needs another number of nodes."""
    if text == "plain":
        return (Side("server", nodes),)
    match = re.fullmatch(r"([1-9][0-9]*)p([1-9][0-9]*)d", text.lower())
    if not match:
        raise CapacityError(
            f"{text!r} is no topology.", remedy="Give plain, or prefill and decode nodes as in 4p4d."
        )
    prefill, decode = int(match[1]), int(match[2])
    if prefill + decode != nodes:
        raise CapacityError(
            f"{text} is {prefill + decode} nodes, but --nodes is {nodes}.",
            remedy=f"Give --nodes {prefill + decode}, or another topology.",
        )
    return Side("prefill", prefill), Side("decode", decode)


def parse_hosts(text: str, nodes: int) -> list[str]:
    """An address for each node, prefill first, of `A,B`. Raises CapacityError for what no script can use."""
    hosts = [host.strip() for host in text.split(",")]
    for host in hosts:
        if fault := _fault(host):
            raise CapacityError(
                f"--hosts has {host!r}: {fault}.",
                remedy="Give host names or IPv4 addresses alone, as in 10.0.0.1,10.0.0.2.",
            )
    if twice := sorted({host for host in hosts if [h.lower() for h in hosts].count(host.lower()) > 1}):
        raise CapacityError(f"--hosts has {twice[0]} twice.", remedy="Give each node an address of its own.")
    if len(hosts) != nodes:
        raise CapacityError(
            f"{len(hosts)} addresses were given for {nodes} nodes.", remedy="Give one for each node."
        )
    return hosts


def _fault(host: str) -> str:
    if not host:
        return "an address is empty"
    if ":" in host:
        try:
            IPv6Address(host.removeprefix("[").removesuffix("]").partition("%")[0])
        except AddressValueError:
            return "ports and schemes are not part of it, the plan gives each server its port"
        return "servers listen on IPv4"
    if re.fullmatch(r"[0-9.]+", host):
        try:
            return "it is no address of one node" if IPv4Address(host).is_unspecified else ""
        except AddressValueError:
            return "it is no IPv4 address"
    return "" if re.fullmatch(r"[A-Za-z0-9_]([A-Za-z0-9._-]*[A-Za-z0-9_])?", host) else "it is no host name"
