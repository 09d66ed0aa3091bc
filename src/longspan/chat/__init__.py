"""Text in and out: tokenizer, XTML prompts, replies read back."""

from longspan.chat.check import check_messages
from longspan.chat.render import DEFAULT_EFFORT, EFFORTS, ImageSlot, render
from longspan.chat.reply import (
    ContentDelta,
    Event,
    ReasoningDelta,
    Reply,
    ToolCall,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
    collect,
)
from longspan.chat.reply_parser import ReplyParser
from longspan.chat.stop import StopMatcher
from longspan.chat.tokenizer import IncrementalDecoder, Tokenizer
from longspan.chat.tool_choice import Function, declared_functions, forced_functions
from longspan.chat.xtml import Segment

__all__ = [
    "DEFAULT_EFFORT",
    "EFFORTS",
    "ContentDelta",
    "Event",
    "Function",
    "ImageSlot",
    "IncrementalDecoder",
    "ReasoningDelta",
    "Reply",
    "ReplyParser",
    "Segment",
    "StopMatcher",
    "Tokenizer",
    "ToolCall",
    "ToolCallArguments",
    "ToolCallEnd",
    "ToolCallStart",
    "check_messages",
    "collect",
    "declared_functions",
    "forced_functions",
    "render",
]
