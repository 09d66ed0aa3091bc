"""`longspan bench`: what it prints and writes, and what it refuses before it reads weights."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from support.random_checkpoint import write_checkpoint

from longspan.cli import main
from longspan.ops import limits
from longspan.ops.limits import MachineLimits

READS = (8, 9, 10, 11, 12, 9)  # GB/s, one measurement each
LIMITS = [
    MachineLimits(threads=2, read_bytes=r * 1e9, bf16_operations=1e11, int8_operations=0) for r in READS
]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "tiny", "k3.1", packed=True)


@pytest.fixture(autouse=True)
def known_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = iter(LIMITS)
    monkeypatch.setattr(limits, "machine_limits", lambda *_: next(measured))


def test_every_depth_gets_a_row_for_prefill_and_one_for_decode(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "out.json"
    flags = ["--depth=1K,0,40", "--prefill-chunk=8", "--batch=2", "--steps=1", "--backend=torch"]
    assert main(["bench", str(checkpoint), *flags, "--json", str(file)]) == 0
    shown = capsys.readouterr().out
    assert "tiny: k3.1, bfloat16, torch operators" in shown
    assert "reads the weights at 9.5 GB/s (8.0 to 12.0), 100 BF16 GFLOP/s" in shown
    rows = [line.split()[:3] for line in shown.splitlines() if line.startswith(("prefill", "decode"))]
    depths = ["0", "40", "1K"]
    assert rows == [["prefill", d, "8"] for d in depths] + [["decode", d, "2"] for d in depths]

    report = json.loads(file.read_text())
    assert report["backend"] == "torch" and report["limits"]["read_bytes"] == 9.5e9
    assert [m["read_bytes"] / 1e9 for m in report["limits"]["measurements"]] == list(READS)
    for row in report["rows"]:
        seconds = row["seconds"]["median"]
        moved, operations = sum(row["bytes"].values()), sum(row["operations"].values())
        assert math.isclose(row["tokens_per_second"], row["sequences"] * row["rows"] / seconds)
        assert math.isclose(row["bytes_per_second"], moved / seconds)
        assert math.isclose(row["read_share"], moved / seconds / 9.5e9)
        assert math.isclose(row["compute_share"], operations / seconds / 100e9)
        bound = max(row["read_share"], row["compute_share"])
        assert math.isclose(row["limit_tokens_per_second"], row["tokens_per_second"] / bound)


def test_an_int8_index_is_held_against_the_int8_peak(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "machine_limits", lambda *_: MachineLimits(2, 10e9, 100e9, 400e9))
    file = tmp_path / "out.json"
    flags = ["--depth", "99", "--prefill-chunk", "0", "--steps", "1", "--index-key-dtype", "int8"]
    assert main(["bench", str(checkpoint), *flags, "--json", str(file)]) == 0
    (row,) = json.loads(file.read_text())["rows"]
    work = row["operations"]
    least = (work["weights"] + work["attention"]) / 100e9 + work["index"] / 400e9
    assert math.isclose(row["compute_share"], least / row["seconds"]["median"])


def test_default_depths_are_those_the_model_was_made_for(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", str(checkpoint), "--prefill-chunk", "0", "--steps", "1"]) == 0
    shown = capsys.readouterr().out
    assert [line.split()[1] for line in shown.splitlines() if line.startswith("decode")] == ["0", "4K"]


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--depth", "0,8K"], "at most 4096"),
        (["--prefill-chunk", "-1"], "--prefill-chunk is -1"),
        (["--json", "/nowhere/out.json"], "/nowhere"),
        (["--backend", "abacus"], "abacus"),
        (["--threads", "0"], "threads is 0"),
        (["--cpus", "x"], "cpus is 'x'"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    checkpoint: Path, flags: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", str(checkpoint), *flags]) == 2
    captured = capsys.readouterr()
    assert says in captured.err and captured.out == ""


@pytest.mark.parametrize("flags", [["--depth", "4X"], ["--depth", ""], ["--batch", "0"], ["--steps", "x"]])
def test_what_is_no_number_is_refused_with_the_usage(
    flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["bench", "models/k31-tiny", *flags])
    assert flags[0] in capsys.readouterr().err


def test_int8_keys_of_a_model_without_an_indexer_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_checkpoint(tmp_path / "k3", "k3", packed=True)
    assert main(["bench", str(path), "--index-key-dtype", "int8"]) == 2
    assert "no sparse indexer" in capsys.readouterr().err


def test_a_depth_that_does_not_fit_is_refused_with_the_deepest_that_does(
    checkpoint: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    free = 100_000_000
    monkeypatch.setattr("longspan.memory.plan.available_memory", lambda: free)
    flags = ["--prefill-chunk", "0", "--batch", "2000", "--steps", "1"]
    assert main(["bench", str(checkpoint), "--depth", "4K", *flags]) == 2
    shown = capsys.readouterr().err
    deepest = shown.split()[-1].rstrip(".")
    assert int(deepest) < 4096
    assert main(["bench", str(checkpoint), "--depth", str(int(deepest) + 1), *flags]) == 2
    monkeypatch.setattr("longspan.memory.plan.available_memory", lambda: 0)
    assert main(["bench", str(checkpoint), "--depth", "0", *flags]) == 2
    assert "Lower --prefill-chunk or --batch" in capsys.readouterr().err


def test_a_plot_without_matplotlib_says_how_to_get_it(
    checkpoint: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    assert main(["bench", str(checkpoint), "--plot", "out.png"]) == 2
    assert "pip install 'longspan[bench]'" in capsys.readouterr().err


def test_a_plot_shows_measured_and_allowed_speed(checkpoint: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "out.svg"
    flags = ["--depth", "0,16", "--prefill-chunk", "4", "--steps", "1"]
    assert main(["bench", str(checkpoint), *flags, "--plot", str(file)]) == 0
    assert file.read_text().startswith("<?xml")
