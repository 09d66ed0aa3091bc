"""vLLM's CPU worker, requests with a seed whose prompt takes several steps, and no compiler at work.

A step that ends within a prompt samples a token all the same, and throws it away. vLLM 0.32 then winds the
request's generator back, which CPU generators can't: the engine dies of "CPU Generator does not use offset".
Here the rows to be thrown away draw from the common generator, and those of the requests stay where they are.

vLLM compiles small functions of its sampler with inductor when a request first asks for log-probabilities or
top-p: a C++ compiler runs for ten seconds and more while everybody waits. Here they run as they are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from vllm.v1.worker.cpu_worker import CPUWorker

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import GrammarOutput
    from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput


class LongspanCpuWorker(CPUWorker):
    def init_device(self) -> None:
        torch.compiler.set_stance("force_eager")
        super().init_device()

    def sample_tokens(
        self, grammar_output: GrammarOutput | None
    ) -> ModelRunnerOutput | AsyncModelRunnerOutput | None:
        runner = self.model_runner
        generators = runner.input_batch.generators
        thrown_away = runner.discard_request_mask.np[: runner.input_batch.num_reqs].nonzero()[0].tolist()
        kept = {row: generators.pop(row) for row in thrown_away if row in generators}
        try:
            return super().sample_tokens(grammar_output)
        finally:
            generators.update(kept)
