"""The scripts that `longspan plan` writes for our plugin, read by vLLM's own parser."""

from __future__ import annotations

import pytest
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

from longspan.planning.engines import load_engine
from longspan.planning.hardware import bundled
from longspan.planning.models import load_model_config
from longspan.planning.plan import make_plan
from longspan.planning.recipe import make_recipe
from longspan.plugin_vllm.cluster import take_role


@pytest.mark.parametrize(
    ("hardware", "nodes", "topology", "scheme"),
    [("epyc-2s", 2, "1p1d", "mxfp4"), ("atlas-800-a3", 8, "4p4d", "w4a8"), ("h200x8", 2, "plain", "mxfp4")],
)
def test_vllm_takes_every_flag(hardware: str, nodes: int, topology: str, scheme: str) -> None:
    config, machine = load_model_config("kimi-k3.1-pro"), bundled()[hardware]
    plan = make_plan(
        "k31",
        config,
        machine,
        load_engine("longspan"),
        nodes=nodes,
        context=2**20,
        scheme=scheme,
        topology=topology,
    )
    parser = make_arg_parser(FlexibleArgumentParser())
    for script in make_recipe(plan).scripts:
        if script.role == "router":
            continue
        for command in script.commands:
            words = [w for flag, value in command.flags for w in (flag, value) if w is not None]
            role, words = take_role([str(word) for word in words])
            assert role == (None if script.role == "server" else script.role)
            parsed = parser.parse_args(words)
            split = next(side.fit.split for side in plan.sides if side.role == script.role)
            assert parsed.tensor_parallel_size == split.tensor
            assert parsed.decode_context_parallel_size == split.context
            assert parsed.max_model_len == 2**20
