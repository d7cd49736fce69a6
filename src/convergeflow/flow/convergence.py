"""What Theorem 1 is about, as numbers one can measure on a trajectory (paper Sec. 4.1, Figure 2).

A state near token j is x = alpha e_j + sigma z, so the normalised distance ||x - alpha e_j||/(sigma sqrt d) of the
token it converges to tends to 1, while that of every other token grows with the signal-to-noise ratio. This also holds
for schedules whose noise never vanishes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy
import torch
from torch import Tensor

from convergeflow.flow.path import spread
from convergeflow.flow.schedule import Coefficients


def normalised_distance(distance: Tensor, at: Coefficients, width: int) -> Tensor:
    """||x - alpha e_j||/(sigma sqrt d) from ||x - alpha e_j||."""
    return distance / (spread(at.sigma, distance) * math.sqrt(width))


@dataclass(frozen=True)
class Band:
    """The 1st and 99th percentile of a statistic and their midpoint, as the paper draws it."""

    low: float
    middle: float
    high: float


def percentile_band(values: Tensor, low: float = 0.01, high: float = 0.99) -> Band:
    """The band over all positions."""
    flat = values.detach().to(device="cpu", dtype=torch.float64).flatten().numpy()
    first, last = (float(value) for value in numpy.quantile(flat, [low, high]))
    return Band(first, 0.5 * (first + last), last)


def agreement(left: Tensor, right: Tensor) -> float:
    """The share of positions at which two token rules pick the same token."""
    return float((left == right).double().mean())
