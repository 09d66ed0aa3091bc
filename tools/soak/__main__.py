"""The program: learn the answers, load a server, say what was wrong. Exits with 1 if anything was."""

from __future__ import annotations

import argparse
import asyncio
import os
import shlex
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import httpx

from soak.answers import Answer
from soak.load import Ledger, Load, Outage
from soak.misuse import misuses
from soak.monitor import Monitor, settled, wait_until_idle
from soak.protocols import PROTOCOLS
from soak.report import MIB, Report, latencies
from soak.server import Server, Usage, serving
from soak.workload import Case, Workload, text_of

ROOT = Path(__file__).parents[2]
_MOST_BODY_MIB = 1
_RECOVERY_SECONDS = 60.0
_SURE_MINUTES = 1.0  # in less, a slow machine may get by without a preemption


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m soak", description=__doc__)
    default = ROOT / "models" / "k31-tiny"
    parser.add_argument("--model", type=Path, default=default, help="checkpoint directory")
    parser.add_argument("--minutes", type=float, default=20, help="of load (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of the pool and of the mix")
    parser.add_argument("--pool", type=int, default=300, help="requests with known answers")
    parser.add_argument("--max-num-seqs", type=int, default=12, help="of the server")
    parser.add_argument("--max-queue", type=int, default=24, help="of the server")
    parser.add_argument("--cache-gib", type=float, default=0.006, help="small: memory must be fought for")
    parser.add_argument("--page-size", type=int, default=16, help="of the server")
    parser.add_argument("--snapshot-interval", type=int, default=128, help="of the server")
    parser.add_argument("--max-model-len", type=int, default=3072, help="of the server")
    parser.add_argument("--clients", type=int, default=20, help="that ask at the same time")
    parser.add_argument("--kill-worker", action="store_true", help="kill the engine's process once")
    parser.add_argument("--rss-growth-mib", type=float, default=32, help="allowed in the second half")
    parser.add_argument("--health-seconds", type=float, default=5, help="allowed for one health check")
    parser.add_argument("--report", type=Path, help="Markdown file; a plot of the same name goes beside it")
    parser.add_argument("flags", nargs="*", help="further flags of `longspan serve`, after --")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = _arguments(argv)
    given = list(sys.argv[1:] if argv is None else argv)
    flags = [
        *("--dtype", "float32", "--max-num-seqs", str(args.max_num_seqs), "--max-queue", str(args.max_queue)),
        *("--cache-gib", str(args.cache_gib), "--max-model-len", str(args.max_model_len)),
        *("--max-body-mib", str(_MOST_BODY_MIB), "--page-size", str(args.page_size)),
        *("--snapshot-interval", str(args.snapshot_interval), *args.flags),
    ]
    pool = _known_answers(args)
    with serving(args.model, *flags) as server:
        report = Report(
            command=f"python -m soak {shlex.join(given)}".strip(),
            flags=[_shown(args.model), *flags],
            minutes=args.minutes,
            pool_size=len(pool),
            ledger=Ledger(),
            monitor=Monitor(server),
        )
        asyncio.run(_soak(args, server, pool, report))
        code, errors = server.stop(), server.errors()
    report.check("exit status after SIGTERM", code, code == 0)
    report.check("tracebacks in the log", errors.count("Traceback"), "Traceback" not in errors)
    if args.report:
        plot = args.report.with_suffix(".png")
        report.plot(plot)
        args.report.write_text(report.markdown(plot.name))
    print(report.markdown("soak.png"))
    if not report.right:
        print(errors[-8000:], file=sys.stderr)
    return 0 if report.right else 1


def _shown(model: Path) -> str:
    path = model.resolve()
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(model)


def _known_answers(args: argparse.Namespace) -> list[tuple[Case, Answer]]:
    """Those of lone runs: one request at a time, without a prefix cache."""
    flags = ["--dtype", "float32", "--max-model-len", str(args.max_model_len), *args.flags]
    flags.append("--no-enable-prefix-caching")
    with serving(args.model, *flags) as server, httpx.Client(base_url=server.url, timeout=300) as client:

        def ask(case: Case) -> Answer:
            response = client.post(case.path, json=case.body)
            if response.status_code != 200:
                raise RuntimeError(f"{case} was refused: {response.text[:1000]}")
            return PROTOCOLS[case.path].whole(response.json())

        start = time.monotonic()
        workload = Workload(args.seed, text_of(args.model))
        pool = list(workload.pool(args.pool, ask))
    print(f"{len(pool)} answers known after {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)
    return pool


async def _soak(
    args: argparse.Namespace, server: Server, pool: list[tuple[Case, Answer]], report: Report
) -> None:
    load = Load(
        server.url,
        pool,
        misuses(_MOST_BODY_MIB * 2**20),
        report.ledger,
        seed=args.seed,
        num_clients=args.clients,
        burst=args.max_num_seqs + args.max_queue + 10,
    )
    # Threads and buffers that come with the first requests are no leak.
    await load.run(min(args.minutes * 6, 15))
    before = await asyncio.to_thread(_idle, server, report, "after the warm-up")
    with report.monitor:
        killer = asyncio.create_task(_kill_worker(args, server, load, report))
        await load.run(args.minutes * 60)
        await killer
    after = await asyncio.to_thread(_idle, server, report, "at the end")
    await load.check_all()
    left = await asyncio.to_thread(_flushed, server)
    report.check("bytes of the arena in use after a flush of the prefix cache", f"{left:.0f}", left == 0)
    _judge(args, report, before, after)


def _idle(server: Server, report: Report, when: str) -> Usage:
    held = wait_until_idle(server)
    report.check(f"still held when idle {when}", ", ".join(held) or "nothing", not held)
    return settled(server)


def _flushed(server: Server) -> float:
    """Bytes of the arena that anybody holds when nothing runs and nothing is cached."""
    httpx.post(f"{server.url}/flush_cache", timeout=60).raise_for_status()
    wait_until_idle(server)
    return server.metrics()["longspan:arena_bytes"]


async def _kill_worker(args: argparse.Namespace, server: Server, load: Load, report: Report) -> None:
    """Kills the process that computes, once, and waits until the server serves again."""
    if not args.kill_worker:
        return
    await asyncio.sleep(args.minutes * 60 / 4)
    worker = server.worker()
    if worker is None:
        report.check("worker to kill", "none", False)
        return
    outage = Outage(time.monotonic())
    load.outages.append(outage)
    os.kill(worker, signal.SIGKILL)
    async with httpx.AsyncClient(base_url=server.url, timeout=_RECOVERY_SECONDS) as client:
        while time.monotonic() < outage.start + _RECOVERY_SECONDS:
            await asyncio.sleep(0.2)
            healthy = (await client.get("/health")).status_code == 200
            if healthy and server.worker() not in (None, worker):
                break
    outage.end = time.monotonic()
    seconds = outage.end - outage.start
    report.check("seconds until a killed worker was replaced", f"{seconds:.1f}", seconds < _RECOVERY_SECONDS)


def _judge(args: argparse.Namespace, report: Report, before: Usage, after: Usage) -> None:
    ledger, monitor = report.ledger, report.monitor
    report.check("answers that equal the lone run's", ledger.total("right"), ledger.total("right") > 0)
    report.check("violations", ledger.num_violations, ledger.num_violations == 0)
    files = f"{after.files}, {before.files} before"
    report.check("open files, idle", files, after.files <= before.files)
    report.check(
        "threads, idle", f"{after.threads}, {before.threads} before", after.threads <= before.threads
    )
    growth = monitor.rss_growth() / MIB
    allowed = args.rss_growth_mib
    report.check(
        f"memory gained in the second half, at most {allowed:g} MiB", f"{growth:.1f}", growth <= allowed
    )
    health = monitor.health_seconds
    report.check(
        f"{len(health)} health checks, each within {args.health_seconds:g} s",
        latencies(health),
        max(health, default=0) <= args.health_seconds,
    )
    if not args.kill_worker:
        report.check("failed health checks", monitor.unhealthy, monitor.unhealthy == 0)
    counted = [sample.metrics["vllm:num_preemptions_total"] for sample in monitor.samples if sample.metrics]
    forced = max(counted) > 0 or args.minutes < _SURE_MINUTES
    report.check("preemptions, forced by the small cache", f"{max(counted):.0f}", forced)
    cached = ledger.num_cached_tokens
    report.check("prompt tokens of right answers that came from the prefix cache", cached, cached > 0)
    report.check("requests that got 429", ledger.total("429"), ledger.total("429") > 0)


if __name__ == "__main__":
    sys.exit(main())
