"""The report of the accuracy regression.

A JSON object with "passed" (true or false), or with "score" and "baseline" (and "tolerance", 0 if left out),
or what `longspan eval --json` writes: rows of percentages, each of which must reach MIN_EXACT. A perplexity
row has none and is passed over.
"""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from longspan.planning.finding import Finding, judge
from longspan.planning.plan_file import faults_of

ACCURACY_FILE = "accuracy.json"
MIN_EXACT = 90.0  # percent of a skill
_POINT = "accuracy regression"
_REMEDY = "Compare with the published weights, and give the report with --accuracy."


class _Row(BaseModel):
    model_config = ConfigDict(strict=True, allow_inf_nan=False)
    skill: str | None = None
    exact: float | None = None


class _Report(BaseModel):
    model_config = ConfigDict(strict=True, allow_inf_nan=False)
    passed: bool | None = None
    score: float | None = None
    baseline: float | None = None
    tolerance: float = 0.0
    rows: list[_Row] | None = None


def check_accuracy(where: str, file: Path) -> Finding:
    try:
        report = _Report.model_validate_json(file.read_bytes())
    except OSError:
        return Finding(where, _POINT, "unknown", f"no report at {file}", _REMEDY)
    except ValidationError as error:
        return Finding(where, _POINT, "fail", f"{file} is no report: {faults_of(error)}", _REMEDY)
    verdict = _verdict(report)
    if verdict is None:
        found = f"{file} has neither passed, score and baseline, nor rows"
        return Finding(where, _POINT, "unknown", found, _REMEDY)
    good, text = verdict
    return judge(where, _POINT, good, text, "Find out which weights or kernels lost it before going live.")


def _verdict(report: _Report) -> tuple[bool, str] | None:
    """(good, what it says), None if it says nothing."""
    if report.passed is not None:
        return report.passed, "passed" if report.passed else "not passed"
    if report.score is not None and report.baseline is not None:
        text = f"{report.score:g}, baseline {report.baseline:g}, tolerance {report.tolerance:g}"
        return report.score >= report.baseline - report.tolerance, text
    exact = {row.skill or "no name": row.exact for row in report.rows or () if row.exact is not None}
    if not exact:
        return None
    worst = min(exact, key=lambda skill: exact[skill])
    return exact[worst] >= MIN_EXACT, f"worst of {len(exact)} skills: {worst}, {exact[worst]:.1f} %"
