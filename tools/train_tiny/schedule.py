"""What is trained when: steps, lengths and mixtures of every stage; the learning rate is WSD."""

from __future__ import annotations

from dataclasses import dataclass, field

from .data import Weights

FIRST = {
    "retrieval": 0.28,
    "tool": 0.2,
    "addition": 0.16,
    "copy": 0.18,
    "short": 0.1,
    "continuation": 0.02,
    "english": 0.06,
}
THEN = {
    "retrieval": 0.36,
    "tool": 0.2,
    "addition": 0.08,
    "copy": 0.16,
    "short": 0.12,
    "continuation": 0.02,
    "english": 0.06,
}


# What is left to learn: finding and copying.
LAST = {
    "retrieval": 0.44,
    "tool": 0.18,
    "addition": 0.06,
    "copy": 0.17,
    "short": 0.09,
    "continuation": 0.01,
    "english": 0.05,
}


FIND = {
    "retrieval": 0.6,
    "tool": 0.16,
    "addition": 0.04,
    "copy": 0.1,
    "short": 0.06,
    "continuation": 0.01,
    "english": 0.03,
}

BALANCE = {
    "retrieval": 0.14,
    "tool": 0.28,
    "addition": 0.08,
    "copy": 0.32,
    "short": 0.12,
    "continuation": 0.01,
    "english": 0.05,
}

# Random words and English are noise to finding: what is asked for must outweigh them.
FOCUS = Weights(prompt=0.01, english=0.15, key=5.0)


@dataclass(frozen=True)
class Stage:
    mode: str  # "dense", "warmup" or "sparse"
    steps: int
    shapes: tuple[tuple[int, int, float], ...]  # (batch, length, share of the steps)
    mix: dict[str, float] = field(default_factory=lambda: dict(THEN))
    weights: Weights = field(default_factory=Weights)
    header: float = 0.9  # share of conversations that begin with the thinking-effort message


STAGES = (
    Stage("dense", 640, ((8, 512, 1.0),), FIRST, header=0.3),
    Stage("warmup", 240, ((2, 1024, 1.0),), header=0.6),
    Stage("sparse", 328, ((8, 512, 0.55), (4, 1024, 0.3), (2, 2048, 0.15))),
    Stage("sparse", 357, ((8, 512, 0.5), (4, 1024, 0.3), (2, 2048, 0.2)), LAST),
    Stage("sparse", 289, ((8, 512, 0.7), (4, 1024, 0.2), (2, 2048, 0.1)), LAST, FOCUS, header=0.7),
    Stage("sparse", 313, ((8, 512, 0.8), (4, 1024, 0.1), (2, 2048, 0.1)), FIND, FOCUS, header=0.7),
    Stage("sparse", 433, ((8, 512, 0.8), (4, 1024, 0.1), (2, 2048, 0.1)), BALANCE, FOCUS),
)

PEAK = 5e-3
WARMUP = 30
DECAY = 450  # last steps, linear to a twentieth


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


def is_boundary(step: int) -> bool:
    """True after the last step of a stage."""
    return any(step == sum(s.steps for s in STAGES[: i + 1]) for i in range(len(STAGES)))
