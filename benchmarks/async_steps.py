"""How much of a decode step is not the model, with steps prepared one after the other and side by side.

    python benchmarks/async_steps.py models/k31-tiny /tmp/mini [--batch 1,8,32] [--steps 60] [--rounds 3]

A step is everything from one step of the engine to the next: scheduling, metadata, model, sampling, stop
checks, outputs with their text. "Outside" is what of it is neither model nor sampler. Asynchronous and
synchronous engines take turns, round by round; medians over steps and rounds. Greedy, text read as for a
server.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from longspan import SamplingParams
from longspan.engine.engine import Engine
from longspan.engine.options import EngineOptions
from longspan.engine.readers import TextReader, TokenReader
from longspan.engine.request import Request


class Measured:
    """One engine, and the steps that it has been timed for."""

    def __init__(self, path: Path, asynchronous: bool, batch: int) -> None:
        options = EngineOptions(
            async_scheduling=asynchronous, max_num_seqs=batch, max_model_len=2048, enable_prefix_caching=False
        )
        self.engine = Engine.from_path(path, options)
        self.batch = batch
        self.steps: list[float] = []
        self.models: list[float] = []
        self._count = 0

    def run(self, steps: int) -> None:
        """Times `steps` steps of a full batch, once all of it decodes."""
        engine = self.engine
        params = SamplingParams(temperature=0, max_tokens=steps + 8, ignore_eos=True)
        tokenizer = engine.tokenizer
        for _ in range(self.batch):
            self._count += 1
            prompt = [self._count % 200 + i for i in range(8)]
            reader = (lambda: TextReader(tokenizer, params)) if tokenizer else TokenReader
            engine.add(Request(f"r{self._count}", prompt, params, reader))
        for _ in range(6):
            engine.step()
        gc.collect()
        gc.disable()
        for _ in range(steps):
            before = engine.core.model_seconds
            began = time.perf_counter()
            engine.step()
            self.steps.append(time.perf_counter() - began)
            self.models.append(engine.core.model_seconds - before)
        gc.enable()
        while engine.has_work:
            engine.step()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("models", nargs="+", type=Path)
    parser.add_argument("--batch", default="1,8,32")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()

    table = Table("model", "batch", "steps", "ms/step", "model ms", "outside µs", "outside", "tokens/s")
    for path in args.models:
        for batch in map(int, args.batch.split(",")):
            engines = {name: Measured(path, name == "async", batch) for name in ("sync", "async")}
            for _ in range(args.rounds):
                for measured in engines.values():
                    measured.run(args.steps)
            for name, measured in engines.items():
                step, model = map(statistics.median, (measured.steps, measured.models))
                outside = statistics.median(
                    s - m for s, m in zip(measured.steps, measured.models, strict=True)
                )
                table.add_row(
                    path.name,
                    str(batch),
                    name,
                    f"{1e3 * step:.2f}",
                    f"{1e3 * model:.2f}",
                    f"{1e6 * outside:.0f}",
                    f"{100 * outside / step:.1f} %",
                    f"{batch / step:,.0f}",
                )
                measured.engine.core.close()
    Console().print(table)


if __name__ == "__main__":
    main()
