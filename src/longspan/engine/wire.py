"""What goes between the front and a worker: orders one way, `Ready` and then reports the other.

A frame is the length of a pickled message in eight bytes, then the message. The sockets are a private pair
between two processes of one program, so what comes is trusted.
"""

from __future__ import annotations

import pickle
import socket
import struct
from dataclasses import dataclass
from typing import Any

from longspan.config import ModelConfig
from longspan.engine.output import TokenOutput
from longspan.engine.request import Request
from longspan.engine.stats import EngineStats
from longspan.memory.plan import MemoryPlan

_LENGTH = struct.Struct("!Q")
_RECEIVE_BYTES = 2**18


@dataclass(frozen=True)
class Add:
    request: Request


@dataclass(frozen=True)
class Abort:
    request_id: str
    index: int | None = None  # None: all choices


@dataclass(frozen=True)
class FlushCache:
    """The next report has the answer in `flushed`."""


@dataclass(frozen=True)
class Shutdown:
    """Leave now, whatever is unfinished."""


Order = Add | Abort | FlushCache | Shutdown


@dataclass(frozen=True)
class Ready:
    """The first message of a worker whose core stands. One that could not be made sends its LongspanError."""

    config: ModelConfig
    plan: MemoryPlan
    stats: EngineStats


@dataclass(frozen=True)
class Report:
    """One round of a worker: the orders it took, then a step if there was work."""

    num_orders: int  # taken so far
    outputs: list[TokenOutput]
    stats: EngineStats | None  # not in every report
    has_work: bool = False
    flushed: tuple[int, ...] = ()  # one answer for each FlushCache of the round


def pack(message: Any) -> bytes:
    """A frame. Raises what `pickle` raises for a message that can't be sent."""
    data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return _LENGTH.pack(len(data)) + data


class Unpacker:
    """Bytes in pieces of any size -> messages."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Any]:
        """The messages that are complete with this piece."""
        self._buffer += data
        messages = []
        start = 0
        while len(self._buffer) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer, start)
            end = start + _LENGTH.size + length
            if end > len(self._buffer):
                break
            messages.append(pickle.loads(self._buffer[start + _LENGTH.size : end]))
            start = end
        del self._buffer[:start]
        return messages


class Channel:
    """One end of the pair for a thread that may wait."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._unpacker = Unpacker()

    def send(self, message: Any) -> None:
        """Raises OSError if the other end is closed."""
        self._socket.sendall(pack(message))

    def take(self, wait: bool) -> list[Any]:
        """All messages that are there, with `wait` at least one. EOFError: the other end is closed."""
        messages: list[Any] = []
        while True:
            try:
                data = self._socket.recv(_RECEIVE_BYTES, 0 if wait and not messages else socket.MSG_DONTWAIT)
            except BlockingIOError:
                return messages
            if not data:
                raise EOFError("the other end is closed")
            messages += self._unpacker.feed(data)
