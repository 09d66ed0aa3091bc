"""The go-live list: what passes, and every way to fail it."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from support.plan_command import CASE, run

from longspan.planning.check import check_targets
from longspan.planning.finding import Finding
from longspan.planning.launched import whole_number

HOSTS = ",".join(f"10.0.0.{n}" for n in range(1, 9))


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Scripts of all engines for the eight-node case, with real addresses."""
    directory = tmp_path_factory.mktemp("plan")
    assert run(*CASE, "--json", "--hosts", HOSTS, "--output", directory) == 0
    return directory


@pytest.fixture
def launch(written: Path, tmp_path: Path) -> Path:
    """A copy of them to spoil."""
    return shutil.copytree(written, tmp_path / "plan")


def findings_of(directory: Path, accuracy: Path | None = None) -> dict[str, Finding]:
    return {finding.point: finding for finding in check_targets([str(directory)], accuracy)}


def edit(directory: Path, pattern: str, change: Callable[[str], str]) -> None:
    for file in directory.glob(pattern):
        file.write_text(change(file.read_text()))


@pytest.mark.parametrize("engine", ["longspan", "vllm-ascend", "sglang"])
def test_fresh_scripts_pass_all_but_what_only_people_and_servers_know(engine: str, launch: Path) -> None:
    findings = findings_of(launch / engine)
    unknown = {point for point, finding in findings.items() if finding.status == "unknown"}
    assert unknown == {"accuracy regression", "health and metrics"}
    assert {f.status for point, f in findings.items() if point not in unknown} == {"pass"}
    assert all(findings[point].remedy for point in unknown)


def test_a_directory_of_engines_is_checked_engine_by_engine(launch: Path) -> None:
    findings = check_targets([str(launch)])
    assert len({finding.where for finding in findings}) == 4  # and the servers nobody named


def test_placeholders_fail(tmp_path: Path) -> None:
    case = ["--hardware", "h200x8", "--nodes", "4", "--topology", "2p2d", "--json"]
    run(*case, "--output", tmp_path)
    finding = findings_of(tmp_path / "sglang")["addresses"]
    assert finding.status == "fail" and "--hosts" in finding.remedy


DCP = "DCP for long contexts"


def drop(flag: str) -> Callable[[str], str]:
    return lambda text: re.sub(rf"^    {flag}.*\n", "", text, flags=re.M)


def put(old: str, new: str) -> Callable[[str], str]:
    def change(text: str) -> str:
        assert old in text
        return text.replace(old, new)

    return change


def swap(one: str, other: str) -> Callable[[str], str]:
    def change(text: str) -> str:
        assert one in text and other in text
        return text.replace(one, "\0").replace(other, one).replace("\0", other)

    return change


@pytest.mark.parametrize(
    ("engine", "pattern", "change", "point"),
    [
        ("longspan", "decode-2.sh", drop("--decode-context-parallel-size"), "DCP for long contexts"),
        ("longspan", "decode-2.sh", drop("--decode-context-parallel-size"), "roles"),
        ("sglang", "*-?.sh", drop("--dcp-size"), "DCP for long contexts"),
        ("longspan", "prefill-0.sh", drop("--enable-prefix-caching"), "prefix cache"),
        (
            "vllm-ascend",
            "prefill-0.sh",
            put("--mamba-cache-mode align", "--mamba-cache-mode none"),
            "prefix cache",
        ),
        ("sglang", "decode-0.sh", put("--trust-remote-code", "--disable-radix-cache"), "prefix cache"),
        (
            "sglang",
            "prefill-*.sh",
            put("--chunked-prefill-size", "--chunked-prefill-size -1 --x"),
            "chunked prefill",
        ),
        ("longspan", "decode-0.sh", put("--enable-chunked", "--no-enable-chunked"), "chunked prefill"),
        ("longspan", "prefill-1.sh", put("--role prefill", "--role decode"), "roles"),
        ("longspan", "prefill-1.sh", drop("--role"), "roles"),
        ("vllm-ascend", "prefill-1.sh", put("kv_producer", "kv_consumer"), "roles"),
        ("sglang", "decode-1.sh", put("mode decode", "mode prefill"), "roles"),
        ("longspan", "prefill-1.sh", put("--data-parallel-rank 1", "--data-parallel-rank 0"), "addresses"),
        ("longspan", "decode-0.sh", put("--port 8200", "--port 8100"), "addresses"),
        ("vllm-ascend", "decode-0.sh", put("--port 8201", "--port 8200"), "addresses"),
        ("sglang", "prefill-0.sh", put("8998", "8999"), "routers"),
        ("longspan", "decode-0.sh", put("--block-size 64", "--block-size 32"), "roles"),
        ("longspan", "decode-*.sh", put("--block-size 64", "--block-size 32"), "roles"),
        ("longspan", "decode-0.sh", drop("--enable-expert-parallel"), "roles"),
        ("vllm-ascend", "decode-0.sh", put("--data-parallel-size 8", "--data-parallel-size 2"), "roles"),
        ("longspan", "decode-0.sh", put("-len 1048576", "-len 4096"), "context"),
        ("sglang", "*-?.sh", put("-length 1048576", "-length 262144"), "context"),
        ("longspan", "*-?.sh", put("context-parallel-size 16", "context-parallel-size 32"), DCP),
        ("longspan", "*-?.sh", put("context-parallel-size 16", "context-parallel-size 0"), DCP),
        ("longspan", "*-?.sh", put("context-parallel-size 16", "context-parallel-size 8"), DCP),
        ("sglang", "*-?.sh", put("--dcp-size 4", "--dcp-size 16"), DCP),
        ("longspan", "prefill-1.sh", put("address 10.0.0.1", "address 10.0.0.9"), "addresses"),
        ("longspan", "workers.json", put("10.0.0.7", "10.0.0.9"), "routers"),
        ("sglang", "router.sh", put("10.0.0.5", "10.0.0.9"), "routers"),
        ("vllm-ascend", "router.sh", put("10.0.0.8", "10.0.0.9"), "routers"),
        ("vllm-ascend", "prefill-0.sh", put("36000", "30000"), "addresses"),
        ("vllm-ascend", "prefill-0.sh", drop("--quantization"), "weights fit the hardware"),
        ("sglang", "*-?.sh", drop("--enable-metrics"), "metrics"),
        ("longspan", "plan.json", put('"k3.1"', '"k4"'), ""),
        ("longspan", "plan.json", put('"w4a8"', '"mxfp4"'), "weights fit the hardware"),
        # both sides, where the connector hands over between ranks of one number
        ("longspan", "decode-*.sh", put("tensor-parallel-size 16", "tensor-parallel-size 8"), "roles"),
        ("longspan", "decode-*.sh", put("--dtype bfloat16", "--dtype float32"), "roles"),
        ("vllm-ascend", "decode-*.sh", put("tensor-parallel-size 8", "tensor-parallel-size 16"), "roles"),
        ("longspan", "decode-3.sh", put("name kimi", "name k31"), "roles"),
        ("longspan", "decode-*.sh", put("name kimi", "name k31"), "roles"),
        # as the plan dealt experts
        ("longspan", "*-?.sh", drop("--enable-expert-parallel"), "roles"),
        ("vllm-ascend", "*-?.sh", put("--enable-expert", "--no-enable-expert"), "roles"),
        ("sglang", "*-?.sh", put("--ep-size 64", "--ep-size 8"), "roles"),
        # tokens dealt by blocks
        ("longspan", "prefill-0.sh", put("interleave-size 64", "interleave-size 32"), "blocks"),
        ("longspan", "prefill-0.sh", put("interleave-size 64", "interleave-size 1"), "blocks"),
        ("longspan", "*-?.sh", drop("--block-size"), "blocks"),
        ("longspan", "prefill-0.sh", put("--cp-kv-cache", "--dcp-kv-cache"), "blocks"),
        ("vllm-ascend", "prefill-0.sh", drop("--cp-kv-cache-interleave-size"), "blocks"),
        # ranks that find each other
        ("longspan", "prefill-*.sh", put("data-parallel-size 4", "data-parallel-size 5"), "addresses"),
        ("longspan", "prefill-1.sh", put("rpc-port 13345", "rpc-port 13344"), "addresses"),
        ("sglang", "decode-*.sh", put("--nnodes 4", "--nnodes 2"), "addresses"),
        ("longspan", "prefill-1.sh", put("--host 0.0.0.0", "--host 127.0.0.1"), "addresses"),
        ("sglang", "prefill-1.sh", drop("--host"), "addresses"),
        ("longspan", "prefill-1.sh", put("CHANNEL_HOST=10.0.0.2", "CHANNEL_HOST=10.0.0.1"), "addresses"),
        ("longspan", "prefill-1.sh", put("export VLLM_NIXL", "export XVLLM_NIXL"), "addresses"),
        ("vllm-ascend", "decode-0.sh", put("HCCL_IF_IP=10.0.0.5", "HCCL_IF_IP=10.0.0.6"), "addresses"),
        ("longspan", "prefill-*.sh", put("address 10.0.0.1", "address 10.0.0.2"), "addresses"),
        ("longspan", "prefill-1.sh", put("--host 0.0.0.0", "--host 10.0.0.3"), "addresses"),
        # routers
        ("longspan", "workers.json", swap('"prefill",', '"decode",'), "routers"),
        ("longspan", "workers.json", put("{", "["), "routers"),
        ("longspan", "workers.json", put('"worker_type"', '"type"'), "routers"),
        ("longspan", "router-smg.sh", put("workers.json", "others.json"), "routers"),
        ("longspan", "router-smg.sh", drop("--pd-disaggregation"), "routers"),
        ("longspan", "router-vllm.sh", drop("--vllm-pd-disaggregation"), "routers"),
        (
            "longspan",
            "router-vllm.sh",
            put("--prefill http://10.0.0.1", "--decode http://10.0.0.1"),
            "routers",
        ),
        ("longspan", "router-vllm.sh", put("--decode http", "--decode http://10.0.0.9:8200 http"), "routers"),
        ("vllm-ascend", "router.sh", swap("prefiller", "decoder"), "routers"),
        ("sglang", "router.sh", drop("--pd-disaggregation"), "routers"),
        # values
        ("longspan", "decode-0.sh", put("--max-num-seqs 16", "--max-num-seqs 0"), "values"),
        ("longspan", "decode-0.sh", put("--max-num-seqs 16", "--max-num-seqs 1K"), "values"),
        ("longspan", "decode-0.sh", put("-len 1048576", "-len 1.5M"), "values"),
        ("longspan", "decode-0.sh", put("-len 1048576", "-len auto"), "values"),
        ("longspan", "decode-0.sh", put("-len 1048576", "-len"), "values"),
        ("longspan", "decode-0.sh", put("-len 1048576", "-len $LENGTH"), "values"),
        ("longspan", "decode-0.sh", put("-len 1048576", "-len 64K"), "context"),
        ("longspan", "decode-0.sh", put("-len 1048576", "-len 1m"), "context"),
        ("sglang", "decode-0.sh", put("-length 1048576", "-length 1M"), "values"),
        ("longspan", "decode-0.sh", put("utilization 0.9", "utilization 0"), "values"),
        ("longspan", "decode-0.sh", put("utilization 0.9", "utilization 1.01"), "values"),
        ("longspan", "decode-0.sh", put("utilization 0.9", "utilization nan"), "values"),
        ("longspan", "decode-0.sh", put("utilization 0.9", "utilization most"), "values"),
        ("longspan", "decode-0.sh", put("--dtype", "--kv-cache-dtype fp8 --dtype"), "values"),
        ("longspan", "decode-0.sh", put("port 13346", "port 133460"), "values"),
        ("longspan", "*-?.sh", put("context-parallel-size 16", "context-parallel-size all"), DCP),
    ],
)
def test_each_point_fails_for_its_own_reason(
    engine: str, pattern: str, change: Callable[[str], str], point: str, launch: Path
) -> None:
    edit(launch / engine, pattern, change)
    findings = findings_of(launch / engine)
    failed = {name for name, finding in findings.items() if finding.status == "fail"}
    if not point:
        assert not failed
        return
    assert point in failed
    assert findings[point].remedy
    assert len(failed) <= 2


def test_flags_are_read_in_all_spellings_that_vllm_takes(launch: Path) -> None:
    def respell(text: str) -> str:
        text = text.replace("--tensor-parallel-size", "-tp").replace("--data-parallel-rank", "-dpn")
        text = re.sub(r"--decode-context-parallel-size (\d+)", r"--decode_context_parallel_size=\1", text)
        return text.replace("--mamba-cache-mode align", "--mamba_cache_mode=align")

    edit(launch / "longspan", "*-?.sh", respell)
    assert not [f for f in findings_of(launch / "longspan").values() if f.status == "fail"]


def test_dcp_may_be_off_where_the_plan_found_that_a_rank_holds_the_context(tmp_path: Path) -> None:
    run("kimi-linear", "--hosts", "10.0.0.1", "--json", "--output", tmp_path)
    finding = findings_of(tmp_path)[DCP]
    assert finding.status == "pass" and "as planned" in finding.found


@pytest.mark.parametrize("context", [1, 64, 2048])
def test_what_a_plan_of_a_short_context_writes_passes(context: int, tmp_path: Path) -> None:
    run("kimi-linear", "--context", context, "--hosts", "10.0.0.1", "--json", "--output", tmp_path)
    assert not [f for f in findings_of(tmp_path).values() if f.status == "fail"]


def test_a_missing_script_fails(launch: Path) -> None:
    (launch / "longspan" / "decode-3.sh").unlink()
    assert findings_of(launch / "longspan")["scripts"].found == "decode-3.sh is missing"


def test_scripts_of_another_plan_fail_by_name(launch: Path) -> None:
    stale = launch / "longspan" / "prefill-4.sh"
    stale.write_bytes((launch / "longspan" / "prefill-0.sh").read_bytes())
    failed = [f for f in findings_of(launch / "longspan").values() if f.status == "fail"]
    assert [f.found for f in failed] == ["prefill-4.sh is not of this plan"]
    assert "Delete prefill-4.sh" in failed[0].remedy and "empty directory" in failed[0].remedy


def test_a_script_that_starts_nothing_fails_by_name(launch: Path) -> None:
    (launch / "longspan" / "decode-0.sh").write_text("#!/bin/sh\n")
    assert findings_of(launch / "longspan")["scripts"].found == "decode-0.sh starts no server"


@pytest.mark.parametrize(
    ("engine", "old", "new", "found", "remedy"),
    [
        ("longspan", "size 16", "size 8", "less than TP", "Set it to TP."),
        ("longspan", "size 16", "size 1", "off", "Set it to TP."),
        ("longspan", "size 16", "size 32", "does not divide TP", "Set it to TP."),
        ("longspan", "size 16", "size all", "is all, no whole number", "Set it to TP."),
        ("vllm-ascend", "size 4", "size 3", "does not divide TP", "Set it to a divisor of TP above 1."),
        ("vllm-ascend", "size 4", "size 1", "off", "Set it to a divisor of TP above 1."),
    ],
)
def test_remedies_of_dcp_are_what_the_engine_takes(
    engine: str, old: str, new: str, found: str, remedy: str, launch: Path
) -> None:
    edit(launch / engine, "*-?.sh", put(f"context-parallel-{old}", f"context-parallel-{new}"))
    finding = findings_of(launch / engine)[DCP]
    assert finding.status == "fail" and found in finding.found and finding.remedy == remedy


def test_sizes_are_read_as_vllm_reads_them() -> None:
    sizes = {
        "64k": 64000,
        "64K": 65536,
        "1M": 2**20,
        "1m": 10**6,
        "25.6k": 25600,
        "0": 0,
        "7": 7,
        "2T": 2**41,
    }
    assert {text: whole_number(text) for text in sizes} == sizes
    for text in ("", "K", "1.5K", "1.5", "-1", "64 K", "64Kb", "²", "9" * 5000):
        assert whole_number(text) is None


def test_a_plan_on_one_host_may_listen_on_loopback(tmp_path: Path) -> None:
    run("kimi-linear", "--hosts", "10.0.0.1", "--json", "--output", tmp_path)
    edit(tmp_path / "longspan", "server-0.sh", put("--host 0.0.0.0", "--host 127.0.0.1"))
    assert findings_of(tmp_path)["addresses"].status == "pass"


def test_a_name_may_stand_for_the_address_of_a_node(launch: Path) -> None:
    edit(launch / "longspan", "prefill-1.sh", put("CHANNEL_HOST=10.0.0.2", "CHANNEL_HOST=node2"))
    assert findings_of(launch / "longspan")["addresses"].status == "pass"
    edit(launch / "longspan", "prefill-1.sh", put("CHANNEL_HOST=node2", "CHANNEL_HOST=localhost"))
    assert findings_of(launch / "longspan")["addresses"].status == "fail"


def test_what_many_scripts_have_in_common_is_said_once(launch: Path) -> None:
    edit(launch / "longspan", "decode-*.sh", put("--max-num-seqs 16", "--max-num-seqs 0"))
    names = ", ".join(f"decode-{n}.sh" for n in range(4))
    assert (
        findings_of(launch / "longspan")["values"].found == f"--max-num-seqs is 0, not at least 1, in {names}"
    )


def test_in_a_plain_server_the_interleave_divides_the_block(tmp_path: Path) -> None:
    run("kimi-linear", "--hosts", "10.0.0.1", "--json", "--output", tmp_path)
    script = next((tmp_path / "longspan").glob("server-0.sh"))
    block = re.search(r"--block-size (\d+)", script.read_text())
    assert block
    for interleave, status in (
        (1, "pass"),
        (int(block[1]) // 2, "pass"),
        (int(block[1]), "pass"),
        (7, "fail"),
    ):
        text = re.sub(r" --cp-kv-cache-interleave-size \d+", "", script.read_text())
        script.write_text(text.replace("--block", f"--cp-kv-cache-interleave-size {interleave} --block"))
        assert findings_of(tmp_path)["blocks"].status == status
