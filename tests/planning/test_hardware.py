"""Facts about hardware: the package's, and files of a user's own, with clear errors."""

from __future__ import annotations

import tomllib
from importlib.resources import files
from pathlib import Path

import pytest

from longspan.errors import CapacityError, ConfigError
from longspan.planning.hardware import bundled, load_hardware

OWN = """
[my-server]
title = "four cards"
kind = "cuda"
engines = ["sglang"]
devices_per_node = { value = 4, source = "I counted" }
memory_gib = { value = 80, source = "nvidia-smi" }
memory_gb_s = { value = 3350, source = "data sheet" }
link_gb_s = { value = 450, source = "data sheet" }
network_gb_s = { value = 50, assumed = "one port" }
usable = { value = 0.9, assumed = "as usual" }
[my-server.schemes]
mxfp4 = "unpacked"
"""


def own(tmp_path: Path, text: str) -> str:
    file = tmp_path / "own.toml"
    file.write_text(text)
    return str(file)


def test_the_bundled_machines_are_those_the_command_promises() -> None:
    promised = {"atlas-800-a3", "atlas-900-a3", "ascend-950dt", "h200x8", "epyc-2s"}
    assert promised <= set(bundled())
    for hardware in bundled().values():
        assert all(number.reason for number in hardware.numbers.values())


def test_every_source_is_used_and_every_number_of_the_package_has_one_or_is_assumed() -> None:
    values = tomllib.loads(files("longspan.planning").joinpath("hardware.toml").read_text())
    sources = values.pop("sources")
    tables = [table for hardware in values.values() for table in hardware.values() if isinstance(table, dict)]
    tables += [refusal for hardware in values.values() for refusal in hardware.get("refused", {}).values()]
    used = {table["source"] for table in tables if "source" in table}
    assert used == set(sources)


@pytest.mark.parametrize(
    ("name", "instead"), [("atlas-800-a2", "atlas-800-a3"), ("ascend-950pr", "ascend-950dt")]
)
def test_machines_the_vendor_does_not_support_are_refused_with_what_to_choose(
    name: str, instead: str
) -> None:
    hardware = load_hardware(name)
    with pytest.raises(CapacityError, match=f"--hardware {instead}"):
        hardware.require("k3.1", "w4a8")
    hardware.require("k3", "w4a8")
    load_hardware(instead).require("k3.1", "w4a8")


@pytest.mark.parametrize(
    ("name", "scheme"), [("atlas-800-a3", "mxfp4"), ("h200x8", "w4a8"), ("epyc-2s", "w4a8")]
)
def test_weights_that_a_machine_cannot_compute_are_refused_with_those_it_can(name: str, scheme: str) -> None:
    hardware = load_hardware(name)
    with pytest.raises(CapacityError) as refused:
        hardware.require("k3.1", scheme)
    assert all(legal in refused.value.remedy for legal in hardware.schemes)


def test_a_file_of_ones_own_is_read(tmp_path: Path) -> None:
    hardware = load_hardware(own(tmp_path, OWN))
    assert (hardware.name, hardware.devices, hardware.memory_bytes) == ("my-server", 4, 80 * 2**30)
    assert hardware.network_gb_s.assumed and not hardware.link_gb_s.assumed


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (('memory_gib = { value = 80, source = "nvidia-smi" }', ""), "lacks memory_gib"),
        (('title = "four cards"', 'title = "x"\ncolour = "red"'), "unknown fields: colour"),
        (('kind = "cuda"', 'kind = "tpu"'), "Legal are cpu, cuda, ascend"),
        (('engines = ["sglang"]', 'engines = ["trt"]'), "'trt'"),
        (('engines = ["sglang"]', "engines = []"), "a list was expected"),
        (("value = 80", "value = -1"), "a number above 0"),
        (("value = 80", "value = true"), "a number above 0"),
        (("value = 80", 'value = "80"'), "a number above 0"),
        (('value = 80, source = "nvidia-smi"', "value = 80"), "assumed"),
        (('value = 80, source = "nvidia-smi"', 'value = 80, source = "a", unit = "b"'), "assumed"),
        (("value = 4", "value = 4.5"), "a whole number"),
        (("value = 0.9", "value = 1.2"), "at most 1"),
        (('mxfp4 = "unpacked"', 'fp3 = ""'), "'fp3'"),
        (('mxfp4 = "unpacked"', "mxfp4 = 3"), "a text was expected"),
        (("value = 80", "value = inf"), "a number above 0"),
        (
            ('kind = "cuda"\nengines = ["sglang"]', 'kind = "cpu"\nengines = ["vllm-ascend"]'),
            "vllm-ascend, .*'cpu'",
        ),
        (
            ('kind = "cuda"\nengines = ["sglang"]', 'kind = "cpu"\nengines = ["longspan", "sglang"]'),
            "sglang, .*cpu",
        ),
        (
            ('engines = ["sglang"]', 'engines = ["vllm-ascend"]'),
            "vllm-ascend, which can't run on kind 'cuda'",
        ),
        (('title = "four cards"', 'title = "four\\ncards"'), "title is .* without control characters"),
        (('title = "four cards"', 'title = """four\ncards"""'), "title is .* without control characters"),
        (('mxfp4 = "unpacked"', 'mxfp4 = "un\\u001bpacked"'), "schemes.mxfp4 is .* without control"),
        (('"nvidia-smi"', '"nvidia\\u2028smi"'), "memory_gib source is .* without control characters"),
        (("[my-server]", '[sources]\nme = "a\\tb"\n[my-server]'), "me is .* without control characters"),
        (("[my-server]", "[my-server"), "is not TOML"),
        (("[my-server]", "sources = 3\n[my-server]"), "sources.* a table was expected"),
        (("[my-server]", "sources = { me = 3 }\n[my-server]"), "me is 3; a text was expected"),
        (('kind = "cuda"', 'kind = "cuda"\nrefused = ["k3"]'), "refused.* a table was expected"),
        (("[my-server.schemes]", "[other]\n[my-server.schemes]"), "lacks"),
        (("[my-server.schemes]", '[my-server.refused.k4]\nwhy = ""\n[my-server.schemes]'), "k4"),
    ],
)
def test_a_file_that_is_wrong_says_where_and_what_was_expected(
    change: tuple[str, str], message: str, tmp_path: Path
) -> None:
    assert change[0] in OWN
    with pytest.raises(ConfigError, match=message):
        load_hardware(own(tmp_path, OWN.replace(*change, 1)))


def test_a_machine_whose_name_breaks_a_line_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"name is .* without control characters"):
        load_hardware(own(tmp_path, OWN.replace("my-server", '"my\\nserver"')))


def test_several_tables_or_no_such_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="2 machines"):
        load_hardware(own(tmp_path, OWN + OWN.replace("my-server", "other")))
    with pytest.raises(ConfigError, match="no file either"):
        load_hardware(str(tmp_path / "none.toml"))
