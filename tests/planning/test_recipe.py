"""Launch scripts: flags that exist, shells that accept them, roles and addresses that fit together."""

from __future__ import annotations

import json
import shlex
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from longspan.errors import CapacityError
from longspan.planning.engines import load_engine, router_flags
from longspan.planning.hardware import bundled
from longspan.planning.launched import _commands
from longspan.planning.models import load_model_config
from longspan.planning.plan import make_plan
from longspan.planning.recipe import Recipe, make_recipe

K31 = load_model_config("kimi-k3.1-pro")
CASES = [
    ("atlas-800-a3", "longspan", 8, "4p4d", "w4a8"),
    ("atlas-800-a3", "vllm-ascend", 8, "4p4d", "w4a8"),
    ("atlas-800-a3", "sglang", 8, "4p4d", "w4a8"),
    ("atlas-800-a3", "vllm-ascend", 4, "plain", "w4a8"),
    ("ascend-950dt", "vllm-ascend", 8, "4p4d", "w4a8"),
    ("ascend-950dt", "sglang", 8, "plain", "mxfp4"),
    ("h200x8", "sglang", 4, "2p2d", "mxfp4"),
    ("h200x8", "longspan", 2, "plain", "mxfp4"),
    ("epyc-2s", "longspan", 2, "1p1d", "mxfp4"),
    ("epyc-2s", "longspan", 1, "plain", "mxfp4"),
]


def recipe_of(
    hardware: str, engine: str, nodes: int, topology: str, scheme: str, hosts: tuple[str, ...] = ()
) -> Recipe:
    machine = bundled()[hardware]
    plan = make_plan(
        "k31", K31, machine, load_engine(engine), nodes=nodes, context=2**20, scheme=scheme, topology=topology
    )
    return make_recipe(plan, hosts)


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_scripts_say_nothing_that_no_source_has(case: tuple) -> None:
    engine = load_engine(case[1])
    for script in recipe_of(*case).scripts:
        flags = {flag for flag, _ in script.flags}
        assert flags <= set(router_flags() if script.role == "router" else engine.flags), script.name
        variables = set(script.variables) | {v for command in script.commands for v in command.variables}
        assert variables <= {"MODEL_PATH", *engine.variables}, script.name


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_bash_accepts_every_script(case: tuple, tmp_path: Path) -> None:
    recipe_of(*case).write(tmp_path)
    for script in tmp_path.glob("*.sh"):
        assert subprocess.run(["bash", "-n", script], capture_output=True).returncode == 0
        assert script.stat().st_mode & 0o111


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_every_device_of_every_node_has_its_rank(case: tuple) -> None:
    hardware, engine, nodes, _, _ = case
    recipe = recipe_of(*case)
    devices = bundled()[hardware].devices
    for role in ("server", "prefill", "decode"):
        scripts = [script for script in recipe.scripts if script.role == role]
        if not scripts:
            continue
        flags = [dict(command.flags) for script in scripts for command in script.commands]
        if engine == "sglang":
            assert all(int(str(each["--tp-size"])) == len(scripts) * devices for each in flags)
            assert [each.get("--node-rank", "0") for each in flags] == [str(n) for n in range(len(scripts))]
            continue
        tensor = {int(str(each["--tensor-parallel-size"])) for each in flags}
        assert len(tensor) == 1 and tensor.pop() * len(flags) == len(scripts) * devices
        ranks = [int(str(each.get("--data-parallel-rank", 0))) for each in flags]
        assert ranks == list(range(len(flags)))
        assert len({each.get("--data-parallel-address") for each in flags}) == 1
    assert sum(script.role != "router" for script in recipe.scripts) == nodes


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_no_two_servers_share_an_address_and_routers_know_them_all(case: tuple) -> None:
    recipe = recipe_of(*case)
    urls = [url for script in recipe.scripts for url in script.urls]
    assert urls and max(Counter(urls).values()) == 1
    texts = [script.text() for script in recipe.scripts if script.role == "router"]
    assert bool(texts) == (len(urls) > 1)
    for text in texts:
        known = text + "".join(recipe.others.values()) if "--discovery-file" in text else text
        for url in urls:
            host, _, port = url.removeprefix("http://").rpartition(":")
            assert url in known or (host in known and port in known)


def test_sides_of_a_split_are_a_producer_and_a_consumer() -> None:
    for script in recipe_of("atlas-800-a3", "vllm-ascend", 8, "4p4d", "w4a8").scripts:
        for command in script.commands:
            if script.role == "router":
                continue
            config = json.loads(str(dict(command.flags)["--kv-transfer-config"]))
            assert config["kv_role"] == {"prefill": "kv_producer", "decode": "kv_consumer"}[script.role]
    for script in recipe_of("epyc-2s", "longspan", 2, "1p1d", "mxfp4").scripts:
        if script.role != "router":
            assert dict(script.flags)["--role"] == script.role
    for script in recipe_of("h200x8", "sglang", 4, "2p2d", "mxfp4").scripts:
        if script.role != "router":
            assert dict(script.flags)["--disaggregation-mode"] == script.role


def test_processes_of_one_cpu_node_get_sockets_of_their_own() -> None:
    config, machine = load_model_config("kimi-linear"), bundled()["epyc-2s"]
    plan = make_plan(
        "kl",
        config,
        machine,
        load_engine("longspan"),
        nodes=1,
        context=2**17,
        scheme="bf16",
        topology="plain",
    )
    assert plan.sides[0].fit.split.tensor == 1
    commands = make_recipe(plan).scripts[0].commands
    assert [command.head[:2] for command in commands] == [
        ("numactl", f"--cpunodebind={socket}") for socket in (0, 1)
    ]


def test_both_sides_of_vllm_ascend_know_the_sizes_of_the_other() -> None:
    recipe = recipe_of("atlas-800-a3", "vllm-ascend", 8, "4p4d", "w4a8")
    configs = {
        json.dumps(json.loads(str(dict(script.flags)["--kv-transfer-config"]))["kv_connector_extra_config"])
        for script in recipe.scripts
        if script.role != "router"
    }
    assert len(configs) == 1


def test_given_addresses_are_used_prefill_first() -> None:
    hosts = tuple(f"10.0.0.{n}" for n in range(1, 5))
    recipe = recipe_of("h200x8", "sglang", 4, "2p2d", "mxfp4", hosts)
    text = "".join(script.text() for script in recipe.scripts)
    assert "192.0.2." not in text
    decode = next(script for script in recipe.scripts if script.name == "decode-0.sh")
    assert decode.urls == ("http://10.0.0.3:8200",)
    with pytest.raises(CapacityError, match="3 addresses were given for 4 nodes"):
        recipe_of("h200x8", "sglang", 4, "2p2d", "mxfp4", hosts[:3])


def test_what_is_read_back_is_what_was_written() -> None:
    recipe = recipe_of("atlas-800-a3", "vllm-ascend", 8, "4p4d", "w4a8")
    for script in recipe.scripts:
        read = _commands(script.text())
        assert len(read) == len(script.commands)
        for flags, command in zip(read, script.commands, strict=True):
            assert list(flags) == list(dict.fromkeys(flag for flag, _ in command.flags))
            transfer = flags.get("--kv-transfer-config")
            assert transfer is None or json.loads(transfer[0])


def test_variables_stay_for_the_shell_and_all_else_is_quoted() -> None:
    text = recipe_of("atlas-800-a3", "vllm-ascend", 4, "plain", "w4a8").scripts[0].text()
    assert 'export HCCL_SOCKET_IFNAME="${NIC:-eth0}"' in text
    assert shlex.quote('{"cudagraph_mode":"FULL_DECODE_ONLY"}') in text
