"""A budget of network calls (NFE) turned into steps and refinements, exactly: NFE = sum_i (K_i + 1) (paper Sec. 4.3).

The published allocation overruns or crashes on some budgets (K + 1 not dividing NFE by far, odd NFE with K = 1, a
single step); the rules here agree with it where it is right and spend every budget to the last call.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from convergeflow.errors import UserError
from convergeflow.flow.grid import grid_by_name
from convergeflow.flow.guidance import GUIDANCE, Controls
from convergeflow.flow.schedule import Schedule


@dataclass(frozen=True)
class Allocation:
    """Where the calls go: K_i refinements at grid point i, and the last `corrected` steps predicted twice (Heun)."""

    grid: Tensor
    refinements: tuple[int, ...]
    corrected: int = 0

    @property
    def num_steps(self) -> int:
        return len(self.refinements)

    @property
    def nfe(self) -> int:
        """Network calls in all."""
        calls = [refinement + 1 for refinement in self.refinements]
        return sum(calls) + sum(calls[len(calls) - self.corrected :])

    def is_corrected(self, step: int) -> bool:
        """Whether the step from point `step` to `step + 1` is predicted at both ends."""
        return self.num_steps - 1 - self.corrected <= step < self.num_steps - 1


def allocate_constant(nfe: int, refine: int) -> list[int]:
    """Configuration A: N = ceil(NFE/(K+1)); the shortfall comes evenly off every K_i, the rest off the first ones."""
    num_steps = math.ceil(nfe / (refine + 1))
    shortfall = num_steps * (refine + 1) - nfe
    every, first = divmod(shortfall, num_steps)
    return [refine - every - (1 if i < first else 0) for i in range(num_steps)]


def allocate_adaptive(
    nfe: int, refine: int, configuration: str, schedule: Schedule, make_grid: Callable[[int], Tensor]
) -> list[int]:
    """Configurations B and C: K_i = ceil(K factor_i) on the most steps that fit; the rest to the largest fractions."""

    def raw(num_steps: int) -> list[float]:
        return (refine * GUIDANCE[configuration](schedule(make_grid(num_steps)))).tolist()

    def calls(num_steps: int) -> int:
        return sum(math.ceil(value) + 1 for value in raw(num_steps))

    low, high, best = 1, nfe, 0
    while low <= high:
        middle = (low + high) // 2
        total = calls(middle)
        if total == nfe:
            return [math.ceil(value) for value in raw(middle)]
        if total < nfe:
            best, low = middle, middle + 1
        else:
            high = middle - 1
    if best == 0:
        raise UserError(
            f"a budget of {nfe} network calls is too small for `refine` {refine} under configuration {configuration}: "
            f"one step alone needs {calls(1)}; raise `nfe` to {calls(1)} or lower `refine`"
        )
    values = raw(best)
    refinements = [math.ceil(value) for value in values]
    by_fraction = sorted(range(best), key=lambda i: -(values[i] - math.floor(values[i])))
    for extra in range(nfe - sum(refinements) - best):
        refinements[by_fraction[extra % best]] += 1
    return refinements


def allocate(
    nfe: int, controls: Controls, schedule: Schedule, *, grid: str | Tensor = "midpoint", corrector: bool = False
) -> Allocation:
    """Steps and refinements that spend exactly `nfe` network calls.

    A grid given as a tensor fixes the number of steps; the calls are then spread evenly, later points first served.
    With a corrector (Heun) the smallest plain budget is used that correcting the last steps completes exactly.
    """
    if not 1 <= nfe <= 100_000:
        raise UserError(f"`nfe` must be at least 1 and at most 100,000, not {nfe}")
    if corrector:
        return _allocate_corrected(nfe, controls, schedule, grid)
    if not isinstance(grid, str):
        return Allocation(grid, tuple(_spread_evenly(nfe, len(grid), controls)))

    def make_grid(num_steps: int) -> Tensor:
        return grid_by_name(grid, num_steps, schedule)

    if not controls.conditions:
        refinements = [0] * nfe
    elif controls.refine_schedule == "A":
        refinements = allocate_constant(nfe, controls.refine)
    else:
        refinements = allocate_adaptive(nfe, controls.refine, controls.refine_schedule, schedule, make_grid)
    return Allocation(make_grid(len(refinements)), tuple(refinements))


def _spread_evenly(nfe: int, num_steps: int, controls: Controls) -> list[int]:
    if not controls.conditions and nfe != num_steps:
        raise UserError(f"a grid of {num_steps} times without self-conditioning needs `nfe` {num_steps}, not {nfe}")
    if nfe < num_steps:
        raise UserError(f"a grid of {num_steps} times needs at least as many network calls, not {nfe}")
    every, last = divmod(nfe - num_steps, num_steps)
    return [every + (1 if i >= num_steps - last else 0) for i in range(num_steps)]


def _allocate_corrected(nfe: int, controls: Controls, schedule: Schedule, grid: str | Tensor) -> Allocation:
    for plain in range(math.ceil(nfe / 2), nfe + 1):
        try:
            allocation = allocate(plain, controls, schedule, grid=grid)
        except UserError:
            if plain == nfe:
                raise
            continue
        left, corrected = nfe - plain, 0
        while left > 0 and corrected < allocation.num_steps - 1:
            corrected += 1
            left -= allocation.refinements[-corrected] + 1
        if left == 0:
            return Allocation(allocation.grid, allocation.refinements, corrected)
    raise AssertionError("the budget itself is always an exact plain allocation")
