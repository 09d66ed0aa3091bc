"""A short soak of a real server: the checks of the long one. LONGSPAN_SOAK_MINUTES makes it longer."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

from soak.__main__ import main

MINUTES = os.environ.get("LONGSPAN_SOAK_MINUTES", "0.15")


@pytest.mark.timeout(600 + 120 * float(MINUTES))
def test_a_server_under_mixed_load_answers_as_if_alone_and_holds_nothing_at_the_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = tmp_path / "soak.md"
    options = ["--minutes", MINUTES, "--pool", "20", "--report", str(report)]
    code = main([*options, "--", "--threads", "1"])
    assert code == 0, capsys.readouterr().out
    assert report.with_suffix(".png").stat().st_size > 0
    assert "**WRONG**" not in report.read_text()
