"""The XTML markup of Kimi K3: control tokens, segments, and tags out and in.

A prompt is a list of segments, each tokenised on its own. Only a segment with `special=True` may yield
control ids, and only this module and `render` make such segments, so no user's text becomes markup.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

OPEN = "<|open|>"
CLOSE = "<|close|>"
SEP = "<|sep|>"
END_OF_MSG = "<|end_of_msg|>"
CONTROL_TOKENS = (OPEN, CLOSE, SEP, END_OF_MSG)

IMAGE_PLACEHOLDER = "<|kimi_image_placeholder|>"  # ordinary text, not a token


@dataclass(frozen=True, slots=True)
class Segment:
    """A stretch of prompt that is tokenised alone; `special` = control tokens are recognised in it."""

    text: str
    special: bool = False


_OPEN, _CLOSE, _SEP, _END_OF_MSG = (Segment(token, special=True) for token in CONTROL_TOKENS)
_EQUALS, _QUOTE = Segment('="'), Segment('"')


def text(body: str) -> list[Segment]:
    """Body text, never escaped; nothing where it is empty."""
    return [Segment(body)] if body else []


def open_tag(name: str, attributes: list[tuple[str, str]] | None = None) -> list[Segment]:
    segments = [_OPEN, Segment(name)]
    for key, value in attributes or ():
        segments += [Segment(f" {key}"), _EQUALS, *text(escape(value)), _QUOTE]
    return [*segments, _SEP]


def close_tag(name: str) -> list[Segment]:
    return [_CLOSE, Segment(name), _SEP]


def element(name: str, attributes: list[tuple[str, str]], body: list[Segment]) -> list[Segment]:
    return [*open_tag(name, attributes), *body, *close_tag(name)]


def message(attributes: list[tuple[str, str]], body: list[Segment]) -> list[Segment]:
    return [*element("message", attributes, body), _END_OF_MSG]


def image(width: int, height: int, num_tokens: int) -> Segment:
    """One image of `width` x `height` pixels (before resizing) that takes `num_tokens` rows of features."""
    pads = "<|media_pad|>" * num_tokens
    return Segment(f"<|media_begin|>image {width}x{height}<|media_content|>{pads}<|media_end|>", special=True)


def escape(value: str) -> str:
    return value.replace("&", "&amp;").replace('"', "&quot;")


def unescape(value: str) -> str:
    return value.replace("&quot;", '"').replace("&amp;", "&")


# A missing closing quote or blanks around "=" are a slip of the model, not a reason to lose a call.
_ATTRIBUTE = re.compile(r'\s*([^\s="]+)\s*=\s*"([^"]*)"?')


def parse_tag(header: str) -> tuple[str, dict[str, str], str]:
    """What stands between open (or close) and sep -> name or "", attributes unescaped, text beside them."""
    name = (header.split(maxsplit=1) or [""])[0]
    rest = header[header.index(name) + len(name) :]
    attributes = {key: unescape(value) for key, value in _ATTRIBUTE.findall(rest)}
    return name, attributes, _ATTRIBUTE.sub("", rest)
