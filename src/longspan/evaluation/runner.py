"""`longspan eval`: what share of fresh questions a checkpoint answers exactly, greedily decoded.

Every question is a single-turn request (a tool result has its call before it), rendered as the server renders
it by default: think channel on, effort "max". Retrieval is asked at several context lengths; English is
measured in bits per byte on text that was never trained on.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from longspan.errors import RequestError
from longspan.evaluation import skills, tool_skill
from longspan.evaluation.skills import Request
from longspan.evaluation.text import Text

SKILLS = ("retrieval", "copy", "addition", "tool_call", "tool_result", "short_answer", "english")
LENGTHS = (512, 1024, 2048, 4096, 16384)
MAX_TOKENS = 256
BATCH_TOKENS = 65536  # requests answered together hold about so many prompt tokens
ENGLISH_WINDOW = 1024


@dataclass(frozen=True)
class Row:
    """One line of the table. `well_formed`: the model ended its turn, after a non-empty think channel."""

    skill: str
    length: int | None
    samples: int
    exact: float | None  # percent
    well_formed: float | None
    bits_per_byte: float | None
    seconds: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="folder of the checkpoint")
    parser.add_argument(
        "--skills", default=",".join(SKILLS), metavar="A,B", help=f"of {', '.join(SKILLS)} (default: all)"
    )
    parser.add_argument(
        "--samples", type=int, default=50, metavar="N", help="questions per skill (default: %(default)s)"
    )
    parser.add_argument(
        "--lengths",
        default=",".join(map(str, LENGTHS)),
        metavar="N,N",
        help="context lengths of retrieval in tokens; fewer questions beyond 4096 (default: %(default)s)",
    )
    parser.add_argument("--seed", type=int, default=2026, help="seed of the questions (default: %(default)s)")
    parser.add_argument("--text", type=Path, help="plain English, default: heldout.txt in the model's folder")
    parser.add_argument("--dtype", default="bfloat16", help="as of `longspan serve` (default: %(default)s)")
    parser.add_argument(
        "--show-mistakes", type=int, default=0, metavar="N", help="print up to N mistakes per skill"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--output", type=Path, help="also write the JSON to this file")


def main(args: argparse.Namespace) -> int:
    chosen = _names(args.skills)
    lengths = _lengths(args.lengths)
    text = _text(args.text or Path(args.model) / "heldout.txt")
    if args.samples < 1:
        raise RequestError(f"--samples is {args.samples}.", remedy="Ask at least 1 question.")
    from longspan import LLM

    evaluation = Evaluation(LLM(args.model, dtype=args.dtype), text, args.seed, args.show_mistakes)
    rows = list(evaluation.rows(chosen, args.samples, lengths))
    document = json.dumps(
        {"model": args.model, "seed": args.seed, "rows": [asdict(r) for r in rows]}, indent=1
    )
    if args.output:
        args.output.write_text(document + "\n", encoding="utf-8")
    if args.json:
        print(document)
    else:
        _print_table(args.model, rows)
    return 0


class Evaluation:
    def __init__(self, llm: Any, text: Text, seed: int, show_mistakes: int = 0) -> None:
        self.llm = llm
        self.text = text
        self.seed = seed
        self.show_mistakes = show_mistakes

    def rows(self, chosen: list[str], samples: int, lengths: list[int]) -> Iterator[Row]:
        for skill in chosen:
            if skill == "english":
                yield self.english()
            elif skill == "retrieval":
                for length in lengths:
                    count = samples if length <= 4096 else max(1, samples * 4096 // length)
                    yield self.row(skill, count, length)
            else:
                yield self.row(skill, samples, None)

    def row(self, skill: str, samples: int, length: int | None) -> Row:
        began = time.monotonic()
        requests = fresh_requests(skill, samples, self.text, self.seed, length, self._size)
        exact = well_formed = mistakes = 0
        for request, reply in self._answers(requests, length or 256):
            right = request.turn.check(reply)
            exact += right
            well_formed += reply.finish_reason in ("stop", "tool_calls") and bool(reply.reasoning)
            if not right and mistakes < self.show_mistakes:
                mistakes += 1
                _print_mistake(request, reply)
        seconds = time.monotonic() - began
        return Row(skill, length, samples, 100 * exact / samples, 100 * well_formed / samples, None, seconds)

    def _size(self, text: str) -> int:
        return len(self.llm.tokenizer.encode(text))

    def _answers(self, requests: list[Request], length: int) -> Iterator[tuple[Request, Any]]:
        """Requests that declare no tools are answered many at a time."""
        from longspan import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
        size = 1 if requests[0].tools else max(1, BATCH_TOKENS // length)
        for start in range(0, len(requests), size):
            group = requests[start : start + size]
            results = self.llm.chat(
                [r.messages for r in group],
                params,
                tools=group[0].tools,
                thinking=group[0].thinking,
                thinking_effort=group[0].thinking_effort,
                use_progress=False,
            )
            for request, result in zip(group, results, strict=True):
                yield request, result.outputs[0]

    def english(self) -> Row:
        """Bits per byte over windows that each start without context, as `bits_per_byte` describes."""
        from longspan import SamplingParams

        began = time.monotonic()
        ids = self.llm.tokenizer.encode(self.text.body.replace("\n", " "))
        windows = [ids[i : i + ENGLISH_WINDOW] for i in range(0, len(ids), ENGLISH_WINDOW)]
        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
        nats, size = 0.0, 0
        for window, result in zip(
            windows, self.llm.generate(windows, params, use_progress=False), strict=True
        ):
            pairs = list(zip(window, result.prompt_logprobs, strict=True))[1:]
            nats -= sum(logprobs[token].logprob for token, logprobs in pairs)
            size += len(self.llm.tokenizer.decode(window[1:]).encode())
        return Row(
            "english", None, len(windows), None, None, nats / math.log(2) / size, time.monotonic() - began
        )


def fresh_requests(
    skill: str, samples: int, text: Text, seed: int, length: int | None, size: Callable[[str], int]
) -> list[Request]:
    """The questions of one row; the same for the same arguments."""
    rng = random.Random(f"{skill} {length} {seed}")
    return [_request(skill, rng, text, length, size) for _ in range(samples)]


def _request(
    skill: str, rng: random.Random, text: Text, length: int | None, size: Callable[[str], int]
) -> Request:
    match skill:
        case "retrieval":
            return Request(skills.retrieval(rng, text, length or 512, size)[0])
        case "copy":
            return Request(skills.copy(rng, text)[0])
        case "addition":
            return Request(skills.addition(rng)[0])
        case "short_answer":
            return Request(skills.short_answer(rng)[0])
    declared = tool_skill.declare(rng, rng.randrange(1, 4))
    ask, told = tool_skill.call(rng, declared)
    tools = [d.tool for d in declared]
    if skill == "tool_call":
        return Request(ask, tools=tools)
    return Request(told, history=[*ask.messages, ask.answer], tools=tools)


def _names(given: str) -> list[str]:
    chosen = [name.strip() for name in given.split(",") if name.strip()]
    for name in chosen:
        if name not in SKILLS:
            raise RequestError(f"--skills names {name!r}.", remedy=f"Choose from {', '.join(SKILLS)}.")
    return chosen


def _lengths(given: str) -> list[int]:
    try:
        lengths = [int(part) for part in given.split(",") if part.strip()]
    except ValueError:
        lengths = []
    if not lengths or min(lengths) < 128:
        raise RequestError(
            f"--lengths is {given!r}.", remedy="Give token counts of at least 128, as in 2048,16384."
        )
    return lengths


def _text(path: Path) -> Text:
    if not path.is_file():
        raise RequestError(f"There is no text {path}.", remedy="Name a file of plain English with --text.")
    return Text.read(path)


def _print_mistake(request: Request, reply: Any) -> None:
    print(f"[{request.turn.skill}] ...{request.turn.messages[-1]['content'][-160:]!r}")
    print(f"  expected {request.turn.answer.get('tool_calls') or request.turn.answer['content']!r}")
    print(f"  thought  {reply.reasoning!r}\n  said     {reply.tool_calls or reply.content!r}", flush=True)


def _print_table(model: str, rows: list[Row]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"longspan eval {model}")
    for column in ("skill", "context", "n", "exact match", "well formed", "bits/byte", "seconds"):
        table.add_column(column, justify="left" if column == "skill" else "right")
    for row in rows:
        table.add_row(
            row.skill,
            "" if row.length is None else str(row.length),
            str(row.samples),
            "" if row.exact is None else f"{row.exact:.1f} %",
            "" if row.well_formed is None else f"{row.well_formed:.1f} %",
            "" if row.bits_per_byte is None else f"{row.bits_per_byte:.3f}",
            f"{row.seconds:.1f}",
        )
    Console().print(table)
