"""Stop strings across pieces."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longspan.chat import StopMatcher


def run(stops: list[str], pieces: list[str], *, include: bool = False) -> tuple[str, str | None]:
    matcher = StopMatcher(stops, include=include)
    text = "".join(matcher.push(piece)[0] for piece in pieces)
    return text + matcher.flush(), matcher.matched


def slow(stops: list[str], text: str, include: bool) -> tuple[str, str | None]:
    """One character at a time: stop once the text ends in a stop string, the longest of several."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if stop and text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


@given(
    st.lists(st.text("ab", max_size=4), max_size=3),
    st.lists(st.text("abc", max_size=5), max_size=8),
    st.booleans(),
)
@settings(max_examples=500)
def test_every_split_stops_at_the_same_place(stops, pieces, include):
    expected = slow(stops, "".join(pieces), include)
    assert run(stops, pieces, include=include) == expected
    assert run(stops, list("".join(pieces)), include=include) == expected


def test_only_what_may_become_a_stop_string_is_held_back():
    matcher = StopMatcher(["END"])
    assert matcher.push("the E") == ("the ", None)
    assert matcher.push("N") == ("", None)
    assert matcher.push("ormous EN") == ("ENormous ", None)
    assert matcher.push("D of it") == ("", "END")
    assert matcher.push("more") == ("", "END") and matcher.flush() == ""


@pytest.mark.parametrize(("include", "text"), [(True, "a\n\nb STOP"), (False, "a\n\nb ")])
def test_the_stop_string_is_kept_only_if_asked_for(include, text):
    for split in itertools.pairwise(range(12)):
        pieces = ["a\n\nb STOP c"[: split[0]], "a\n\nb STOP c"[split[0] :]]
        assert run(["STOP"], pieces, include=include) == (text, "STOP")


def test_without_stop_strings_everything_passes_at_once():
    assert StopMatcher([""]).push("text") == ("text", None)
