"""The `longspan` command: help that teaches, mistakes in one line, answers on stdout."""

from __future__ import annotations

import io
import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest
from support.tiny_chat import write_chat_checkpoint

from longspan.cli import COMMANDS, main
from longspan.serve.server import bind


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_checkpoint(tmp_path_factory.mktemp("checkpoint") / "random")


def test_help_names_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    shown = capsys.readouterr().out
    assert all(command.summary.split()[0] in shown for command in COMMANDS.values())


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_a_command_shows_options_and_examples(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="0"):
        main([command, "--help"])
    shown = capsys.readouterr().out
    example = {
        "make-checkpoint": " /tmp/mini",
        "info": "",
        "top": "",
        "bench serve": " http://127",
        "plan": " -",
    }.get(command, " models/k31-tiny")
    assert f"\n  longspan {command}{example}" in shown
    assert shown.count("\n  -") > 1


@pytest.mark.parametrize(
    "arguments", [[], ["bake"], ["serve"], ["generate", "x", "--prompt", "a", "--chat", "b"]]
)
def test_what_is_no_command_is_refused_with_the_usage(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert "usage: longspan" in capsys.readouterr().err


@pytest.mark.parametrize(
    "command", sorted(COMMANDS.keys() - {"make-checkpoint", "info", "top", "bench serve"})
)
def test_a_missing_checkpoint_is_told_in_a_line(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = {"generate": ["--prompt", "x"], "serve": ["--port", "0"]}.get(command, [])
    assert main([command, str(tmp_path / "nowhere"), *flags]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(f"longspan {command}: ") and "nowhere" in captured.err


def test_inspect_does_not_wait_for_torch(checkpoint: Path) -> None:
    program = (
        "import sys; from longspan.cli import main; main(sys.argv[1:]); sys.exit('torch' in sys.modules)"
    )
    command = [sys.executable, "-c", program, "inspect", str(checkpoint)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stderr


def test_generate_says_the_same_for_the_same_seed(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["generate", str(checkpoint), "--prompt", "In the beginning", "--max-tokens", "12", "--seed"]
    said = []
    for seed in ("3", "3", "4"):
        assert main([*arguments, seed]) == 0
        said.append(capsys.readouterr().out)
    assert said[0] == said[1] != said[2]
    assert len(said[0]) > 10


def test_generate_reads_stdin_and_keeps_reasoning_out_of_a_pipe(
    checkpoint: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["generate", str(checkpoint), "--chat", "-", "--max-tokens", "12", "--seed", "3"]
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hello\n"))
    assert main(arguments) == 0
    captured = capsys.readouterr()
    reasoning, note = captured.err.rsplit("\nlongspan generate: ", 1)
    assert captured.out == "\n" and len(reasoning) > 10
    assert "cut off by --max-tokens 12" in note
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hello\n"))
    assert main([*arguments, "--no-thinking"]) == 0
    captured = capsys.readouterr()
    assert len(captured.out) > 10 and captured.err.startswith("longspan generate: ")


def test_generate_says_that_the_context_is_full(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["generate", str(checkpoint), "--chat", "Hello", "--max-model-len", "128", "--seed", "3"]
    assert main(arguments) == 0
    assert "context of 128 tokens" in capsys.readouterr().err


def test_generate_says_nothing_of_a_text_that_ended(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["generate", str(checkpoint), "--prompt", "x", "--seed", "3", "--max-tokens", "60"]
    assert main(arguments) == 0
    said = capsys.readouterr().out
    assert main([*arguments, "--stop", said[5:8]]) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--temperature", "-1"], "temperature"),
        (["--max-tokens", "5000"], "max_model_len"),
        (["--max-model-len", "1000000"], "4096"),
        (["--backend", "abacus"], "torch"),
        (["--stop", ""], "stop"),
    ],
)
def test_generate_refuses_what_it_cannot_do(
    checkpoint: Path, flags: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", str(checkpoint), "--prompt", "x", *flags]) == 2
    captured = capsys.readouterr()
    assert says in captured.err and captured.out == ""


def test_serve_refuses_a_taken_port_before_it_reads_anything(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with bind("127.0.0.1", 0) as taken:
        taken.listen()
        port = str(taken.getsockname()[1])
        assert main(["serve", str(tmp_path / "nowhere"), "--port", port]) == 2
    shown = capsys.readouterr().err
    assert f"port {port}" in shown and "--port" in shown


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--max-queue", "-1"),
        *itertools.product(("--max-body-mib", "--drain-seconds"), ("-1", "inf", "-inf", "nan", "1e300")),
    ],
)
def test_serve_refuses_limits_that_are_none(
    flag: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "x", f"{flag}={value}"]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith(f"longspan serve: {flag} is ") and "from 0" in shown


@pytest.mark.parametrize("flag", ["--api-key", "--served-model-name"])
def test_serve_refuses_what_is_empty(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "x", flag, " "]) == 2
    assert f"{flag} is empty" in capsys.readouterr().err


def test_inspect_of_a_file_of_weights_asks_for_the_directory(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = next(checkpoint.glob("*.safetensors"))
    assert main(["inspect", str(file)]) == 2
    shown = capsys.readouterr().err
    assert file.name in shown and "directory" in shown


def test_an_interrupt_ends_a_command_quietly(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("longspan.engine.engine.Engine.step", interrupt)
    assert main(["generate", str(checkpoint), "--prompt", "x"]) == 130
    assert "Traceback" not in capsys.readouterr().err


def test_info_says_what_computes_and_why(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["backend"] in ("native", "torch") and found["because"]
    assert main(["info"]) == 0
    assert found["processor"] in capsys.readouterr().out


def test_a_place_that_cannot_be_written_is_told_in_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["make-checkpoint", "/proc/nowhere", "--shape", "mini"]) == 2
    assert capsys.readouterr().err.startswith("longspan make-checkpoint: ")
