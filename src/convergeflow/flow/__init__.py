"""The mathematics of flows. What a sampler chooses by name is listed here, and imported when it is first used."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from convergeflow.plugins import Registry

if TYPE_CHECKING:
    from torch import Tensor

    from convergeflow.flow.schedule import Schedule
    from convergeflow.flow.solver import Solver

SOLVERS: Registry[Solver] = Registry(
    "solver",
    "solvers",
    {
        "euler": ("convergeflow.flow.solver:EULER", "first order, data form: the paper's"),
        "euler-noise": ("convergeflow.flow.solver:EULER_NOISE", "first order, noise form; the same without `ug`"),
        "multistep": ("convergeflow.flow.solver:MULTISTEP", "second order from the step before, no extra calls"),
        "heun": ("convergeflow.flow.solver:HEUN", "second order, two predictions a step"),
        "kernel": ("convergeflow.flow.solver:KERNEL", "follows the exact kernel between calls, and on to the end"),
    },
)
"""How one step is made from predictions."""

GRIDS: Registry[Callable[[int, Schedule], Tensor]] = Registry(
    "grid",
    "grids",
    {
        "midpoint": ("convergeflow.flow.grid:midpoint_grid", "t = (i + 0.5)/N, the paper's"),
        "langflow": ("convergeflow.flow.grid:langflow_grid", "N even times from end to end, as in LangFlow's code"),
        "log-snr": ("convergeflow.flow.grid:log_snr_grid", "the midpoint grid's ends, even in log-SNR between them"),
        "closing": ("convergeflow.flow.grid:closing_grid", "a midpoint grid, then on to where every word is decided"),
        "early": ("convergeflow.flow.grid:early_grid", "the midpoint grid pulled towards noise, for few calls"),
        "theorem": ("convergeflow.flow.grid:theorem_points", "steps that shrink towards the end as Theorem 1 asks"),
    },
)
"""The times of a number of steps under a schedule."""
