from __future__ import annotations

import pickle
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longspan import errors
from longspan.engine.output import End, Logprob, Started, TokenOutput
from longspan.engine.readers import TokenReader
from longspan.engine.request import Request, SamplingParams
from longspan.engine.stats import EngineStats
from longspan.engine.wire import Abort, Add, Channel, FlushCache, Report, Shutdown, Unpacker, pack
from longspan.serve.failures import QueueFullError, UnknownModelError


def all_errors() -> Iterator[type[errors.LongspanError]]:
    for kind in vars(errors).values():
        if isinstance(kind, type) and issubclass(kind, errors.LongspanError):
            yield kind


@pytest.mark.parametrize(
    "kind", [*all_errors(), QueueFullError, UnknownModelError], ids=lambda kind: kind.__name__
)
def test_an_error_is_the_same_on_the_other_side(kind: type[errors.LongspanError]) -> None:
    more: dict[str, Any] = {"param": "stop"} if issubclass(kind, errors.RequestError) else {}
    error = kind("It was seven.", remedy="Give six.", **more)
    other = pickle.loads(pickle.dumps(error))
    assert type(other) is kind
    assert (str(other), vars(other)) == (str(error), vars(error)) == ("It was seven. Give six.", vars(error))


def test_every_kind_of_message_is_the_same_on_the_other_side() -> None:
    request = Request(
        "a", [1, 2], SamplingParams(stop=["x"], logit_bias={3: 1.5}), TokenReader, cache_salt="s"
    )
    failure = End("error", error=errors.NonFiniteError("NaN.", remedy="None."))
    outputs = [
        TokenOutput("a", 0, [5], 1.5, [{5: Logprob(-0.1, 1)}], Started(1.0, 64, [None, {2: Logprob(-2, 3)}])),
        TokenOutput("a", 1, [], 1.5, end=End("stop", stop_token=7)),
    ]
    messages = [Add(request), Abort("a"), Abort("a", 1), FlushCache(), Shutdown()]
    messages += [Report(3, outputs, EngineStats(num_running=1), True, (4,)), Report(0, [], None)]
    assert Unpacker().feed(b"".join(map(pack, messages))) == messages
    (report,) = Unpacker().feed(pack(Report(1, [TokenOutput("a", 0, [], 1.0, end=failure)], None)))
    assert str(report.outputs[0].end.error) == "NaN. None."


@given(st.lists(st.binary(max_size=20)), st.integers(1, 30))
def test_messages_come_whole_however_their_bytes_are_cut(messages: list[bytes], size: int) -> None:
    data = b"".join(map(pack, messages))
    unpacker = Unpacker()
    found = [message for i in range(0, len(data), size) for message in unpacker.feed(data[i : i + size])]
    assert found == messages


def test_a_channel_gives_all_that_is_there_and_waits_only_where_asked() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        sender, receiver = Channel(ours), Channel(theirs)
        assert receiver.take(wait=False) == []
        sender.send(1)
        sender.send(2)
        assert receiver.take(wait=False) == [1, 2]
        large = b"x" * 10_000_000  # far more than the sockets hold
        thread = threading.Thread(target=sender.send, args=(large,))
        thread.start()
        assert receiver.take(wait=True) == [large]
        thread.join()
        ours.close()
        for wait in (True, False):
            with pytest.raises(EOFError):
                receiver.take(wait)
