"""Runs steps on a thread of its own, one at a time, while the caller prepares the next."""

from __future__ import annotations

import threading
from queue import SimpleQueue

from longspan.engine.runner import Runner, Step, StepResult
from longspan.memory.memory import Edit


class StepThread:
    """`start` a step, then `wait` for it. The thread ends with `stop`, or with the process."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._steps: SimpleQueue[tuple[Step, list[Edit]] | None] = SimpleQueue()
        self._results: SimpleQueue[StepResult | BaseException] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="longspan-steps", daemon=True)
        self._thread.start()

    def start(self, step: Step, edits: list[Edit]) -> None:
        self._steps.put((step, edits))

    def wait(self) -> StepResult:
        """Raises what `Runner.run` raised."""
        result = self._results.get()
        if isinstance(result, BaseException):
            raise result
        return result

    def stop(self) -> None:
        self._steps.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (work := self._steps.get()) is not None:
            try:
                self._results.put(self._runner.run(*work))
            except BaseException as error:
                self._results.put(error)
