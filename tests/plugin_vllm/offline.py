"""Answers of vLLM's `LLM` with our model, in a process of its own: what it keeps is global, and ranks differ.

    python -m plugin_vllm.offline JOB.json ANSWERS.json

A job is {"checkpoint", "options": keywords of LLM, "rounds": [[prompt, ..], ..], "max_tokens",
"sampling_seed": null for greedy answers}; the prompts of a round go in together. The answers are
{"rounds": [[{"token_ids", "logprobs", "cached"}, ..], ..], "preemptions", "asynchronous", "held": what each
rank holds, see `Worker`}.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from support.weight_bytes import weight_tensors
from vllm import LLM, SamplingParams

from longspan.ops.batch import KdaView, MlaView
from longspan.parallel.layout import share


def main(job_file: str, answers_file: str) -> None:
    job = json.loads(Path(job_file).read_text())
    options: dict[str, Any] = {
        "dtype": "float32",
        "max_model_len": 1024,
        "kv_cache_memory_bytes": 64 << 20,
        "skip_tokenizer_init": True,
        "enable_prefix_caching": False,
        "disable_log_stats": False,
        "seed": 0,
        "worker_extension_cls": "plugin_vllm.offline.Worker",
    }
    llm = LLM(job["checkpoint"], **(options | job["options"]))
    seed = job["sampling_seed"]
    params = SamplingParams(
        temperature=0 if seed is None else 1,
        seed=seed,
        max_tokens=job["max_tokens"],
        logprobs=0,
        ignore_eos=True,
        detokenize=False,
    )
    rounds = [[_answer(o) for o in llm.generate(_prompts(r), params, use_tqdm=False)] for r in job["rounds"]]
    preemptions = sum(m.value for m in llm.get_metrics() if m.name == "vllm:num_preemptions")
    held = llm.collective_rpc("held_bytes")
    ahead = llm.llm_engine.vllm_config.scheduler_config.async_scheduling
    answers = {"rounds": rounds, "preemptions": preemptions, "asynchronous": ahead, "held": held}
    Path(answers_file).write_text(json.dumps(answers))


class Worker:
    """What vLLM mixes into its workers for the tests."""

    def held_bytes(self) -> dict[str, int]:
        """Bytes of the weights that this rank asks for, of a block's pages and of a KDA state, all layers."""
        model = self.model_runner.model  # pyright: ignore[reportAttributeAccessIssue]
        views = [cache.view for cache in model.caches]
        pages = [part for v in views if isinstance(v, MlaView) for part in (v.latent, v.index_key)]
        states = [part for v in views if isinstance(v, KdaView) for part in (v.state, v.conv)]
        own = share(model.layout.config.moe.num_experts, model.layout.expert)
        return {
            "weights": sum(t.nbytes for t in weight_tensors(model.decoder.weights, own)),
            "block": sum(part[0].nbytes for part in pages if part is not None),
            "state": sum(part[0].nbytes for part in states),
        }


def _prompts(token_ids: list[list[int]]) -> list[dict[str, Any]]:
    return [{"prompt_token_ids": ids} for ids in token_ids]


def _answer(output: Any) -> dict[str, Any]:
    best = output.outputs[0]
    chosen = [of[token].logprob for token, of in zip(best.token_ids, best.logprobs, strict=True)]
    return {"token_ids": list(best.token_ids), "logprobs": chosen, "cached": output.num_cached_tokens}


if __name__ == "__main__":
    main(*sys.argv[1:])
