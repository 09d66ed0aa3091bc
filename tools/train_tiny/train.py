"""Trains models/k31-tiny: dense attention, then the indexer's dense warm-up, then sparse attention.

    python -m train_tiny.train RUN_DIR MODEL_DIR      # resumes from RUN_DIR/state.pt where there is one

A line of RUN_DIR/training.log per 20 steps; per 150 the share of answers that greedy decoding would give
exactly (teacher forced: every token of think, response and tools is the argmax).
"""

from __future__ import annotations

import json
import math
import os
import random
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from longspan.chat import Tokenizer
from longspan.evaluation.text import Text

from . import model as modeling
from . import muon, schedule
from .data import Builder, Options, draw_options
from .model import Config, TinyK31

SEED = 31
SAVE_SECONDS = 240
ROWS = 64  # query rows per sequence on which the indexer's loss is measured
EMA = 0.99


def compile_parts() -> None:
    """Compiling parts, not the whole, keeps compilation to seconds: layers of one kind share their code."""
    torch._dynamo.config.recompile_limit = 64
    for part in (modeling.KdaAttention, modeling.DsaAttention, modeling.LatentMoe, modeling.Mlp):
        part.forward = torch.compile(part.forward, dynamic=False)
    modeling.mix = torch.compile(modeling.mix, dynamic=False)


@torch.compile(dynamic=False)
def token_losses(hidden: Tensor, head: Tensor, targets: Tensor) -> Tensor:
    logits = F.linear(hidden, head.to(hidden.dtype)).float()
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").reshape(targets.shape)


class Trainer:
    def __init__(self, run: Path, model_dir: Path) -> None:
        torch.manual_seed(SEED)
        self.run = run
        self.builder = Builder(Tokenizer.from_dir(model_dir), Text.read(run / "train.txt"))
        self.model = TinyK31(Config(vocab_size=self.builder.tokenizer.vocab_size))
        self.optimizers = muon.optimizers(self.model, schedule.PEAK)
        self.average = {n: p.detach().clone() for n, p in self.model.named_parameters()}
        self.step = 0
        self.tokens = 0
        self.seconds = 0.0
        if (run / "state.pt").exists():
            self.load(run / "state.pt")

    def load(self, path: Path) -> None:
        state = torch.load(path, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.average = state["average"]
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.step, self.tokens, self.seconds = state["step"], state["tokens"], state["seconds"]

    def save(self) -> None:
        state = {
            "model": self.model.state_dict(),
            "average": self.average,
            "step": self.step,
            "tokens": self.tokens,
            "seconds": self.seconds,
            "optimizers": [o.state_dict() for o in self.optimizers],
        }
        torch.save(state, self.run / "state.tmp")
        os.replace(self.run / "state.tmp", self.run / "state.pt")

    def log(self, **values: object) -> None:
        line = json.dumps({k: round(v, 4) if isinstance(v, float) else v for k, v in values.items()})
        with (self.run / "training.log").open("a") as file:
            file.write(line + "\n")
        print(line, flush=True)

    def train(self) -> None:
        began = saved = time.time()
        seconds_before = self.seconds
        shown: list[tuple[float, ...]] = []
        while self.step < schedule.total_steps():
            numbers = self.one_step()
            shown.append(numbers)
            self.seconds = seconds_before + time.time() - began
            if self.step % 20 == 0:
                loss, kl, recall, drop, norm = (sum(c) / len(c) for c in zip(*shown, strict=True))
                number, stage = schedule.stage_at(self.step - 1)
                self.log(
                    step=self.step,
                    stage=number,
                    mode=stage.mode,
                    tokens=self.tokens,
                    seconds=int(self.seconds),
                    loss=loss,
                    kl=kl,
                    recall=recall,
                    drop=drop,
                    norm=norm,
                )
                shown = []
            if self.step % 150 == 0:
                self.log(step=self.step, exact=self.exact_match())
            if time.time() - saved > SAVE_SECONDS or schedule.is_boundary(self.step):
                self.save()
                saved = time.time()
        self.save()

    def one_step(self) -> tuple[float, ...]:
        """Gives loss, indexer KL, indexer recall, share of dropped expert rows and gradient norm."""
        model, c = self.model, self.model.c
        _, stage = schedule.stage_at(self.step)
        rng = random.Random(SEED * 1_000_003 + self.step)
        self.builder.weights = stage.weights
        size, length, _ = rng.choices(stage.shapes, [s[2] for s in stage.shapes])[0]
        ids, targets, weights = self.builder.batch(rng, size, length, stage.mix, stage.header)
        warmup = stage.mode == "warmup"
        for name, p in model.named_parameters():
            p.requires_grad_(not warmup or "indexer" in name)
        rows = None if stage.mode == "dense" else torch.tensor(sorted(rng.sample(range(length), ROWS)))
        out = model(ids, stage.mode, rows)
        kl = sum((i.kl for i in out.index), torch.zeros(())) / max(1, len(out.index))
        recall = sum(float(i.recall.detach()) for i in out.index) / max(1, len(out.index))
        loss = torch.zeros(())
        if not warmup:
            loss = (token_losses(out.hidden, model.lm_head.weight, targets) * weights).sum() / weights.sum()
        (loss + kl * len(out.index)).backward()
        norm = torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.grad is not None], 1.0)
        rate = schedule.learning_rate(self.step, schedule.total_steps())
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.step += 1
        self.tokens += ids.numel()
        drop = self.balance(out.load, warmup, c)
        with torch.no_grad():
            keep = min(EMA, (self.step + 1) / (self.step + 10))
            params = dict(model.named_parameters())
            torch._foreach_lerp_(list(self.average.values()), [params[n] for n in self.average], 1 - keep)
        return float(loss.detach()), float(kl.detach()), recall, drop, float(norm)

    def balance(self, load: Tensor, frozen: bool, c: Config) -> float:
        """Aux-loss-free balancing (DeepSeek-V3): push the bias of busy experts down, of idle ones up."""
        mean = load.float().mean(1, keepdim=True)
        if not frozen:
            nudge = 0.003 * torch.sign(mean - load)
            for layer, step in zip(list(self.model.model.layers)[1:], nudge, strict=True):
                layer.block_sparse_moe.gate.e_score_correction_bias += step
        return float((load - c.capacity * mean).clamp_min(0).sum() / load.sum())

    @torch.no_grad()
    def exact_match(self, count: int = 16, length: int = 384) -> dict[str, float]:
        """Share of single-turn answers of which the averaged weights get every token right."""
        model, c = self.model, self.model.c
        current = {n: p.detach().clone() for n, p in model.named_parameters()}
        model.load_state_dict(self.average, strict=False)
        capacity, c.capacity = c.capacity, 0.0
        mode = "sparse" if schedule.stage_at(self.step - 1)[1].mode == "sparse" else "dense"
        rng = random.Random(7)
        result = {}
        with torch.compiler.set_stance("force_eager"):
            for kind in ("retrieval", "copy", "addition", "tool", "short"):
                drawn = [self.single(rng, kind, length) for _ in range(count)]
                longest = math.ceil(max(len(s.ids) for s in drawn) / 32) * 32
                ids = torch.tensor([s.ids + [0] * (longest - len(s.ids)) for s in drawn])
                best = model.logits(model(ids, mode).hidden).argmax(-1)
                right = 0
                for i, s in enumerate(drawn):
                    _, start, end = s.answers[0]
                    right += bool((best[i, start - 1 : end - 1] == ids[i, start:end]).all())
                result[kind] = right / count
        model.load_state_dict(current, strict=False)
        c.capacity = capacity
        return result

    def single(self, rng: random.Random, kind: str, length: int):
        from longspan.evaluation import skills, tool_skill

        declared = tool_skill.declare(rng, 2)
        options = draw_options(rng, [d.tool for d in declared]) if kind == "tool" else Options()
        if kind == "retrieval":
            turns = skills.retrieval(rng, self.builder.text, length, self.builder.size, 4, 1)
        else:
            turns = self.builder.turns(rng, kind, options, length, declared)
        sequence = self.builder.begin(options)
        self.builder.add(sequence, turns[0], options)
        return sequence


def main() -> None:
    compile_parts()
    Trainer(Path(sys.argv[1]), Path(sys.argv[2])).train()


if __name__ == "__main__":
    main()
