"""Tokens of the core -> what callers read. Everything here is off the engine's critical path.

The core knows token ids only. The front runs each choice's reader (text, stop strings, reply parsing). When a
reader says that its reply is complete, the front ends the choice, and the core is told to forget it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from longspan.engine.failures import unexpected
from longspan.engine.output import End, Finish, FinishReason, StepOutput, Times, TokenOutput
from longspan.engine.readers import Reader
from longspan.engine.request import Request
from longspan.errors import LongspanError

logger = logging.getLogger(__name__)

ChoiceId = tuple[str, int]
"""Request id and number of the choice."""


@dataclass(eq=False)
class _Reading:
    """One unfinished choice."""

    request: Request
    index: int
    reader: Reader
    arrived: float
    scheduled: float | None = None
    first_token: float | None = None


@dataclass
class Front:
    """The readers of all unfinished choices of one engine."""

    _readings: dict[ChoiceId, _Reading] = field(default_factory=dict)

    def add(self, request: Request) -> None:
        arrived = time.monotonic()
        for index in range(request.params.n):
            self._readings[request.id, index] = _Reading(request, index, request.make_reader(), arrived)

    def read(self, outputs: Iterable[TokenOutput]) -> tuple[list[StepOutput], list[ChoiceId]]:
        """What callers get, and the choices that the core must end since their replies are complete.

        Outputs of choices that have ended here are dropped: the core had not yet heard of it.
        """
        steps: list[StepOutput] = []
        to_end: list[ChoiceId] = []
        for output in outputs:
            reading = self._readings.get((output.request_id, output.index))
            if reading is None:
                continue
            step = self._read(reading, output)
            steps.append(step)
            if step.finish:
                del self._readings[output.request_id, output.index]
                if output.end is None:
                    to_end.append((output.request_id, output.index))
        return steps, to_end

    def abort(self, request_id: str, error: LongspanError | None = None) -> list[StepOutput]:
        """Ends what is unfinished of a request: by "abort", or with an error."""
        steps = []
        for reading in [r for r in self._readings.values() if r.request.id == request_id]:
            del self._readings[request_id, reading.index]
            end = End("error", error=error) if error else End("abort")
            steps.append(
                self._read(reading, TokenOutput(request_id, reading.index, [], time.monotonic(), end=end))
            )
        return steps

    def _read(self, reading: _Reading, output: TokenOutput) -> StepOutput:
        started = output.started
        if started:
            reading.scheduled = started.scheduled
        if output.token_ids and reading.first_token is None:
            reading.first_token = output.time
        try:
            deltas, count, finish = _read_tokens(reading, output)
        except Exception as error:
            logger.exception("reading a reply failed")
            deltas, count = [], len(output.token_ids)
            finish = Finish("error", _times(reading, output), error=unexpected(error))
            if output.end and output.end.reason == "abort":
                finish = Finish("abort", _times(reading, output))
        return StepOutput(
            request_id=output.request_id,
            index=output.index,
            deltas=deltas,
            token_ids=output.token_ids[:count],
            logprobs=output.logprobs[:count],
            prompt_logprobs=started.prompt_logprobs if started else None,
            cached_tokens=started.cached_tokens if started else 0,
            finish=finish,
        )


def _read_tokens(reading: _Reading, output: TokenOutput) -> tuple[list, int, Finish | None]:
    """Deltas, how many of the tokens belong to the reply, and its end."""
    reader, end = reading.reader, output.end
    if end and end.error:
        return [], len(output.token_ids), Finish("error", _times(reading, output), error=end.error)
    deltas: list = []
    for count, token_id in enumerate(output.token_ids, start=1):
        is_last = count == len(output.token_ids)
        # The token that ends a reply is no part of its text, unless asked for.
        if is_last and end and end.reason == "stop" and not reading.request.params.include_stop_str_in_output:
            break
        deltas += reader.push(token_id)
        if reader.done:
            return _finished(reading, output, deltas, count, "stop", reader.stop_string)
    if end is None:
        return deltas, len(output.token_ids), None
    return _finished(reading, output, deltas, len(output.token_ids), end.reason, end.stop_token)


def _finished(
    reading: _Reading,
    output: TokenOutput,
    deltas: list,
    count: int,
    reason: FinishReason,
    stop_reason: int | str | None,
) -> tuple[list, int, Finish]:
    rest, reason = reading.reader.finish(reason)
    return deltas + rest, count, Finish(reason, _times(reading, output), stop_reason)


def _times(reading: _Reading, output: TokenOutput) -> Times:
    return Times(reading.arrived, reading.scheduled, reading.first_token, output.time)
