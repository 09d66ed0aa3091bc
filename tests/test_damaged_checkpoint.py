"""Whatever is wrong with the files of a checkpoint: an error with a message, never a crash or a hang.

LONGSPAN_FUZZ multiplies the number of examples.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.random_checkpoint import write_checkpoint
from support.serving import finish, make_request
from support.tiny_chat import END_OF_MESSAGE, write_chat_checkpoint

from longspan.chat import Tokenizer
from longspan.config import load_config
from longspan.engine.engine import Engine
from longspan.engine.options import EngineOptions
from longspan.errors import LongspanError, NonFiniteError
from longspan.formats.inventory import totals
from longspan.formats.safetensors import INDEX_FILE, SINGLE_FILE, open_checkpoint, save_checkpoint
from longspan.inspect import inspect
from longspan.memory.plan import plan_memory

FUZZ = int(os.environ.get("LONGSPAN_FUZZ", "1"))

HUGE = [2**31 - 1, 2**31, 2**63, 10**30, 10**400, 1e300, 1e-300, float("nan"), float("inf")]
DEEP: Any = []
for _ in range(500):
    DEEP = [DEEP]
HOSTILE = st.one_of(
    st.sampled_from([None, True, False, 0, -1, 1, 2, 3, 64, "", "x", "0", [], {}, [0], [-1], {"a": 1}, DEEP]),
    st.sampled_from(HUGE),
    st.integers(-5, 100),
    st.floats(),
    st.text(max_size=4),
    st.lists(st.integers(-1, 9), max_size=6),
)


def fuzz(examples: int) -> Callable[[Any], Any]:
    return settings(max_examples=examples * FUZZ, suppress_health_check=[HealthCheck.function_scoped_fixture])


def refused_or(work: Callable[[], Any]) -> Any:
    """What `work` returns; None if it is refused, in words."""
    try:
        return work()
    except LongspanError as error:
        assert 10 < len(str(error)) < 20_000
        return None


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """(container, key) of everything in a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield value, key
        yield from places(inner)


def damage_json(data: st.DataObject, value: Any) -> Any:
    value = copy.deepcopy(value)
    for _ in range(data.draw(st.integers(1, 2))):
        if found := list(places(value)):
            container, key = data.draw(st.sampled_from(found))
            if data.draw(st.integers(0, 5)) == 0:
                del container[key]
            else:
                container[key] = copy.deepcopy(data.draw(HOSTILE))
    return value


def damage_bytes(data: st.DataObject, raw: bytes) -> bytes:
    damaged = bytearray(raw)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, max(len(damaged) - 1, 0)))
        match data.draw(st.sampled_from(["set", "mark", "insert", "delete", "repeat"])):
            case "set":
                damaged[at : at + 1] = bytes([data.draw(st.integers(0, 255))])
            case "mark":
                damaged[at : at + 1] = bytes([data.draw(st.sampled_from(b'0123456789[]{}",:-eE. \n'))])
            case "insert":
                damaged[at:at] = data.draw(st.binary(max_size=6))
            case "delete":
                del damaged[at : at + data.draw(st.integers(1, 40))]
            case "repeat":
                damaged[at:at] = damaged[at : at + data.draw(st.integers(1, 200))]
    return bytes(damaged)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small checkpoint with everything: experts packed, several shards, a tokenizer."""
    directory = write_chat_checkpoint(tmp_path_factory.mktemp("damaged") / "whole")
    checkpoint = open_checkpoint(directory)
    tensors = {name: checkpoint.tensor(name).clone() for name in checkpoint}
    (directory / SINGLE_FILE).unlink()
    save_checkpoint(tensors, directory, max_shard_bytes=200_000)
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [END_OF_MESSAGE]}))
    assert (directory / INDEX_FILE).exists()
    return directory


@pytest.fixture(scope="module", autouse=True)
def few_tensors_are_many() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("longspan.formats.check._MANY", 2000)
        yield


def look_at(directory: Path) -> None:
    """All that is done before weights are read, and no more."""
    refused_or(lambda: inspect(directory))
    refused_or(lambda: Tokenizer.from_dir(directory))
    if config := refused_or(lambda: load_config(directory)):
        refused_or(lambda: plan_memory(config, element_bytes=2, page_size=64, max_num_batched_tokens=64))


@contextmanager
def damaged(file: Path, damage: Callable[[bytes], bytes]) -> Iterator[None]:
    original = file.read_bytes()
    file.write_bytes(damage(original))
    try:
        yield
    finally:
        file.write_bytes(original)


def with_value(path: tuple[Any, ...], value: Any) -> Callable[[bytes], bytes]:
    """Sets one value of a JSON text."""

    def damage(raw: bytes) -> bytes:
        content = json.loads(raw)
        container = content
        for key in path[:-1]:
            container = container[key]
        container[path[-1]] = value
        return json.dumps(content).encode()

    return damage


def numbers_in(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths to all numbers in a JSON value."""
    if type(value) in (int, float):
        yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from numbers_in(inner, (*path, key))


@pytest.mark.parametrize("family", ["kimi-linear", "k3", "k31-pro"])
def test_no_number_in_a_config_makes_reading_it_endless(whole: Path, data_dir: Path, family: str) -> None:
    raw = (data_dir / "configs" / f"{family}.json").read_bytes()
    for path in numbers_in(json.loads(raw)):
        for number in (10**9, 10**400):
            with damaged(whole / "config.json", lambda _, path=path, n=number: with_value(path, n)(raw)):
                config = refused_or(lambda: load_config(whole))
                if config:
                    plan = {"element_bytes": 2, "page_size": 64, "max_num_batched_tokens": 64}
                    refused_or(lambda config=config, plan=plan: plan_memory(config, **plan))
                    totals(config)


def test_a_config_that_calls_for_any_number_of_experts_is_refused(whole: Path) -> None:
    with damaged(whole / "config.json", with_value(("text_config", "num_experts"), 10**9)):
        assert "lacks more than 2000 tensors" in inspect(whole)["weights"]["error"]


@fuzz(40)
@given(st.data())
def test_a_config_with_damaged_values_is_refused_or_understood(whole: Path, data: st.DataObject) -> None:
    with damaged(whole / "config.json", lambda raw: json.dumps(damage_json(data, json.loads(raw))).encode()):
        look_at(whole)


@fuzz(40)
@given(st.data(), st.sampled_from([INDEX_FILE, "tokenizer_config.json", "generation_config.json"]))
def test_json_files_with_damaged_values_are_refused_or_understood(
    whole: Path, data: st.DataObject, name: str
) -> None:
    with damaged(whole / name, lambda raw: json.dumps(damage_json(data, json.loads(raw))).encode()):
        look_at(whole)


@fuzz(50)
@given(st.data())
def test_files_with_damaged_bytes_are_refused_or_understood(whole: Path, data: st.DataObject) -> None:
    names = sorted(file.name for file in whole.iterdir())
    with damaged(whole / data.draw(st.sampled_from(names)), lambda raw: damage_bytes(data, raw)):
        look_at(whole)


@pytest.mark.parametrize("family", ["kimi-linear", "k3", "k3.1"])
@fuzz(5)
@given(st.data())
def test_weights_of_any_value_give_tokens_or_an_error(
    tmp_path: Path, family: str, data: st.DataObject
) -> None:
    """NaN, infinities and any bits at all, in any tensor, with the native operators too."""
    directory = write_checkpoint(tmp_path / family, family, packed=data.draw(st.booleans()))
    file = directory / SINGLE_FILE
    checkpoint = open_checkpoint(directory)
    name = data.draw(st.sampled_from(sorted(checkpoint.names)))
    info = checkpoint.info(name)
    bits = data.draw(st.sampled_from([b"\xff", b"\x7f", b"\x80\x7f", b"\x7f\x80", b"\x00", b"\xfe\xff"]))
    start = data.draw(st.integers(0, info.nbytes - 1))
    end = data.draw(st.integers(start + 1, info.nbytes))
    raw = bytearray(file.read_bytes())
    raw[info.start + start : info.start + end] = (bits * (end - start))[: end - start]
    file.write_bytes(raw)
    backend = data.draw(st.sampled_from([None, "torch"]))
    options = EngineOptions(
        dtype=data.draw(st.sampled_from(["float32", "bfloat16"])), backend=backend, max_model_len=64,
        max_num_seqs=2, cache_gib=0.01, page_size=4, max_num_batched_tokens=16,
    )  # fmt: skip
    engine = Engine.from_path(directory, options)
    for i in range(2):
        engine.add(make_request(f"r{i}", list(range(3, 30)), max_tokens=3))
    answers = finish(engine)
    assert len(answers) == 2
    for answer in answers.values():
        assert answer.reason in ("length", "error")
        assert answer.reason == "length" or isinstance(answer.finish.error, NonFiniteError)
