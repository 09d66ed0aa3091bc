"""Text in and out: tokenizer, XTML prompts, replies read back, forced tool calls."""

from longspan.chat.render import DEFAULT_EFFORT, EFFORTS, ImageSlot, render
from longspan.chat.tokenizer import IncrementalDecoder, Tokenizer
from longspan.chat.xtml import Segment

__all__ = [
    "DEFAULT_EFFORT",
    "EFFORTS",
    "ImageSlot",
    "IncrementalDecoder",
    "Segment",
    "Tokenizer",
    "render",
]
