"""The engine's core in a process of its own, so that HTTP, JSON and reading replies never hold up a step.

One loop, `serve`: take the orders that have come, make a step, report. It runs in a child process, or for
tests in a thread of this one; either way it speaks through one end of a socket pair. The pair also tells each
side that the other is gone: a child then leaves at once, and the front sees that its worker has ended.

`subprocess` and not `multiprocessing`: no second import of the caller's main module, no tracker process
beside it, and nobody waits for the child when this process ends.
"""

from __future__ import annotations

import faulthandler
import gc
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from longspan.engine.failures import unexpected
from longspan.engine.options import EngineOptions
from longspan.engine.output import End, TokenOutput
from longspan.engine.request import Request
from longspan.engine.wire import Abort, Add, Channel, FlushCache, Ready, Report, Shutdown
from longspan.errors import EngineDeadError, LongspanError

if TYPE_CHECKING:
    from longspan.engine.core import EngineCore  # imports torch, which the front does without

logger = logging.getLogger(__name__)

STATS_INTERVAL = 0.05
"""Seconds between statistics while nothing but tokens changes."""

_COMMAND = "from longspan.engine.worker import main; main()"
_LEAVE_SECONDS = 5.0


def load_core(path: Path, options: EngineOptions) -> EngineCore:
    """`EngineCore.from_path`, as a function that can be pickled without importing torch."""
    from longspan.engine.core import EngineCore

    core = EngineCore.from_path(path, options)
    gc.freeze()  # what stands now stays: no collection need look at it again
    return core


class Worker(Protocol):
    """What the front holds of a worker, which says `Ready` or an error through `link` before all else."""

    link: socket.socket

    def kill(self, why: str = "") -> None:
        """Ends it at once. `why` is what `end` will say."""
        ...

    def end(self) -> str:
        """Waits for the end of a worker that has closed its end -> how it ended: "process ended with ..."."""
        ...


def wait_ready(worker: Worker) -> Ready:
    """Waits until the core stands. Raises the error that kept it from standing, or EngineDeadError."""
    try:
        (message,) = Channel(worker.link).take(wait=True)
    except (EOFError, ConnectionError):
        raise EngineDeadError(
            f"The engine's {worker.end()} while it started.", remedy="Its log says why."
        ) from None
    except BaseException:  # such as Ctrl-C
        worker.kill()
        raise
    if isinstance(message, LongspanError):
        worker.end()
        raise message
    return message


class ProcessWorker:
    """A child process that makes a core and serves it."""

    def __init__(self, make_core: Callable[[], EngineCore], set_up_logging: Callable[[], None]) -> None:
        """Both are pickled and called in the child, `set_up_logging` first."""
        self.link, theirs = socket.socketpair()
        self._why = ""
        # The child inherits the mask: Ctrl-C and SIGTERM may come to both, and the front acts upon them.
        old_mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
        try:
            with theirs:
                self.process = subprocess.Popen(
                    [sys.executable, "-P", "-c", _COMMAND, str(theirs.fileno())],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                )
        except BaseException:
            self.link.close()
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, old_mask)
        with suppress(ConnectionError):  # it has died already, which is told by `wait_ready`
            Channel(self.link).send((set_up_logging, make_core))

    def kill(self, why: str = "") -> None:
        self._why = self._why or why
        self.process.kill()

    def end(self) -> str:
        self.link.close()
        try:
            code = self.process.wait(_LEAVE_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
            code = self.process.wait()
        if self._why:
            return f"process was killed, since {self._why},"
        if code >= 0:
            return f"process ended with exit code {code}"
        name = signal.Signals(-code).name
        return f"process was killed by {name}{' (out of memory?)' * (code == -signal.SIGKILL)}"


class ThreadWorker:
    """A thread of this process that serves a core: for tests that look into it."""

    def __init__(self, core: EngineCore) -> None:
        self.link, self._theirs = socket.socketpair()
        self._thread = threading.Thread(target=self._run, args=(core,), name="longspan-engine", daemon=True)
        self._thread.start()

    def _run(self, core: EngineCore) -> None:
        with self._theirs:
            run(lambda: core, Channel(self._theirs))

    def kill(self, why: str = "") -> None:
        with suppress(OSError):  # it has closed its end itself
            self._theirs.shutdown(socket.SHUT_RDWR)

    def end(self) -> str:
        self.link.close()
        self._thread.join(_LEAVE_SECONDS)
        return "thread died"


def main() -> None:
    """The child process. Its one argument is the file descriptor of its end of the pair."""
    faulthandler.enable()
    end = socket.socket(fileno=int(sys.argv[1]))
    threading.Thread(target=_leave_with_the_front, args=(end.fileno(),), daemon=True).start()
    channel = Channel(end)
    ((set_up_logging, make_core),) = channel.take(wait=True)
    set_up_logging()
    done = run(make_core, channel)
    logging.shutdown()
    # Not by sys.exit, which would wait for threads of a core that is broken.
    os._exit(0 if done else 1)


def _leave_with_the_front(file_descriptor: int) -> None:
    hang_up = select.poll()
    hang_up.register(file_descriptor, 0)  # no events: only the other end's close wakes it
    hang_up.poll()
    os._exit(0)


def run(make_core: Callable[[], EngineCore], channel: Channel) -> bool:
    """The whole life of a worker. False: it ended by an error, which is in the log."""
    try:
        try:
            core = make_core()
        except LongspanError as error:
            channel.send(error)
            return True
        channel.send(Ready(core.config, core.plan, core.stats))
        serve(core, channel)
    except (EOFError, ConnectionError):
        logger.debug("the front is gone")
    except BaseException:
        logger.critical("the engine died", exc_info=True)
        return False
    return True


def serve(core: EngineCore, channel: Channel) -> None:
    """Takes orders, makes steps and reports, round after round, until `Shutdown`. Sleeps without work.

    Raises EOFError or ConnectionError if the other end is closed, and whatever the core raises.
    """
    num_orders, next_stats = 0, 0.0
    while True:
        orders = channel.take(wait=not core.has_work)
        num_orders += len(orders)
        outputs: list[TokenOutput] = []
        flushed: list[int] = []
        for order in orders:
            match order:
                case Add(request):
                    outputs += _add(core, request)
                case Abort(request_id, index):
                    core.abort(request_id, index)
                case FlushCache():
                    flushed.append(core.flush_cache())
                case Shutdown():
                    return
        if core.has_work:
            outputs += core.step()
        now = time.monotonic()
        stats = core.stats if orders or not core.has_work or now >= next_stats else None
        if stats:
            next_stats = now + STATS_INTERVAL
        channel.send(Report(num_orders, outputs, stats, core.has_work, tuple(flushed)))


def _add(core: EngineCore, request: Request) -> list[TokenOutput]:
    """Nothing, or the ends of a request that the core refuses."""
    try:
        core.add(request)
    except Exception as error:
        if not isinstance(error, LongspanError):
            logger.exception("a request could not be added")
        end = End("error", error=unexpected(error))
        now = time.monotonic()
        return [TokenOutput(request.id, index, [], now, end=end) for index in range(request.params.n)]
    return []
