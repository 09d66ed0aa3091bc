"""What is trained when: steps, lengths and mixtures of every stage; the learning rate is WSD."""

from __future__ import annotations

from dataclasses import dataclass, field

SKILLS = {
    "retrieval": 0.30,
    "tool": 0.2,
    "addition": 0.17,
    "copy": 0.10,
    "short": 0.10,
    "continuation": 0.03,
    "english": 0.10,
}


@dataclass(frozen=True)
class Stage:
    mode: str  # "dense", "warmup" or "sparse"
    steps: int
    shapes: tuple[tuple[int, int, float], ...]  # (batch, length, share of the steps)
    mix: dict[str, float] = field(default_factory=lambda: dict(SKILLS))


STAGES = (
    Stage("dense", 700, ((16, 256, 1.0),)),
    Stage("dense", 500, ((10, 512, 1.0),)),
    Stage("warmup", 150, ((4, 1024, 1.0),)),
    Stage("sparse", 2400, ((12, 512, 0.5), (6, 1024, 0.3), (3, 2048, 0.2))),
)

PEAK = 4e-3
WARMUP = 40
DECAY = 700  # last steps, linear to a twentieth


def learning_rate(step: int, total: int) -> float:
    return PEAK * min(1.0, (step + 1) / WARMUP, max(0.05, (total - step) / DECAY))


def stage_at(step: int) -> tuple[int, Stage]:
    for i, stage in enumerate(STAGES):
        if step < stage.steps:
            return i, stage
        step -= stage.steps
    raise IndexError("after the last stage")


def total_steps() -> int:
    return sum(stage.steps for stage in STAGES)
