"""Which split is chosen and why; what is refused; the document whose numbers can't drift."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from support.plan_command import CASE, run

from longspan.config import load_config
from longspan.errors import CapacityError, ConfigError
from longspan.memory.sizes import bytes_per_token
from longspan.planning.derivation import Line, derive, scheme_text
from longspan.planning.engines import load_engine
from longspan.planning.hardware import bundled
from longspan.planning.models import load_model_config
from longspan.planning.plan import Plan, Workload, fit_of, make_plan
from longspan.planning.schemes import SCHEMES
from longspan.planning.split import Split, legal_splits
from longspan.planning.topology import parse_topology
from longspan.planning.traffic import decode_reads, handoff_bytes, received_per_token
from longspan.plugin_vllm.policy import default_block_size

DOCS = Path(__file__).parents[2] / "docs"
K31 = load_model_config("kimi-k3.1-pro")


@pytest.mark.parametrize(
    ("name", "file"),
    [("kimi-k3.1-pro", "k31-pro"), ("kimi-k3", "k3"), ("kimi-linear", "kimi-linear")],
)
def test_bundled_configs_are_the_published_ones(name: str, file: str, data_dir: Path) -> None:
    assert load_model_config(name) == load_config(data_dir / "configs" / f"{file}.json")


def plan_of(hardware: str, nodes: int, **options: object) -> Plan:
    defaults: dict = {"context": 2**20, "scheme": "mxfp4", "topology": "plain"}
    engine = load_engine(str(options.pop("engine", "longspan")))
    return make_plan("k31", K31, bundled()[hardware], engine, nodes=nodes, **(defaults | options))


def test_the_document_of_the_eight_node_case_is_what_the_command_prints(capsys) -> None:
    assert run(*CASE, "--markdown") == 0
    assert capsys.readouterr().out == (DOCS / "plan-4p4d-1m.md").read_text()


@pytest.mark.parametrize(
    ("hardware", "nodes", "options"),
    [
        ("epyc-2s", 1, {}),
        ("h200x8", 4, {"topology": "2p2d"}),
        ("ascend-950dt", 8, {"scheme": "w4a8", "topology": "4p4d", "engine": "vllm-ascend"}),
        ("atlas-900-a3", 8, {"scheme": "w8a8", "index_key_dtype": "int8", "engine": "sglang"}),
    ],
)
def test_every_number_of_a_document_is_what_its_formula_gives(
    hardware: str, nodes: int, options: dict
) -> None:
    assert derive(plan_of(hardware, nodes, **options)).count("| result |") >= 3


def test_a_document_can_be_made_of_a_model_without_indexer_and_latent() -> None:
    config = load_model_config("kimi-linear")
    hardware, engine = bundled()["epyc-2s"], load_engine("longspan")
    plan = make_plan("kl", config, hardware, engine, nodes=1, context=4096, scheme="bf16", topology="plain")
    assert "index key" not in derive(plan)


def test_a_formula_that_does_not_give_the_number_is_an_error() -> None:
    Line("x", "a * b", "1,000 * 2", 2000).check()
    with pytest.raises(ConfigError, match="x: 1,000"):
        Line("x", "a * b", "1,000 * 2", 2003).check()


def test_the_chosen_split_is_the_fastest_of_all_that_fit() -> None:
    plan = plan_of("atlas-800-a3", 4, scheme="w4a8")
    (side,) = plan.sides
    chosen = side.fit
    assert chosen.sequences > 0
    for split in legal_splits(K31, 4, 16):
        other = fit_of(plan.workload, split, chosen.step_tokens)
        assert chosen.seconds_per_token <= other.seconds_per_token + 1e-12, split
    assert chosen.cache_room >= chosen.sequences * chosen.memory.sequence_bytes(2**20)


def test_prefill_and_decode_share_tp_and_dcp_for_states_go_rank_to_rank() -> None:
    prefill, decode = plan_of("atlas-800-a3", 8, scheme="w4a8", topology="4p4d").sides
    assert (prefill.role, decode.role) == ("prefill", "decode")
    for size in ("tensor", "context"):
        assert getattr(prefill.fit.split, size) == getattr(decode.fit.split, size)
    assert prefill.fit.split.devices == decode.fit.split.devices == 64


@pytest.mark.parametrize(("topology", "partial"), [("4p4d", False), ("plain", True)])
def test_in_a_split_dcp_takes_the_tensor_group_or_none(topology: str, partial: bool) -> None:
    """NIXL hands over no other."""
    side = plan_of("atlas-800-a3", 8, scheme="w4a8", topology=topology).sides[-1]
    weighed = re.findall(r"TP (\d+), DP \d+, EP \d+, DCP (\d+)", " ".join(side.reasons))
    assert weighed
    assert any(context not in ("1", tensor) for tensor, context in weighed) == partial


def test_sides_of_unlike_size_share_what_fits_both() -> None:
    prefill, decode = plan_of("ascend-950dt", 8, scheme="w4a8", topology="3p5d").sides
    assert prefill.fit.split.devices == 24 and decode.fit.split.devices == 40
    assert prefill.fit.split.context == decode.fit.split.context
    with pytest.raises(CapacityError, match="can't prefill"):
        plan_of("atlas-800-a3", 8, scheme="w4a8", topology="1p7d")


def test_long_contexts_on_small_devices_need_dcp() -> None:
    (side,) = plan_of("atlas-800-a3", 4, scheme="w4a8").sides
    assert side.fit.split.context > 1
    assert any("and not 1: " in reason and "no sequence fits" in reason for reason in side.reasons)


def test_an_engine_without_dcp_for_sparse_attention_gets_none_and_says_why() -> None:
    (side,) = plan_of("ascend-950dt", 8, scheme="w4a8", engine="vllm-ascend").sides
    assert side.fit.split.context == 1
    assert any("not supported on Ascend 950" in reason for reason in side.reasons)
    (free,) = plan_of("ascend-950dt", 8, scheme="w4a8").sides
    assert free.fit.split.context > 1


def test_engines_whose_ranks_need_as_many_experts_get_splits_that_give_them() -> None:
    uneven = plan_of("atlas-800-a3", 3, scheme="w4a8", engine="vllm-ascend").sides[0].fit.split
    assert 896 % uneven.expert
    with pytest.raises(CapacityError, match="Give this side 4 nodes"):
        plan_of("atlas-800-a3", 3, scheme="w4a8", engine="sglang")


@pytest.mark.parametrize(("model", "scheme"), [("kimi-k3.1-pro", "mxfp4"), ("kimi-linear", "bf16")])
@pytest.mark.parametrize("split", [Split(), Split(2, context=2)], ids=str)
def test_pages_of_our_plugin_are_its_blocks_which_have_room_for_a_state(
    model: str, scheme: str, split: Split
) -> None:
    config = load_model_config(model)
    workload = Workload(config, bundled()["epyc-2s"], load_engine("longspan"), SCHEMES[scheme], 4096)
    memory = fit_of(workload, split, 512).memory
    assert memory.page_tokens == default_block_size(config, split.tensor, 2)
    kda_layers = config.num_layers - len(config.full_attention_layers)
    pages = memory.page_tokens * bytes_per_token(config).total
    assert memory.page_bytes == max(pages, memory.state_per_sequence // kda_layers)
    assert memory.page_bytes < 1.1 * pages


def test_whole_index_keys_cost_sequences() -> None:
    sharded = plan_of("atlas-800-a3", 8, scheme="w4a8").sides[0].fit
    whole = plan_of("atlas-800-a3", 8, scheme="w4a8", engine="vllm-ascend").sides[0].fit
    assert whole.sequences * whole.split.data < sharded.sequences * sharded.split.data


@pytest.mark.parametrize(
    ("hardware", "split", "context", "fits"),
    [
        ("atlas-800-a3", Split(16, 4), 131_072, True),  # four nodes, DP 4, TP 16, EP 64
        ("atlas-800-a3", Split(16, 4), 2**20, False),  # "at least eight nodes" for 1 M
        ("atlas-800-a3", Split(16, 8), 2**20, True),
        ("atlas-800-a2", Split(8, 8), 262_144, True),  # eight nodes of eight, DP 8, TP 8, EP 64, up to 256 K
        ("atlas-800-a2", Split(8, 4), 131_072, False),
        ("ascend-950dt", Split(8, 4), 131_072, True),  # four nodes, DP 4, TP 8, EP 32
    ],
)
def test_memory_agrees_with_what_the_vendor_validated_for_k3(
    hardware: str, split: Split, context: int, fits: bool
) -> None:
    """Topologies of vLLM Ascend's guide to Kimi K3 in W4A8, which has no DCP."""
    k3, engine = load_model_config("kimi-k3"), load_engine("vllm-ascend")
    workload = Workload(k3, bundled()[hardware], engine, SCHEMES["w4a8"], context)
    assert (fit_of(workload, split, step_tokens=512).sequences > 0) == fits


def test_too_few_nodes_are_refused_with_how_many_would_do() -> None:
    with pytest.raises(CapacityError) as refused:
        plan_of("h200x8", 1)
    nodes = re.search(r"Give this side (\d+) nodes", str(refused.value))
    assert nodes
    assert plan_of("h200x8", int(nodes[1])).sides[0].fit.sequences > 0


@pytest.mark.parametrize("nodes", [113, 100_000])
def test_too_many_nodes_are_refused_with_the_most_that_get_experts(nodes: int) -> None:
    with pytest.raises(CapacityError, match=f"Give this side 112 nodes: experts can't be dealt over {nodes}"):
        plan_of("h200x8", nodes)
    assert plan_of("h200x8", 112).sides[0].fit.split.experts_of_rank(896) == 1


def test_a_context_that_does_not_fit_is_refused_with_the_longest_that_does() -> None:
    for hardware, options in {"atlas-800-a3": {"nodes": 2, "scheme": "w4a8"}, "h200x8": {"nodes": 1}}.items():
        with pytest.raises(CapacityError) as refused:
            plan_of(hardware, engine="sglang", **options)
        context = re.search(r"--context (\d+)", str(refused.value.remedy))
        assert bool(context) == (hardware == "atlas-800-a3")  # one H200 node can't even hold the weights
        if context:
            plan_of(hardware, engine="sglang", context=int(context[1]), **options)
            with pytest.raises(CapacityError):
                plan_of(hardware, engine="sglang", context=int(context[1]) + 1, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"context": 2**20 + 1}, "made for 1048576"),
        ({"context": 0}, "made for 1048576"),
        ({"topology": "4p3d"}, "--nodes 7"),
        ({"topology": "0p8d"}, "is no topology"),
        ({"topology": "mixed"}, "is no topology"),
    ],
)
def test_what_makes_no_sense_is_refused_with_what_would(options: dict, message: str) -> None:
    with pytest.raises(CapacityError, match=message):
        plan_of("ascend-950dt", 8, **options)


def test_a_model_is_not_planned_in_a_form_it_has_not() -> None:
    linear, hardware = load_model_config("kimi-linear"), bundled()["epyc-2s"]
    common: dict = {"nodes": 1, "context": 4096, "topology": "plain"}
    with pytest.raises(CapacityError, match="--scheme bf16"):
        make_plan("kl", linear, hardware, load_engine("longspan"), scheme="mxfp4", **common)
    with pytest.raises(CapacityError, match="no sparse indexer"):
        make_plan(
            "kl", linear, hardware, load_engine("longspan"), scheme="bf16", index_key_dtype="int8", **common
        )


@pytest.mark.parametrize(("hardware", "said"), [("ascend-950dt", "MXFP4"), ("atlas-800-a3", "INT4")])
def test_what_is_said_of_weights_is_true_of_the_hardware(hardware: str, said: str) -> None:
    line = scheme_text(plan_of(hardware, 8, scheme="w4a8").workload)
    assert said in line and ("assumed" in line) == (said == "INT4")
    assert said == "INT4" or "INT4" not in line


def test_topologies() -> None:
    assert [(s.role, s.nodes) for s in parse_topology("plain", 3)] == [("server", 3)]
    assert [(s.role, s.nodes) for s in parse_topology("1P2D", 3)] == [("prefill", 1), ("decode", 2)]


def test_bytes_received_are_those_of_the_formula() -> None:
    received = received_per_token(K31, Split(16, 4, 16), 2**20)
    assert received.candidates == 24 * 15 * 2048 * 8
    assert received.outputs == 24 * 15 / 16 * 96 * 513 * 4
    half = received_per_token(K31, Split(16, 4, 8), 2**20)
    assert half.outputs == 24 * 7 / 8 * 48 * 513 * 4
    alone = received_per_token(K31, Split(), 2**20)
    assert alone.total == 0
    assert received_per_token(K31, Split(16, 4, 16), 2048).candidates == 0
    assert received_per_token(K31, Split(16, 4, 16), 2049).candidates == 24 * 15 * 129 * 8


@pytest.mark.parametrize("context", [1, 2047, 2048, 2049])
def test_index_keys_are_read_only_where_there_is_a_choice(context: int) -> None:
    plan = plan_of("epyc-2s", 1)
    fit = plan.sides[0].fit
    reads = decode_reads(K31, fit.split, fit.memory, sequences=1, context=context)
    assert (reads.index > 0) == (context > 2048)
    assert reads.latent == 24 * 576 * 2 * min(context, 2048) / fit.split.context


def test_a_batch_of_everything_reads_all_experts_once() -> None:
    fit = plan_of("epyc-2s", 1).sides[0].fit
    reads = decode_reads(K31, fit.split, fit.memory, sequences=100_000, context=1)
    assert reads.experts == pytest.approx(fit.memory.weights["routed experts"])
    one = decode_reads(K31, replace(fit.split), fit.memory, sequences=1, context=1)
    assert one.experts == pytest.approx(fit.memory.weights["routed experts"] * 16 / 896)


def test_a_request_hands_over_its_state_and_33_kb_a_token() -> None:
    assert handoff_bytes(K31, 0) == (449_372_160, 0)
    assert handoff_bytes(K31, 1)[1] == 27_648 + 6_144
    assert handoff_bytes(K31, 1, index_key_dtype="int8")[1] == 27_648 + 24 * 132


def test_json_has_the_documented_fields(capsys) -> None:
    assert run(*CASE, "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert {"model", "family", "engine", "scheme", "context", "topology", "nodes", "hardware", "sides"} < set(
        report
    )
    assert [side["role"] for side in report["sides"]] == ["prefill", "decode"]
    memory = report["sides"][1]["memory"]
    assert sum(memory["weights"].values()) == memory["weights_total"]
    assert set(report["engines"]) == {"vllm-ascend", "sglang", "longspan"}
    assert report["hardware"]["numbers"]["network_gb_s"]["assumed"]


def test_tables_say_what_is_assumed_and_who_can_run_it(capsys) -> None:
    assert run(*CASE) == 0
    out = capsys.readouterr().out
    for part in (
        "PREFILL: 4 nodes",
        "DECODE: 4 nodes",
        "routed experts",
        "KDA states",
        "network: candidates",
    ):
        assert part in out
    assert "assumed: network_gb_s 25" in out
    assert "Start vllm-ascend or sglang on this hardware." in out


def test_a_checkpoint_directory_can_be_planned_for(tiny_dir: Path, capsys) -> None:
    assert run(tiny_dir, "--context", 4096, "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["model"], report["hardware"]["name"]) == (tiny_dir.name, "epyc-2s")


def test_a_document_names_the_command_that_makes_it(tiny_dir: Path, capsys) -> None:
    assert run(tiny_dir, "--context", 4096, "--index-key-dtype", "int8", "--markdown") == 0
    page = capsys.readouterr().out
    command = re.search(r"`longspan plan (.*)` writes this page", page)
    assert command and run(*command[1].split()) == 0
    assert capsys.readouterr().out == page


def test_a_document_and_scripts_can_be_written_at_once(tmp_path: Path, capsys) -> None:
    assert run("kimi-linear", "--context", 4096, "--markdown", "--output", tmp_path) == 0
    assert capsys.readouterr().out.startswith("# kimi-linear")
    assert (tmp_path / "longspan" / "server-0.sh").is_file()


@pytest.mark.parametrize(
    "arguments",
    [
        ["--engine", "vllm-ascend"],
        ["--hosts", "10.0.0.1,10.0.0.2"],
        ["--index-key-dtype", "int8", "--output", "never-written"],
        ["nowhere"],
        ["--hardware", "abacus"],
    ],
)
def test_what_is_unknown_is_refused(arguments: list[str]) -> None:
    with pytest.raises((CapacityError, ConfigError)):
        run(*arguments)
