"""`longspan generate`: one prompt or question, answered on the terminal as it comes."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longspan.engine.options import EngineOptions, add_engine_arguments
from longspan.errors import RequestError

if TYPE_CHECKING:
    from longspan.engine.engine import Engine
    from longspan.engine.request import Request

_SAMPLING_FLAGS: dict[str, tuple[type, str]] = {
    "temperature": (float, "0 always takes the likeliest token (default: 1)"),
    "top_p": (float, "keep the likeliest tokens that have this share together (default: 1)"),
    "top_k": (int, "keep this many of the likeliest tokens (default: all)"),
    "min_p": (float, "keep tokens at least this likely, relative to the likeliest (default: 0)"),
    "presence_penalty": (float, "against tokens that came before (default: 0)"),
    "frequency_penalty": (float, "against tokens, by how often they came before (default: 0)"),
    "repetition_penalty": (float, "against tokens of prompt and reply, 1 = none (default: 1)"),
    "max_tokens": (int, "length of the reply (default: 256 of a prompt, else until it ends)"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", type=Path, help="checkpoint directory in the published format")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--chat", metavar="QUESTION", help="a user's message to answer; - reads it from stdin")
    what.add_argument("--prompt", metavar="TEXT", help="a plain text to continue; - reads it from stdin")
    chat = parser.add_argument_group("chat")
    chat.add_argument(
        "--thinking",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="think before answering (default: yes)",
    )
    chat.add_argument(
        "--effort", choices=("low", "high", "max"), default="max", help="of thinking (default: max)"
    )
    chat.add_argument("--system", metavar="TEXT", help="a system message")
    sampling = parser.add_argument_group("sampling")
    for name, (kind, text) in _SAMPLING_FLAGS.items():
        sampling.add_argument(f"--{name.replace('_', '-')}", type=kind, metavar="X", help=text)
    sampling.add_argument("--stop", nargs="+", metavar="TEXT", help="end the answer before any of these")
    add_engine_arguments(parser)


def main(args: argparse.Namespace) -> int:
    """Streams the reply to stdout, reasoning dimmed. Raises LongspanError."""
    from longspan.engine.engine import Engine

    engine = Engine.from_path(args.model, EngineOptions.from_args(args))
    request = _request(engine, args)
    engine.add(request)
    screen = _Screen()
    cut_off = False
    try:
        while engine.has_work:
            for output in engine.step():
                for delta in output.deltas:
                    screen.show(delta)
                if output.finish and output.finish.error:
                    raise output.finish.error
                if output.finish:
                    cut_off = output.finish.reason == "length"
    finally:
        screen.close()
    if cut_off:
        limit = request.params.max_tokens
        why = f"--max-tokens {limit}" if limit else f"the end of the context of {engine.max_model_len} tokens"
        print(f"longspan generate: the text is cut off by {why}", file=sys.stderr)
    return 0


def _request(engine: Engine, args: argparse.Namespace) -> Request:
    from longspan.chat import ReplyParser, render
    from longspan.engine.readers import ChatReader, TextReader
    from longspan.engine.request import Request, SamplingParams

    tokenizer = engine.tokenizer
    if tokenizer is None:
        raise RequestError(
            "This checkpoint has no tokenizer.", remedy="Put its tiktoken.model beside the weights."
        )
    given = {name: value for name in _SAMPLING_FLAGS if (value := getattr(args, name)) is not None}
    sampling: dict[str, Any] = {"max_tokens": None if args.chat else 256, "stop": args.stop} | given
    params = SamplingParams(**sampling)
    if args.prompt is not None:
        return Request(
            "generate", tokenizer.encode(_text(args.prompt)), params, lambda: TextReader(tokenizer, params)
        )
    messages = [{"role": "system", "content": args.system}] if args.system else []
    messages.append({"role": "user", "content": _text(args.chat)})
    effort = args.effort if args.thinking else None
    ids = tokenizer.encode_segments(render(messages, thinking=args.thinking, thinking_effort=effort))
    return Request(
        "generate", ids, params, lambda: ChatReader(ReplyParser(tokenizer, thinking=args.thinking), params)
    )


def _text(argument: str) -> str:
    return sys.stdin.read().rstrip("\n") if argument == "-" else argument


class _Screen:
    """Prints deltas. Reasoning is dim on a terminal and goes to stderr otherwise: a pipe gets the answer."""

    def __init__(self) -> None:
        self._dim = False
        self._in_reasoning = False  # on stderr

    def show(self, delta: Any) -> None:
        from longspan.chat import ReasoningDelta, ToolCallArguments, ToolCallStart

        match delta:
            case ReasoningDelta(text):
                self._write_reasoning(text)
            case ToolCallStart(name=name):
                self._write(f"\n[call {name}] ")
            case ToolCallArguments(text=text):
                self._write(text)
            case _:
                self._write(getattr(delta, "text", ""))

    def close(self) -> None:
        self._write("\n")

    def _write_reasoning(self, text: str) -> None:
        if not sys.stdout.isatty():
            print(text, end="", file=sys.stderr, flush=True)
            self._in_reasoning = True
            return
        if not self._dim:
            self._dim = True
            sys.stdout.write("\033[2m")
        sys.stdout.write(text)
        sys.stdout.flush()

    def _write(self, text: str) -> None:
        if self._dim:
            self._dim = False
            sys.stdout.write("\033[0m\n")
        if self._in_reasoning:
            self._in_reasoning = False
            print(file=sys.stderr, flush=True)
        sys.stdout.write(text)
        sys.stdout.flush()
