"""What an experiment is, and the list of all of them.

An experiment asks one question, measures points into a workspace, draws them beside the paper's numbers, and judges the
paper's claims by what it measured. The same code runs at three scales; a scale only changes sizes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from convergeflow.errors import unknown_name
from convergeflow.studies.reproduce.scale import SCALES, Scale
from convergeflow.studies.reproduce.verdict import Judgement, not_testable
from convergeflow.studies.reproduce.workspace import Workspace


@dataclass(frozen=True)
class Cost:
    """What a scale costs: measured points, and seconds on two CPU cores (for `paper`: on one 40 GB accelerator)."""

    points: int
    seconds: float


@dataclass(frozen=True)
class Result:
    """What an experiment measured, as JSON values."""

    experiment: str
    scale: str
    records: list[dict[str, Any]]
    """One per point, as kept in the workspace."""
    values: dict[str, Any] = field(default_factory=dict)
    """What was computed from them."""


@dataclass(frozen=True)
class Claim:
    """A statement of the paper that a result can support or contradict."""

    name: str
    statement: str
    reference: str
    judge: Callable[[Result], Judgement]
    scales: tuple[str, ...] = SCALES
    """Scales that can test it at all."""
    needs: str = "a trained model: the one of this scale learns for seconds, its text is not language yet"
    """Why other scales cannot."""

    def judged(self, result: Result) -> Judgement:
        """The verdict; on a scale that cannot test the claim the numbers are still shown."""
        judgement = self.judge(result)
        if result.scale in self.scales:
            return judgement
        return not_testable(f"needs {self.needs} ({judgement.evidence})", judgement.paper)


@dataclass(frozen=True)
class Table:
    """Rows for the report."""

    title: str
    columns: tuple[str, ...]
    rows: list[tuple[Any, ...]]


@dataclass(frozen=True)
class Experiment:
    """One table, figure or statement of the paper."""

    name: str
    reference: str
    question: str
    claims: tuple[Claim, ...]
    cost: Mapping[str, Cost]
    measure: Callable[[Workspace, Scale], Result]
    draw_figures: Callable[[Result, Path], list[Path]]
    tabulate: Callable[[Result], list[Table]] = lambda result: []

    def run(self, workspace: Workspace, scale: Scale) -> Result:
        """Measure what is not measured yet."""
        cost = self.cost[scale.name]
        workspace.progress.begin(cost.points, cost.seconds)
        result = self.measure(workspace, scale)
        workspace.progress.finish()
        # Through JSON, so that a verdict never rests on anything that is not in the records.
        return Result(**json.loads(json.dumps(vars(result), allow_nan=False)))

    def draw(self, result: Result, folder: Path) -> list[Path]:
        """The figures as files, PNG first."""
        folder.mkdir(parents=True, exist_ok=True)
        from convergeflow.studies.reproduce import (
            plotting,
        )  # matplotlib is slow to import, and listing needs none of it

        with plotting.style():
            return self.draw_figures(result, folder)

    def judge(self, result: Result) -> dict[str, Judgement]:
        """A verdict per claim."""
        return {claim.name: claim.judged(result) for claim in self.claims}

    def describe(self) -> dict[str, Any]:
        """For `reproduce --list`."""
        return {
            "name": self.name,
            "reference": self.reference,
            "question": self.question,
            "claims": [claim.statement for claim in self.claims],
            "cost": {scale: {"points": c.points, "seconds": c.seconds} for scale, c in self.cost.items()},
        }


def experiments() -> dict[str, Experiment]:
    """All experiments by name, theory first."""
    # Imported here: each file imports this one.
    from convergeflow.studies.reproduce import (
        combination,
        configurations,
        controls,
        convergence,
        counterexample,
        facts,
        freezing,
        grids,
        natural,
        objectives,
        proposition1,
        proposition3,
        sanity,
        shortcut,
        solvers,
        systems,
        theorem1,
        token_rules,
        unconditional,
    )

    listed = (
        proposition1,
        theorem1,
        counterexample,
        proposition3,
        convergence,
        objectives,
        shortcut,
        controls,
        combination,
        unconditional,
        token_rules,
        configurations,
        grids,
        solvers,
        freezing,
        facts,
        systems,
        natural,
        sanity,
    )
    return {module.EXPERIMENT.name: module.EXPERIMENT for module in listed}


def experiment_by_name(name: str) -> Experiment:
    known = experiments()
    if name not in known:
        raise unknown_name("experiment", name, known)
    return known[name]
