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
        "euler": "convergeflow.flow.solver:EULER",
        "euler-noise": "convergeflow.flow.solver:EULER_NOISE",
        "multistep": "convergeflow.flow.solver:MULTISTEP",
        "heun": "convergeflow.flow.solver:HEUN",
        "kernel": "convergeflow.flow.solver:KERNEL",
    },
)
"""How one step is made from predictions."""

GRIDS: Registry[Callable[[int, Schedule], Tensor]] = Registry(
    "grid",
    "grids",
    {
        "midpoint": "convergeflow.flow.grid:midpoint_grid",
        "langflow": "convergeflow.flow.grid:langflow_grid",
        "log-snr": "convergeflow.flow.grid:log_snr_grid",
        "closing": "convergeflow.flow.grid:closing_grid",
        "early": "convergeflow.flow.grid:early_grid",
        "theorem": "convergeflow.flow.grid:theorem_points",
    },
)
"""The times of a number of steps under a schedule."""
