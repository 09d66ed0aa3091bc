"""Replies in vLLM's server, read by `longspan.chat`'s parser: the messages of `longspan serve`.

The two parsers go together. A reply that begins in the think channel is read by the reasoning parser up to
the tag that ends that channel; from that tag on, and from the start where a prompt opened the response, the
tool parser reads. Both are fed text, after vLLM has cut it at stop strings. They work on what streams in, so
vLLM is told that they are "engine based": it keeps no text of its own, and asks for the rest at the end.

A constraint on the answer (JSON schema, choice, ...) is one on the body of the response channel: it becomes a
structural tag with the channel's own tags around it. What forced or strict tools need, vLLM writes by itself.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from vllm.entrypoints.generate.base.protocol import (
    DeltaFunctionCall,
    DeltaMessage,
    DeltaToolCall,
    ExtractedToolCallInformation,
    FunctionCall,
    ToolCall,
)
from vllm.exceptions import VLLMValidationError
from vllm.parser.abstract_parser import structured_outputs_to_format
from vllm.reasoning import ReasoningParser
from vllm.sampling_params import StructuredOutputsParams
from vllm.tool_parsers import ToolParser
from vllm.tool_parsers.tool_strict_level import ToolStrictLevel
from xgrammar import StructuralTag
from xgrammar.structural_tag import (
    AnyTextFormat,
    ConstStringFormat,
    JSONSchemaFormat,
    OptionalFormat,
    SequenceFormat,
)

from longspan.chat import (
    ContentDelta,
    Event,
    ReasoningDelta,
    ReplyParser,
    Tokenizer,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
)
from longspan.chat.stop import held_suffix
from longspan.chat.xtml import CLOSE, CONTROL_TOKENS, OPEN, SEP, parse_tag
from longspan.plugin_vllm.tokenizer import MARKERS, LongspanTokenizer, Markup

_END_OF_THINKING = {(CLOSE, "think"), (CLOSE, "message"), (CLOSE, "tools")} | {
    (OPEN, name) for name in ("response", "tools", "call")
}
_RESPONSE_OPENS, _RESPONSE_CLOSES = f"{OPEN}response{SEP}", f"{CLOSE}response{SEP}"
_MAX_BLANKS = 17  # between two tokens of JSON: a weak model fills its budget with blanks if it may


class LongspanReasoningParser(ReasoningParser):
    engine_based_streaming = True

    def __init__(self, tokenizer: Any, *args: Any, **kwargs: Any) -> None:
        """Raises TypeError for another's tokenizer, CheckpointError for one without Kimi K3's chat tokens."""
        super().__init__(tokenizer, *args, **kwargs)
        self._base = _base(tokenizer)
        self._options: dict[str, Any] = kwargs.get("chat_template_kwargs") or {}
        self._thinking = _Thinking(self._base)
        self._began_thinking = False

    # What vLLM's engine asks: constraints wait until the thinking is over, and a budget ends it.

    @property
    def reasoning_start_str(self) -> str:
        return Markup(f"{OPEN}think{SEP}")

    @property
    def reasoning_end_str(self) -> str:
        return Markup(f"{CLOSE}think{SEP}")

    def is_reasoning_end(self, input_ids: Sequence[int]) -> bool:
        """Whether the newest tag that says where we are says: not in the think channel.

        Without any such tag the text is no chat, and nothing in it is reasoning.
        """
        end = len(input_ids)
        while (tag := self._tag_before(input_ids, end)) is not None:
            end, kind, name = tag
            if (kind, name) == (OPEN, "think"):
                return False
            if (kind, name) in _END_OF_THINKING:
                return True
        return True

    def is_reasoning_end_streaming(self, input_ids: Sequence[int], delta_ids: Iterable[int]) -> bool:
        return self._base.special_id(SEP) in delta_ids and self.is_reasoning_end(input_ids)

    def _tag_before(self, ids: Sequence[int], end: int) -> tuple[int, str, str] | None:
        """The last complete tag of ids[:end]: where it starts, whether it opens or closes, its name."""
        special = self._base.special
        sep = None
        for i in range(end - 1, -1, -1):
            if ids[i] == special[SEP]:
                sep = i
            elif sep is not None and ids[i] in (special[OPEN], special[CLOSE]):
                header = self._base.decode(ids[j] for j in range(i + 1, sep))
                return i, OPEN if ids[i] == special[OPEN] else CLOSE, parse_tag(header)[0]
        return None

    def extract_content_ids(self, input_ids: list[int]) -> list[int]:
        return []  # the tool parser reads text

    def count_reasoning_tokens(self, token_ids: Sequence[int]) -> int:
        if not self._began_thinking:
            return 0
        controls = {self._base.special[token] for token in CONTROL_TOKENS}
        return next((i for i, token_id in enumerate(token_ids) if token_id in controls), len(token_ids))

    # What vLLM's server asks.

    def adjust_initial_state_from_prompt(self, prompt_token_ids: Sequence[int]) -> None:
        """Called where the prompt ends in the think channel."""
        self._began_thinking = True

    def extract_reasoning(self, model_output: str, request: Any) -> tuple[str | None, str | None]:
        self._began_thinking = self._begins_thinking(request)
        if not self._began_thinking:
            return None, model_output
        events, rest = self._thinking.push(model_output)
        if rest is None:
            events += self._thinking.finish()
            rest = self._thinking.cut_tag
        message = _message(events)
        return (message.reasoning if message else None), rest

    def extract_reasoning_streaming(
        self, previous_text: str, current_text: str, delta_text: str, *ids: Sequence[int]
    ) -> DeltaMessage | None:
        events, rest = self._thinking.push(delta_text)
        message = _message(events)
        if rest is not None:
            message = message or DeltaMessage()
            message.content = rest
        return message

    def has_engine_confirmed_reasoning_end(self) -> bool:
        return self._thinking.over

    def finish_streaming(self) -> DeltaMessage | None:
        return _message(self._thinking.finish())

    def adjust_request(self, request: Any) -> Any:
        """Control tokens shall arrive as text; an answer's constraint becomes one on the response's body.

        Raises VLLMValidationError where an answer that has begun is to be continued under a constraint.
        """
        request.skip_special_tokens = False
        if hasattr(request, "spaces_between_special_tokens"):
            request.spaces_between_special_tokens = False
        constraint = request.extract_structured_outputs()
        if constraint is None or constraint.structural_tag is not None:
            return request
        if _continued_answer(self._options, request):
            raise VLLMValidationError(
                "An answer that has begun can't be continued under a constraint. Leave one of them out.",
                parameter="continue_final_message",
            )
        request.structured_outputs = StructuredOutputsParams(
            structural_tag=json.dumps(self._tag(constraint, request).model_dump())
        )
        if hasattr(request, "response_format"):
            request.response_format = None
        else:
            request.text = None  # where a Responses request has it
        return request

    def _tag(self, constraint: StructuredOutputsParams, request: Any) -> StructuralTag:
        body = structured_outputs_to_format(constraint)
        if isinstance(body, JSONSchemaFormat):
            body.max_whitespace_cnt = _MAX_BLANKS
        elements: list[Any] = [body, ConstStringFormat(value=_RESPONSE_CLOSES), AnyTextFormat()]
        if self._begins_thinking(request):
            opens = ConstStringFormat(value=_RESPONSE_OPENS)
            # Without reasoning in the reply vLLM constrains from the first token on: no thinking then.
            elements.insert(0, OptionalFormat(content=opens) if request.include_reasoning else opens)
        return StructuralTag(format=SequenceFormat(elements=elements))

    def _begins_thinking(self, request: Any) -> bool:
        switches = (self._options.get(name, True) for name in ("thinking", "enable_thinking"))
        on = all(switch is not False for switch in switches)
        return (
            on
            and self._options.get("reasoning_effort") != "none"
            and not (_continued_answer(self._options, request))
        )


class LongspanToolParser(ToolParser):
    engine_based_streaming = True
    supports_required_and_named = False  # calls are read from XTML, forced or not
    structural_tag_model = "kimi_k3"

    def __init__(self, tokenizer: Any, tools: list[Any] | None = None) -> None:
        """Raises as the reasoning parser."""
        super().__init__(tokenizer, tools)
        self._base = _base(tokenizer)
        self._parser: ReplyParser | None = None

    def adjust_request(self, request: Any) -> Any:
        return request

    def get_structural_tag(
        self, request: Any, *, reasoning: bool = False, strict_level: ToolStrictLevel = ToolStrictLevel.AUTO
    ) -> StructuralTag | None:
        """A call that is forced satisfies its schema, whether or not its tool is declared `strict`."""
        if request.tool_choice != "auto":
            strict_level = ToolStrictLevel.PARAMETER
        return super().get_structural_tag(request, reasoning=reasoning, strict_level=strict_level)

    def extract_tool_calls(self, model_output: str, request: Any) -> ExtractedToolCallInformation:
        parser = self._started(model_output)
        parser.push_text(model_output)
        parser.finish()
        reply = parser.reply
        calls = [
            ToolCall(
                id=call.id, type="function", function=FunctionCall(name=call.name, arguments=call.arguments)
            )
            for call in reply.tool_calls
        ]
        return ExtractedToolCallInformation(tools_called=bool(calls), tool_calls=calls, content=reply.content)

    def extract_tool_calls_streaming(
        self,
        previous_text: str,
        current_text: str,
        delta_text: str,
        previous_token_ids: Sequence[int],
        current_token_ids: Sequence[int],
        delta_token_ids: Sequence[int],
        request: Any,
    ) -> DeltaMessage | None:
        if self._parser is None:
            self._parser = self._started(delta_text)
        return _message(self._parser.push_text(delta_text))

    def finish_streaming(self) -> DeltaMessage | None:
        return _message(self._parser.finish()) if self._parser else None

    def _started(self, text: str) -> ReplyParser:
        """In the think channel if the first thing is the tag that ends it."""
        return ReplyParser(self._base, thinking=text.startswith(f"{CLOSE}think"))


class _Thinking:
    """Reads the think channel, and hands over the text from the tag on that ends it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._parser = ReplyParser(tokenizer, thinking=True)
        self._held = ""  # maybe the start of a marker
        self._tag = ""  # the tag that has begun
        self.cut_tag: str | None = None  # what `finish` read as the end of the channel

    @property
    def over(self) -> bool:
        return self._parser.channel != "think"

    def push(self, text: str) -> tuple[list[Event], str | None]:
        """-> (events of the channel, what comes after it or None)."""
        text = self._held + text
        keep = len(text) - held_suffix(text, CONTROL_TOKENS)
        self._held = text[keep:]
        events: list[Event] = []
        pieces = [piece for piece in MARKERS.split(text[:keep]) if piece]
        for i, piece in enumerate(pieces):
            new = [e for e in self._parser.push_text(piece) if isinstance(e, ReasoningDelta)]
            events += new
            if self.over:
                tag = "" if new else self._tag  # a tag that turned out to be text has been read
                return events, "".join([tag, *pieces[i:], self._held])
            if piece in (OPEN, CLOSE):
                self._tag = piece
            elif self._tag:
                self._tag = "" if piece == SEP else self._tag + piece
        return events, None

    def finish(self) -> list[Event]:
        """What was held back, where the reply is cut off in the channel, or in the tag that would end it."""
        if self.over:
            return []
        events = self._parser.push_text(self._held) + self._parser.finish()
        if not all(isinstance(event, ReasoningDelta) for event in events):
            self.cut_tag = self._tag + self._held
        return events


def _base(tokenizer: Any) -> Tokenizer:
    if not isinstance(tokenizer, LongspanTokenizer):
        raise TypeError("Longspan's parsers need its tokenizer: --tokenizer-mode longspan")
    for token in CONTROL_TOKENS:
        tokenizer.base.special_id(token)
    return tokenizer.base


def _continued_answer(options: dict[str, Any], request: Any) -> bool:
    """Whether the prompt ends in an answer that the reply continues."""
    messages = getattr(request, "messages", None)
    last = messages[-1] if messages and options.get("continue_final_message") else None
    return isinstance(last, dict) and bool(last.get("content"))


def _message(events: list[Event]) -> DeltaMessage | None:
    """Events as one delta of OpenAI's; None where there is nothing to say."""
    reasoning, content = "", ""
    calls: dict[int, DeltaToolCall] = {}
    for event in events:
        match event:
            case ReasoningDelta(text):
                reasoning += text
            case ContentDelta(text):
                content += text
            case ToolCallStart(index, call_id, name):
                function = DeltaFunctionCall(name=name, arguments="")
                calls[index] = DeltaToolCall(index=index, id=call_id, type="function", function=function)
            case ToolCallArguments(index, text):
                new = DeltaToolCall(index=index, function=DeltaFunctionCall(arguments=""))
                function = calls.setdefault(index, new).function
                assert function is not None
                function.arguments = (function.arguments or "") + text
            case ToolCallEnd():
                pass  # OpenAI's protocol has no mark for it
    if not (reasoning or content or calls):
        return None
    return DeltaMessage(reasoning=reasoning or None, content=content or None, tool_calls=list(calls.values()))
