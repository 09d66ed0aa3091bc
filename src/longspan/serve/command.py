"""`longspan serve`: flags, start-up in an order that fails early, and what is printed when it stands."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longspan import logs
from longspan.engine.options import EngineOptions, add_engine_arguments
from longspan.engine.supervisor import MAX_RESTARTS, RESTART_PERIOD, STEP_TIMEOUT
from longspan.engine.worker import ProcessWorker, Worker, load_core
from longspan.errors import CapacityError

if TYPE_CHECKING:
    from longspan.engine.async_engine import AsyncEngine
    from longspan.serve.service import ServeOptions

KEY_VARIABLE = "LONGSPAN_API_KEY"
QUESTION = "What is 417 + 286?"  # the bundled checkpoint can answer it
_HIGHEST = 10**9  # of any limit; far beyond use, and safe to calculate with


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", type=Path, help="checkpoint directory in the published format")
    group = parser.add_argument_group("server")
    group.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    group.add_argument("--port", type=int, default=8000, help="0 takes any free port (default: %(default)s)")
    group.add_argument(
        "--served-model-name",
        nargs="+",
        metavar="NAME",
        help="names that requests may use (default: the directory's)",
    )
    group.add_argument(
        "--api-key",
        metavar="KEY",
        default=os.environ.get(KEY_VARIABLE) or None,
        help="demanded of every request but /health, /metrics and /version (default: $LONGSPAN_API_KEY)",
    )
    group.add_argument(
        "--allowed-origins",
        nargs="+",
        metavar="ORIGIN",
        default=[],
        help="web pages of these origins may use the API, such as https://chat.example or * for all; "
        "also as one JSON list (default: none)",
    )
    group.add_argument(
        "--max-queue",
        type=int,
        metavar="N",
        default=256,
        help="requests that may wait beyond those that can run; more get 429 (default: %(default)s)",
    )
    group.add_argument(
        "--max-body-mib",
        type=float,
        metavar="MIB",
        default=16,
        help="larger requests get 413 (default: %(default)s)",
    )
    group.add_argument(
        "--drain-seconds",
        type=float,
        metavar="S",
        default=30,
        help="after SIGTERM or Ctrl-C, how long running requests may go on (default: %(default)s)",
    )
    _add_worker_arguments(parser)
    _add_sight_arguments(parser)
    add_engine_arguments(parser)


def _add_worker_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("engine process")
    group.add_argument(
        "--on-worker-death",
        choices=("restart", "exit"),
        default="restart",
        help=f"what to do where the engine's process dies: start another one, at most {MAX_RESTARTS} in "
        f"{RESTART_PERIOD / 60:g} minutes, or leave with an exit code of 1 (default: %(default)s)",
    )
    group.add_argument(
        "--step-timeout",
        type=float,
        metavar="S",
        default=STEP_TIMEOUT,
        help="an engine that works on one step for longer counts as dead; 0: never (default: %(default)g)",
    )


def _add_sight_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("logs and traces")
    group.add_argument(
        "--log-level",
        choices=logs.LEVELS,
        default="info",
        help="info has a line for each request that was answered (default: %(default)s)",
    )
    group.add_argument(
        "--log-format",
        choices=logs.FORMATS,
        default="text",
        help="json: an object per line (default: %(default)s)",
    )
    group.add_argument(
        "--access-log",
        action="store_true",
        help="also log every HTTP request as web servers do, probes and scrapers included",
    )
    group.add_argument(
        "--otlp-traces-endpoint",
        metavar="URL",
        help="send a trace of each request to this OpenTelemetry collector, by OTLP over HTTP "
        "(needs longspan[otel])",
    )


def main(args: argparse.Namespace) -> int:
    """Serves until it is told to stop. Raises LongspanError for what can't be served."""
    for name in ("max_queue", "max_body_mib", "drain_seconds", "step_timeout"):
        if not 0 <= getattr(args, name) <= _HIGHEST:
            flag = f"--{name.replace('_', '-')}"
            raise CapacityError(
                f"{flag} is {getattr(args, name)}.", remedy=f"Give a number from 0 to {_HIGHEST}."
            )
    if args.api_key is not None and not args.api_key.strip():
        raise CapacityError("--api-key is empty.", remedy="Give a key, or leave it out to ask for none.")
    if not all(name.strip() for name in args.served_model_name or ()):
        raise CapacityError("--served-model-name is empty.", remedy="Give a name, or leave it out.")

    logs.configure(args.log_level, args.log_format, access_log=args.access_log)

    from longspan.serve.server import bind

    # First of all, so that a taken port is known before weights are read.
    with bind(args.host, args.port) as listener:
        start = partial(
            ProcessWorker,
            partial(load_core, args.model, EngineOptions.from_args(args)),
            partial(logs.configure, args.log_level, args.log_format),
        )
        worker = start()
        try:
            return _serve(args, listener, worker, start)
        finally:
            worker.kill()


def _serve(
    args: argparse.Namespace, listener: socket.socket, worker: ProcessWorker, restart: Callable[[], Worker]
) -> int:
    # While the worker reads weights, this process imports what follows and reads its own tokenizer.
    from longspan.chat import Tokenizer
    from longspan.engine.async_engine import AsyncEngine
    from longspan.serve.app import create_app
    from longspan.serve.server import Server
    from longspan.serve.service import ServeOptions, Service
    from longspan.serve.tracing import Tracing

    names = tuple(args.served_model_name or [args.model.resolve().name])
    endpoint = args.otlp_traces_endpoint
    tracing = Tracing.to_endpoint(names[0], endpoint) if endpoint is not None else None
    engine = AsyncEngine(
        worker,
        Tokenizer.find(args.model),
        restart=restart if args.on_worker_death == "restart" else None,
        step_timeout=args.step_timeout,
        on_death=lambda: setattr(server, "should_exit", True),
    )
    options = ServeOptions(
        served_model_names=names,
        api_key=args.api_key and args.api_key.strip(),
        max_queue=args.max_queue,
        max_body_bytes=int(args.max_body_mib * 2**20),
        allowed_origins=_origins(args.allowed_origins),
        model_path=str(args.model.resolve()),
    )
    service = Service(engine, options)
    app = create_app(service, draining=lambda: server.should_exit, tracing=tracing)
    url = f"http://{_reachable(args.host)}:{listener.getsockname()[1]}"
    server = Server(
        app,
        drain_seconds=args.drain_seconds,
        busy=lambda: service.busy,
        abort_all=engine.abort_all,
        on_start=lambda: print(_welcome(engine, args.dtype, options, url), flush=True),
        access_log=args.access_log,
    )
    server.serve_on(listener)
    return 1 if engine.dead else 0


def _origins(given: list[str]) -> tuple[str, ...]:
    """Of --allowed-origins, which vLLM takes as a JSON list. Raises CapacityError."""
    origins: Any = given
    if len(given) == 1 and given[0].startswith("["):
        try:
            origins = json.loads(given[0])
        except ValueError:
            origins = None
        if not isinstance(origins, list) or not all(isinstance(origin, str) for origin in origins):
            remedy = 'Give origins one after the other, or as a list such as ["https://chat.example"].'
            raise CapacityError(f"--allowed-origins is {given[0]!r}.", remedy=remedy)
    return tuple(origins)


def _reachable(host: str) -> str:
    """An address to reach a server that listens on `host`."""
    if host in ("", "0.0.0.0", "::"):
        return "127.0.0.1"
    return f"[{host}]" if ":" in host else host


def _welcome(engine: AsyncEngine, dtype: str, options: ServeOptions, url: str) -> str:
    """What runs, what it holds, and a line to try it with."""
    config, model = engine.config, options.served_model_names[0]
    lines = [f"{model}: {config.family}, {config.num_layers} layers, {dtype}"]
    lines += [f"  {what:<16}{size:>10}  {remark}" for what, size, remark in engine.plan.lines()]
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": QUESTION}], "temperature": 0})
    key = ""
    if options.api_key:
        from_environment = options.api_key == os.environ.get(KEY_VARIABLE, "").strip()
        key = f' -H "Authorization: Bearer {f"${KEY_VARIABLE}" if from_environment else "YOUR_KEY"}"'
    lines += [
        f"Serving on {url} (Ctrl-C stops). Try:",
        f"  curl {url}/v1/chat/completions{key} -H 'Content-Type: application/json' -d {shlex.quote(body)}",
    ]
    return "\n".join(lines)
