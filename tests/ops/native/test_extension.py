"""Which instruction set is chosen, and that each computes what torch does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from longspan.errors import ConfigError
from longspan.ops.native import extension
from longspan.ops.native.extension import ISAS, choose

COMPARE = """
import sys, torch
from longspan import load_model
torch.manual_seed(0)
ids = torch.randint(0, 2048, (150,))
def logits(dtype, backend):
    return load_model(sys.argv[1], dtype=dtype, backend=backend).forward(ids)


def error(tensor):
    return (tensor - exact).abs().max().item()


exact = logits("float32", "torch")
for run in [("float32", "native"), ("bfloat16", "native"), ("bfloat16", "torch")]:
    print(error(logits(*run)))
"""


@pytest.mark.parametrize("isa", ISAS)
def test_each_instruction_set_computes_what_torch_does(isa: str, tiny_dir: Path) -> None:
    module = choose().module
    assert module
    if isa not in extension.built_for() or isa not in module.supported():
        pytest.skip(f"{isa} is not built or this processor lacks it")
    environment = os.environ | {"LONGSPAN_ISA": isa}
    result = subprocess.run(
        [sys.executable, "-c", COMPARE, str(tiny_dir)], env=environment, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    exact, rounded, rounded_by_torch = map(float, result.stdout.split())
    assert exact < 1e-3 and rounded < 2 * rounded_by_torch


def fresh(
    monkeypatch: pytest.MonkeyPatch, built: dict, wanted: str = "", broken: dict | None = None
) -> extension.Choice:
    monkeypatch.setattr(extension, "_modules", lambda: (built, broken or {}))
    monkeypatch.setenv(extension.ISA_VARIABLE, wanted)
    return choose.__wrapped__()


def module(*runs: str) -> SimpleNamespace:
    return SimpleNamespace(supported=lambda: ["portable", *runs])


def test_the_best_that_runs_is_taken(monkeypatch) -> None:
    built = dict.fromkeys(ISAS, module("avx2"))
    assert fresh(monkeypatch, built).isa == "avx2"
    assert fresh(monkeypatch, built, "portable").isa == "portable"


def test_a_wish_that_cannot_be_met_is_an_error(monkeypatch) -> None:
    with pytest.raises(ConfigError, match=r"LONGSPAN_ISA is 'avx512'; built are .*runs portable, avx2"):
        fresh(monkeypatch, dict.fromkeys(ISAS, module("avx2")), "avx512")


def test_without_modules_the_reason_is_told_and_a_wish_refused(monkeypatch) -> None:
    assert "compiler" in fresh(monkeypatch, {}).reason
    assert fresh(monkeypatch, {"avx512": module()}).reason == "built are avx512"
    assert (
        "avx2 does not load: no such symbol"
        in fresh(monkeypatch, {}, broken={"avx2": "no such symbol"}).reason
    )
    with pytest.raises(ConfigError, match="LONGSPAN_ISA is 'avx2'; this installation has no native"):
        fresh(monkeypatch, {}, "avx2")


def test_a_module_that_does_not_load_is_told_from_one_that_is_not_there(monkeypatch, tmp_path: Path) -> None:
    import longspan

    (tmp_path / "_native_nonsense.so").write_bytes(b"no library")
    monkeypatch.setattr(longspan, "__path__", [str(tmp_path)])
    monkeypatch.setattr(extension, "ISAS", ("absent", "nonsense"))
    built, broken = extension._modules()
    assert not built and list(broken) == ["nonsense"] and broken["nonsense"]
