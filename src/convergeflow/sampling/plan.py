"""Settings made concrete for a schedule: grid, coefficients, refinements and strengths, before anything runs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from convergeflow.flow.budget import Allocation
from convergeflow.flow.schedule import Coefficients, Schedule
from convergeflow.flow.solver import Solver


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

    @property
    def last(self) -> bool:
        return self.then is None


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
