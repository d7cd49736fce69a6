"""What a scale costs, by arithmetic: network calls, training steps and scored texts times the time of each.

For the paper's scale the times are those that one A100 with 40 GB should need (docs/paper-scale.md has the sums);
`convergeflow bench all` on such a machine measures them. For natural text on a CPU they were measured on one core.
Other scales have measured costs in their descriptions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from convergeflow.studies.reproduce.scale import ExperimentScale

if TYPE_CHECKING:
    from convergeflow.studies.reproduce.registry import Experiment


@dataclass(frozen=True)
class Speed:
    """Seconds of one processor."""

    call: float
    """One network call for one sequence of 1,024 tokens."""
    token: float
    """One token of training, forward and backward."""
    score: float
    """One text of 1,024 tokens."""
    unit: str


A100 = Speed(2.6e-3, 10e-6, 0.16, "GPU hours on A100s")
"""GPT-2 Large takes 1.6 TFLOP in float32 for a text, at half of 19.5 TFLOP/s."""
CORE = Speed(90e-3, 4e-4, 5.1, "hours of one core")
"""`basic-small` and SmolLM2 on a server of 2025."""


@dataclass(frozen=True)
class Work:
    """Seconds of one processor."""

    points: int = 0
    sampling: float = 0.0
    training: float = 0.0
    scoring: float = 0.0
    unit: str = A100.unit

    def __add__(self, other: Work) -> Work:
        return Work(
            self.points + other.points,
            self.sampling + other.sampling,
            self.training + other.training,
            self.scoring + other.scoring,
            other.unit,
        )

    @property
    def seconds(self) -> float:
        return self.sampling + self.training + self.scoring

    def in_words(self, processes: int) -> str:
        hours = {name: getattr(self, name) / 3600 for name in ("sampling", "training", "scoring")}
        total = self.seconds / 3600
        digits = 0 if total >= 100 else 1
        parts = ", ".join(f"{name} {value:,.{digits}f}" for name, value in hours.items())
        on = "process" if processes == 1 else "processes"
        return (
            f"about {total:,.{digits}f} {self.unit} by arithmetic ({parts}) if nothing is done yet; "
            f"{total / processes:,.{digits}f} h on {processes} {on}"
        )


def training_steps(name: str, scale: ExperimentScale) -> int:
    """Steps of all models that an experiment trains at this scale."""
    if name == "convergence":
        return 2 * scale.scratch_steps
    if name == "objectives":
        # Both objectives, and from half way each with the other one.
        start = scale.start_steps if scale.start is None else 0
        return start + 2 * scale.continued_steps + 2 * (scale.continued_steps // 2) + scale.collapse_steps
    return 0


def work(experiment: Experiment, scale: ExperimentScale) -> Work:
    """What an experiment does at this scale, before anything is kept."""
    from convergeflow.studies.reproduce import engine

    calls, texts, points = 0, 0, 0
    for family in experiment.points:
        for point in engine.expand(family, scale):
            points += 1
            nfe = point.get("nfe", family.get("set", {}).get("nfe", family.get("calls", 1) * point.get("steps", 0)))
            if family.get("kind", "samples") in ("samples", "agreement", "freezing"):
                num = scale.num_samples if family.get("kind", "samples") == "samples" else scale.num_samples // 2
                calls, texts = calls + nfe * num, texts + num
    if experiment.name == "objectives":
        points = 1 + 2 * scale.checkpoints + 2 * (scale.checkpoints // 2)
        calls, texts = points * scale.num_samples * scale.objective_nfe, points * scale.num_samples
    tokens = training_steps(experiment.name, scale) * scale.batch * scale.length
    share, speed = scale.length / 1024, A100 if scale.name == "paper" else CORE
    return Work(points, calls * share * speed.call, tokens * speed.token, texts * share * speed.score, speed.unit)


def total(experiments: Sequence[Experiment], scale: ExperimentScale) -> Work:
    """All of them; points that two experiments share are counted twice."""
    return sum((work(experiment, scale) for experiment in experiments), Work())
