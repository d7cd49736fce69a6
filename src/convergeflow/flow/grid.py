"""Times: how t is drawn in training, and the grids on which samplers call the network.

A grid is a float64 tensor of increasing times in [0, 1], one per solver step: something one can print. The paper's own
is the midpoint grid t_i = (i + 0.5)/N (Sec. 4).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from convergeflow.errors import UserError
from convergeflow.flow import GRIDS
from convergeflow.flow.schedule import Schedule
from convergeflow.randomness import derive_seed

TRAINING_CUTOFF = 1e-5
"""Training times stay this far from both ends."""


def training_times(batch: int, *, seed: int, cutoff: float = TRAINING_CUTOFF) -> Tensor:
    """One time per example of the GLOBAL batch, one in each of `batch` equal strata, in random order; [batch] float64.

    Ranks and accumulation steps take slices of this tensor: stratifying each slice alone would be a different law.
    """
    generator = torch.Generator().manual_seed(derive_seed(seed, "times"))
    jitter = torch.rand(batch, generator=generator, dtype=torch.float64)
    stratum = torch.randperm(batch, generator=generator)
    return cutoff + (1 - 2 * cutoff) * (stratum + jitter) / batch


def midpoint_grid(num_steps: int, schedule: Schedule | None = None) -> Tensor:
    """t_i = (i + 0.5)/N."""
    return (torch.arange(num_steps, dtype=torch.float64) + 0.5) / num_steps


def early_grid(num_steps: int, schedule: Schedule | None = None) -> Tensor:
    """The midpoint grid pulled towards noise, 1 - (1 - u^1.2)^0.7: few calls are spent best where texts are chosen."""
    return 1 - (1 - midpoint_grid(num_steps) ** 1.2) ** 0.7


def langflow_grid(num_steps: int, schedule: Schedule | None = None, cutoff: float = 1e-5) -> Tensor:
    """N evenly spaced times from cutoff to 1 - cutoff: its first and last intervals are huge jumps in log-SNR."""
    return torch.linspace(cutoff, 1.0 - cutoff, num_steps, dtype=torch.float64)


def log_snr_grid(num_steps: int, schedule: Schedule) -> Tensor:
    """Evenly spaced in log-SNR between the two ends of the midpoint grid."""
    ends = midpoint_grid(num_steps)
    if num_steps == 1:
        return ends
    first, last = (-schedule(ends[[0, -1]]).gamma).tolist()
    return schedule.time_at(torch.linspace(first, last, num_steps, dtype=torch.float64))


CLOSING_SHARE = 0.25
"""Share of the `closing` grid's points that lie beyond the midpoint grid."""
CLOSING_LOG_SNR = 12.0
"""Where the `closing` grid ends for schedules that go to zero noise."""


def closing_grid(num_steps: int, schedule: Schedule) -> Tensor:
    """A midpoint grid, then a quarter of the points evenly in log-SNR on to the end of the schedule.

    A learned schedule spreads its steps by what is left to decide, so its midpoint grid ends with undecided words: one
    share in 2N of the entropy. This grid goes on to where the kernel decides every word.
    """
    closing = round(CLOSING_SHARE * num_steps)
    ends = midpoint_grid(num_steps - closing)
    last = float(-schedule(ends[-1]).gamma)
    end = min(float(-schedule(torch.ones((), dtype=torch.float64)).gamma), CLOSING_LOG_SNR)
    return torch.cat([ends, schedule.time_at(torch.linspace(last, end, closing + 1, dtype=torch.float64)[1:])])


def theorem_grid(num_steps: int, delta: float) -> Tensor:
    """A grid from t = 0 that satisfies Theorem 1's condition max_k (t_{k+1} - t_k)/(1 - t_{k+1})^3 < delta; [N + 1].

    With 1 - t_k = (1 + 2 s k)^(-1/2) the ratio is at most s (1 + 2 s)^(3/2), and t_N -> 1 as N grows.
    """
    if delta <= 0:
        raise UserError(f"the theorem's grid needs delta > 0, not {delta}")
    low, high = 0.0, delta
    for _ in range(60):
        step = 0.5 * (low + high)
        low, high = (step, high) if step * (1 + 2 * step) ** 1.5 < delta else (low, step)
    steps = torch.arange(num_steps + 1, dtype=torch.float64)
    return 1.0 - (1.0 + 2.0 * low * steps).rsqrt()


def check_grid(grid: Tensor | Sequence[float]) -> Tensor:
    """A user's grid, refused unless it is a finite, strictly increasing vector in [0, 1]."""
    grid = torch.as_tensor(grid, dtype=torch.float64)
    if grid.dim() != 1 or len(grid) == 0:
        raise UserError(f"a time grid must be a non-empty vector, not of shape {tuple(grid.shape)}")
    if not bool(torch.isfinite(grid).all()) or float(grid[0]) < 0 or float(grid[-1]) > 1:
        raise UserError("a time grid must lie in [0, 1]")
    if len(grid) > 1 and not bool((grid.diff() > 0).all()):
        raise UserError("a time grid must increase strictly from noise (0) to data (1)")
    return grid


THEOREM_DELTA = 0.5
"""The delta of the grid named `theorem`; smaller values need more steps to get as close to the data."""


def theorem_points(num_steps: int, schedule: Schedule | None = None) -> Tensor:
    """The theorem's grid without t_0 = 0: the network is not called at infinite noise."""
    return theorem_grid(num_steps, THEOREM_DELTA)[1:]


def grid_by_name(name: str, num_steps: int, schedule: Schedule) -> Tensor:
    """The named grid with N points."""
    if num_steps < 1:
        raise UserError(f"a grid needs at least one step, not {num_steps}")
    return GRIDS[name](num_steps, schedule)
