"""Settings made concrete for a schedule: grid, coefficients, refinements and strengths, before anything runs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from convergeflow.errors import UserError, unknown_name
from convergeflow.flow import SOLVERS
from convergeflow.flow.budget import Allocation, allocate
from convergeflow.flow.guidance import Controls, effective_strengths, rescaled
from convergeflow.flow.schedule import Coefficients, Gumbel, Schedule
from convergeflow.flow.solver import Solver
from convergeflow.sampling.settings import PRESETS, Settings

PAPER_SCHEDULE = Gumbel(4.9563, 0.9637)
"""The schedule of the checkpoint behind the paper's tables, to which its nominal strengths refer."""


@dataclass(frozen=True)
class Point:
    """One grid point t_i of a trajectory and what is done there."""

    index: int
    num_steps: int
    t: float
    at: Coefficients
    refinements: int
    """K_i"""
    w_scg: float
    w_ug: float
    then: Coefficients | None
    """The next grid point; None at the last, where tokens are read off."""
    corrected: bool
    """Whether the step from here is predicted at both ends (Heun)."""


@dataclass(frozen=True)
class Plan:
    """The whole trajectory, printable."""

    schedule: Schedule
    allocation: Allocation
    points: Coefficients
    w_scg: list[float]
    w_ug: list[float]
    solver: Solver
    feeds_back: bool = False
    """Whether a point's prediction is the condition at the next one (LangFlow's sampler)."""

    @cached_property
    def _points(self) -> tuple[Point, ...]:
        count = self.allocation.num_steps
        return tuple(
            Point(
                index=i,
                num_steps=count,
                t=float(self.allocation.grid[i]),
                at=self.points[i],
                refinements=self.allocation.refinements[i],
                w_scg=self.w_scg[i],
                w_ug=self.w_ug[i],
                then=self.points[i + 1] if i + 1 < count else None,
                corrected=self.allocation.is_corrected(i),
            )
            for i in range(count)
        )

    def __iter__(self) -> Iterator[Point]:
        return iter(self._points)

    def __getitem__(self, index: int) -> Point:
        return self._points[index]

    def __len__(self) -> int:
        return self.allocation.num_steps

    def describe(self) -> dict[str, Any]:
        """Steps, refinements and effective strengths, as JSON values."""
        return {
            "num_steps": self.allocation.num_steps,
            "refinements": list(self.allocation.refinements),
            "corrected_steps": self.allocation.corrected,
            "effective_scg": [round(w, 4) for w in self.w_scg],
            "effective_ug": [round(w, 4) for w in self.w_ug],
        }


def plan(settings: Settings, schedule: Schedule) -> Plan:
    """Grid, coefficients, refinements and effective strengths for a schedule."""
    solver = SOLVERS[settings.solver]
    recursive = settings.self_condition == "recursive"
    controls = settings.controls if recursive else replace(settings.controls, refine=0)
    grid = settings.grid if isinstance(settings.grid, str) else torch.tensor(settings.grid, dtype=torch.float64)
    allocation = allocate(settings.nfe, controls, schedule, grid=grid, corrector=solver.corrector)
    points = schedule(allocation.grid)
    w_scg, w_ug = effective_strengths(controls, points)
    if solver.kernel and not bool(torch.isfinite(points.gamma).all()):
        raise UserError("`solver` kernel needs a grid inside (0, 1): at its ends the kernel is none, or infinite")
    divides_by_alpha = solver.form == "noise" or float(w_ug.max()) > 0
    if divides_by_alpha and not bool((points.alpha > 0).all()):
        raise UserError("unconditional guidance and the noise form need alpha > 0: start the grid after t = 0")
    feeds_back = settings.self_condition == "previous"
    return Plan(schedule, allocation, points, w_scg.tolist(), w_ug.tolist(), solver, feeds_back)


def preset_for(name: str, schedule: Schedule, *, nfe: int | None = None) -> Settings:
    """A preset whose effective strengths at its last grid point equal the paper's, whatever the model's schedule."""
    if name not in PRESETS:
        raise unknown_name("sampling preset", name, PRESETS)
    preset = PRESETS[name] if nfe is None else replace(PRESETS[name], nfe=nfe)
    if preset.controls == Controls():
        return preset
    last = float(allocate(PRESETS[name].nfe, preset.controls, PAPER_SCHEDULE).grid[-1])
    return replace(preset, controls=rescaled(preset.controls, PAPER_SCHEDULE, schedule, end=last))
