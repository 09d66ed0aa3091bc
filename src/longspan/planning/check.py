"""The go-live list: what must be so before a deployment takes traffic.

Of a directory of launch scripts: check_scripts.py, check_addresses.py and accuracy.py; of a running server:
check_server.py. What can't be seen from here is "unknown", with how to find out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from longspan.errors import ConfigError
from longspan.planning import check_addresses as addresses
from longspan.planning import check_scripts as scripts
from longspan.planning.accuracy import ACCURACY_FILE, check_accuracy
from longspan.planning.check_server import check_server, is_address
from longspan.planning.finding import Finding
from longspan.planning.launched import Launch, find_launches


def check_targets(targets: Sequence[str], accuracy: Path | None = None) -> list[Finding]:
    """All points of all targets, directories or addresses. Raises ConfigError for what can't be read."""
    findings: list[Finding] = []
    launches: list[Launch] = []
    urls = [target for target in targets if is_address(target)]
    for target in targets:
        if target in urls:
            continue
        if not Path(target).is_dir():
            raise ConfigError(
                f"{target} is no directory, and no http:// address.",
                remedy="Give one of `plan --output`, or an address such as http://10.0.0.1:8100.",
            )
        launches += find_launches(Path(target))
    for launch in launches:
        findings += check_launch(launch, accuracy)
    context = max((launch.plan.context for launch in launches), default=None)
    for url in urls:
        findings += check_server(url, context)
    if launches and not urls:
        findings.append(
            Finding(
                "servers",
                "health and metrics",
                "unknown",
                "no address was given",
                "Start the scripts and give --check their addresses too.",
            )
        )
    if accuracy and not launches:
        findings.append(check_accuracy("accuracy", accuracy))
    return findings


def check_launch(launch: Launch, accuracy: Path | None = None) -> Iterator[Finding]:
    where = str(launch.directory)
    yield scripts.check_files(where, launch)
    yield scripts.check_weights(where, launch)
    yield scripts.check_values(where, launch)
    yield scripts.check_roles(where, launch)
    yield addresses.check_addresses(where, launch)
    yield addresses.check_routers(where, launch)
    yield scripts.check_length(where, launch)
    yield scripts.check_blocks(where, launch)
    yield scripts.check_context_parallel(where, launch)
    yield scripts.check_prefix_cache(where, launch)
    yield scripts.check_chunked_prefill(where, launch)
    if launch.plan.engine == "sglang":
        yield scripts.check_metrics(where, launch)
    yield check_accuracy(where, accuracy or launch.directory / ACCURACY_FILE)


def print_findings(findings: Sequence[Finding]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(markup=False, highlight=False, soft_wrap=True)
    for where in dict.fromkeys(finding.where for finding in findings):
        table = Table(title=where, title_justify="left", box=None, pad_edge=False, show_header=False)
        for _ in range(3):
            table.add_column(overflow="fold")
        for finding in findings:
            if finding.where == where:
                remedy = f" {finding.remedy}" if finding.remedy else ""
                table.add_row(finding.status, finding.point, f"{finding.found}.{remedy}")
        console.print(table)
        console.print()
    counts = {status: sum(f.status == status for f in findings) for status in ("pass", "fail", "unknown")}
    console.print(", ".join(f"{count} {status}" for status, count in counts.items()))
