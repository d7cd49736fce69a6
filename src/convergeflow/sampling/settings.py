"""How samples are made: the paper's controls and ours in one record, made concrete for a schedule, and presets."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from convergeflow.errors import UserError, unknown_name
from convergeflow.flow.budget import allocate
from convergeflow.flow.grid import check_grid
from convergeflow.flow.guidance import Controls, effective_strengths, rescaled
from convergeflow.flow.schedule import Gumbel, Schedule
from convergeflow.flow.solver import SOLVER_NAMES, solver_by_name
from convergeflow.sampling.decoding import RULES
from convergeflow.sampling.plan import Plan

SELF_CONDITIONS = ("recursive", "previous", "none")


@dataclass(frozen=True)
class Freeze:
    """Stop computing what has converged.

    A position is settled when at `patience` grid points in a row its largest weight was at least `weight`, with one and
    the same token, and the guided prediction was as close to that token's embedding as such weights are, 2 (1 - weight)
    sqrt(width): under guidance the weights alone say little, for what drives the step lies beyond them. A settled
    position skips the head and moves with mu = its embedding; a sequence whose positions are all settled is finished
    and costs no further calls. At one grid point refinement is an iteration towards a fixed point: it ends for a
    sequence when all passes to come would move none of its conditions by more than `change` times sqrt(width), judged
    by the geometric series through its last two moves. A `change` of 0 always makes all the passes.
    """

    weight: float = 0.9999
    patience: int = 2
    change: float = 0.003

    def __post_init__(self) -> None:
        if not 0.5 < self.weight <= 1.0 or self.patience < 1 or not 0.0 <= self.change < 1.0:
            raise UserError("freezing needs a weight in (0.5, 1], a patience of at least 1 and a change in [0, 1)")


@dataclass(frozen=True)
class Settings:
    """How samples are made, apart from their seeds."""

    nfe: int = 64
    controls: Controls = field(default_factory=Controls)
    self_condition: str = "recursive"
    grid: str | tuple[float, ...] = "midpoint"
    solver: str = "euler"
    decode: str = "weight"
    freeze: Freeze | None = None
    temperature: float = 1.0
    """Of the weights, kernel included: w^(1/T), normalised again. Not the paper's, whose samplers have 1."""
    base_temperature: float = 1.0
    """Of f alone: f^(1/T) under the exact kernel, the flow of a sharpened law. Not the paper's either."""
    block: int | None = None
    """Tokens per block, for a model of blocks; none: its longest."""

    def __post_init__(self) -> None:
        if self.self_condition not in SELF_CONDITIONS:
            raise unknown_name("self-conditioning", self.self_condition, SELF_CONDITIONS)
        if self.decode not in RULES:
            raise unknown_name("token rule", self.decode, RULES)
        if self.solver not in SOLVER_NAMES:
            raise unknown_name("solver", self.solver, SOLVER_NAMES)
        if self.self_condition != "recursive" and (self.controls.refine, self.controls.scg) != (1, 1.0):
            raise UserError(
                f"--refine and --scg act on recursive self-conditioning only; drop them or --self-condition "
                f"{self.self_condition}"
            )
        for option, value in (("--temperature", self.temperature), ("--base-temperature", self.base_temperature)):
            if not 0.0 < value < math.inf:
                raise UserError(f"{option} must be a positive number, not {value}; 1 changes nothing")
        if self.solver == "kernel" and self.freeze is not None:
            raise UserError("--freeze is for solvers that stop at the grid's end: drop it or --solver kernel")
        if self.block is not None and self.block < 1:
            raise UserError(f"--block must be at least 1, not {self.block}")
        if not isinstance(self.grid, str):
            check_grid(torch.tensor(self.grid))

    def plan(self, schedule: Schedule) -> Plan:
        """Grid, coefficients, refinements and effective strengths for a schedule."""
        solver = solver_by_name(self.solver)
        controls = self.controls if self.self_condition == "recursive" else replace(self.controls, refine=0)
        grid = self.grid if isinstance(self.grid, str) else torch.tensor(self.grid, dtype=torch.float64)
        allocation = allocate(self.nfe, controls, schedule, grid=grid, corrector=solver.corrector)
        points = schedule(allocation.grid)
        w_scg, w_ug = effective_strengths(controls, points)
        if solver.kernel and not bool(torch.isfinite(points.gamma).all()):
            raise UserError("--solver kernel needs a grid inside (0, 1): at its ends the kernel is none, or infinite")
        divides_by_alpha = solver.form == "noise" or float(w_ug.max()) > 0
        if divides_by_alpha and not bool((points.alpha > 0).all()):
            raise UserError("unconditional guidance and the noise form need alpha > 0: start the grid after t = 0")
        feeds_back = self.self_condition == "previous"
        return Plan(schedule, allocation, points, w_scg.tolist(), w_ug.tolist(), solver, feeds_back)

    def describe(self) -> dict[str, Any]:
        """As JSON values; a temperature of 1, which is none, and no choice of a block are left out."""
        neutral = {"temperature": 1.0, "base_temperature": 1.0, "block": None}
        return {name: value for name, value in asdict(self).items() if name not in neutral or value != neutral[name]}


PAPER_SCHEDULE = Gumbel(4.9563, 0.9637)
"""The schedule of the checkpoint behind the paper's tables, to which its nominal strengths refer."""

PRESETS: dict[str, Settings] = {
    "standard": Settings(),
    "headline": Settings(controls=Controls.configuration("C", refine=100, scg=37.0)),
    "config-a": Settings(controls=Controls.configuration("A", refine=8, scg=1.5)),
    "config-b": Settings(controls=Controls.configuration("B", refine=25, scg=8.0)),
    "config-c": Settings(controls=Controls.configuration("C", refine=100, scg=30.0)),
    "langflow": Settings(nfe=64, self_condition="previous", grid="langflow"),
    "sharp": Settings(controls=Controls.configuration("A", refine=8, scg=2.5), temperature=0.3),
    "words": Settings(nfe=127, self_condition="none", solver="kernel", base_temperature=0.92, block=1),
}
"""Settings by the paper's names, with its nominal strengths. Two are ours: `sharp`, fewest errors and less variety, and
`words`, token after token for a model of blocks: one call for each of 64, which the kernel solver needs no more of, and
63 calls that read what is before."""


def preset_for(name: str, schedule: Schedule, *, nfe: int | None = None) -> Settings:
    """A preset whose effective strengths at its last grid point equal the paper's, whatever the model's schedule."""
    if name not in PRESETS:
        raise unknown_name("sampling preset", name, PRESETS)
    preset = PRESETS[name] if nfe is None else replace(PRESETS[name], nfe=nfe)
    if preset.controls == Controls():
        return preset
    last = float(allocate(PRESETS[name].nfe, preset.controls, PAPER_SCHEDULE).grid[-1])
    return replace(preset, controls=rescaled(preset.controls, PAPER_SCHEDULE, schedule, end=last))
