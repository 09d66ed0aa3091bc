"""`longspan plan --output`: where scripts go, what they replace, what is refused before that."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from support.plan_command import run

from longspan.errors import CapacityError, ConfigError
from longspan.planning.check import check_targets
from longspan.planning.models import name_and_directory
from longspan.planning.topology import parse_hosts

SMALL = ["kimi-linear", "--context", 4096]


def files(directory: Path) -> set[str]:
    return {str(file.relative_to(directory)) for file in directory.rglob("*") if file.is_file()}


def exported(script: Path) -> str:
    found = re.search(r"^export MODEL_PATH=(.*)$", script.read_text(), re.M)
    assert found
    return found[1]


def test_scripts_of_a_config_file_start_with_its_directory_and_bear_its_name(
    tiny_dir: Path, tmp_path: Path
) -> None:
    for number, model in enumerate((tiny_dir, tiny_dir / "config.json")):
        assert run(model, "--context", 4096, "--json", "--output", tmp_path / str(number)) == 0
        folder = tmp_path / str(number) / "longspan"
        assert exported(folder / "server-0.sh") == f"${{MODEL_PATH:-{tiny_dir.resolve()}}}"
        assert json.loads((folder / "plan.json").read_text())["model"] == tiny_dir.resolve().name


def test_a_config_by_another_name_is_no_directory_to_start_with(tmp_path: Path) -> None:
    file = tmp_path / "k31-pro.json"
    file.write_text("{}")
    assert name_and_directory(str(file)) == ("k31-pro", "")
    assert name_and_directory("kimi-k3") == ("kimi-k3", "")


def test_a_config_that_is_a_link_stands_for_the_directory_of_the_link(tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / "0af3").write_text("{}")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").symlink_to("../blobs/0af3")
    assert name_and_directory(str(tmp_path / "model" / "config.json")) == ("model", str(tmp_path / "model"))


def test_a_model_whose_path_has_a_newline_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="control characters"):
        name_and_directory(str(tmp_path / "a\nrm"))


def test_a_second_plan_replaces_the_scripts_of_the_first_and_nothing_else(tmp_path: Path, capsys) -> None:
    def write(nodes: int, topology: str, *more: object) -> set[str]:
        assert run(*SMALL, "--nodes", nodes, "--topology", topology, "--output", tmp_path, *more) == 0
        return files(tmp_path)

    pair = write(2, "1p1d")
    assert write(4, "2p2d") > pair
    (tmp_path / "longspan" / "accuracy.json").write_text("{}")
    (tmp_path / "longspan" / "server-mine.sh").write_text("")
    assert write(2, "1p1d") == pair | {"longspan/accuracy.json", "longspan/server-mine.sh"}
    assert "longspan/workers.json" in pair
    assert "longspan/workers.json" not in write(1, "plain")


def test_a_title_with_all_that_a_shell_takes_for_itself_stays_a_comment(tmp_path: Path, capsys) -> None:
    title = """"$(id) `id` 'it' \\"""
    own = tmp_path / "own.toml"
    number = "{ value = 512, assumed = 'x' }"
    own.write_text(
        f"[own]\ntitle = '''{title}'''\nkind = 'cpu'\nengines = ['longspan']\nschemes = {{ bf16 = '' }}\n"
        f"devices_per_node = {{ value = 1, assumed = 'x' }}\nusable = {{ value = 1, assumed = 'x' }}\n"
        f"memory_gib = {number}\nmemory_gb_s = {number}\nlink_gb_s = {number}\nnetwork_gb_s = {number}\n"
    )
    assert run(*SMALL, "--hardware", own, "--output", tmp_path / "out") == 0
    lines = (tmp_path / "out" / "longspan" / "server-0.sh").read_text().splitlines()
    assert [line[0] for line in lines if title in line] == ["#"]


def test_an_engine_that_the_second_plan_has_not_keeps_no_scripts(tmp_path: Path, capsys) -> None:
    case = ["--hardware", "h200x8", "--nodes", 4, "--topology", "2p2d", "--output", tmp_path]
    assert run(*case) == 0
    assert (tmp_path / "sglang").is_dir()
    assert run(*SMALL, "--output", tmp_path) == 0
    assert not (tmp_path / "sglang").exists()


@pytest.mark.parametrize("plan", [None, "not JSON", "[]", '{"engine": "other"}'])
@pytest.mark.parametrize("name", ["server-0.sh", "workers.json"])
def test_files_that_no_plan_wrote_are_refused_and_stay(name: str, plan: str | None, tmp_path: Path) -> None:
    (tmp_path / "longspan").mkdir()
    (tmp_path / "longspan" / name).write_text("mine")
    if plan:
        (tmp_path / "longspan" / "plan.json").write_text(plan)
    before = files(tmp_path)
    with pytest.raises(ConfigError, match=rf"has .*{name}.*Choose another --output"):
        run(*SMALL, "--output", tmp_path)
    assert files(tmp_path) == before
    assert (tmp_path / "longspan" / name).read_text() == "mine"


def test_a_place_that_cannot_be_written_is_refused_before_anything_is_printed(tmp_path: Path, capsys) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "longspan").write_text("")
    for output in (tmp_path / "file", tmp_path / "file" / "below", tmp_path / "taken", Path("/proc/plan")):
        with pytest.raises(ConfigError, match=r"--output .* Give a directory|Choose another directory"):
            run(*SMALL, "--output", output)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("hosts", "message"),
    [
        ("10.0.0.1:8000,10.0.0.2", "'10.0.0.1:8000': ports"),
        ("http://a,b", "'http://a': ports"),
        ("::1,b", "'::1': servers listen on IPv4"),
        ("[fe80::1%eth0],b", "servers listen on IPv4"),
        ("a,A", "has A twice|has a twice"),
        ("a,", "an address is empty"),
        ("", "an address is empty"),
        ("a, ,b", "an address is empty"),
        ("10.0.0.300,b", "no IPv4 address"),
        ("10.0.1,b", "no IPv4 address"),
        ("0.0.0.0,b", "no address of one node"),
        ("-a,b", "no host name"),
        ("a;id,b", "no host name"),
        ("$(id),b", "no host name"),
        ("a\n,b\nc", "no host name"),
        ("a", "1 addresses were given for 2 nodes"),
        ("a,b,c", "3 addresses were given for 2 nodes"),
    ],
)
def test_addresses_that_no_script_can_use_are_refused_by_name(hosts: str, message: str) -> None:
    with pytest.raises(CapacityError, match=message) as refused:
        parse_hosts(hosts, 2)
    assert refused.value.remedy and "\n" not in str(refused.value)


def test_addresses_are_names_or_numbers_in_the_order_given() -> None:
    assert parse_hosts("node-1.rack_2.example, 10.0.0.2", 2) == ["node-1.rack_2.example", "10.0.0.2"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nosuch", "--hardware", "nosuch", "--check", "d"], "nosuch, --hardware would say nothing"),
        (["--check", "d", "--output", "e"], "--output"),
        (["--check", "d", "--hosts", "a"], "--hosts"),
        (["--check", "d", "--nodes", "2", "--topology", "1p1d"], "--nodes, --topology"),
        (["--check", "d", "--context", "4K", "--scheme", "bf16"], "--context, --scheme"),
        (["--check", "d", "--engine", "sglang"], "--engine"),
        (["--check", "d", "--index-key-dtype", "int8"], "--index-key-dtype"),
        (["--check", "d", "--markdown"], "--markdown"),
        (["--accuracy", "x"], "--accuracy is for --check"),
        (["--hosts", "a"], "--hosts is for scripts"),
        (["--hosts", ""], "--hosts is for scripts"),
    ],
)
def test_options_that_would_say_nothing_are_refused_by_name(arguments: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as refused:
        run(*arguments)
    assert refused.value.remedy


DECODES_ALONE = ["--hardware", "ascend-950dt", "--nodes", 8, "--topology", "3p5d", "--scheme", "w4a8"]


def test_an_engine_that_lacks_the_dcp_of_a_long_context_gets_no_scripts_and_what_is_written_passes(
    tmp_path: Path, capsys
) -> None:
    hosts = ["--hosts", ",".join(f"10.0.0.{n}" for n in range(1, 9))]
    assert run(*DECODES_ALONE, "--context", "128K", *hosts, "--output", tmp_path) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "no scripts: SFA with DCP is not supported on Ascend 950" in said
    assert "Start vllm-ascend" not in said
    assert {folder.name for folder in tmp_path.iterdir()} == {"longspan"}
    assert not [finding for finding in check_targets([str(tmp_path)]) if finding.status == "fail"]
    shorter = [*DECODES_ALONE, "--context", 128 * 1024 - 1, *hosts, "--output", tmp_path, "--json"]
    assert run(*shorter) == 0
    assert {folder.name for folder in tmp_path.iterdir()} == {"longspan", "vllm-ascend"}
    assert not [finding for finding in check_targets([str(tmp_path)]) if finding.status == "fail"]
    report = json.loads(capsys.readouterr().out)
    assert report["engines"]["vllm-ascend"]["not_to_start"] == ""
