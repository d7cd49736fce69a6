"""Toys for the theory: vocabularies of a few tokens whose posteriors are exact, run through the package's own sampler.

A toy predictor is the embedding-weighted predictor of the paper with a base weight f given as a function, computed by
the same head that networks use. So these experiments test the theorem and the code at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from convergeflow.flow.path import spread
from convergeflow.flow.schedule import Coefficients, Schedule
from convergeflow.model.embedding import normalise_rows
from convergeflow.model.head import DirectPrediction, KernelLogF, LogF
from convergeflow.randomness import RowDraws, derive_seed
from convergeflow.sampling.integration import Endpoint, integrate
from convergeflow.sampling.settings import Settings
from convergeflow.sampling.wrappers import Predictor

BaseWeight = Callable[[Tensor, Coefficients], Tensor]
"""log f(j | x, t) for a state [B, L, d]: [B, L, V], up to a constant in j."""


def random_table(vocabulary: int, width: int, seed: int) -> Tensor:
    """Random directions with norm sqrt(width), [vocabulary, width] float64."""
    generator = torch.Generator().manual_seed(derive_seed(seed, "toy table"))
    return normalise_rows(torch.randn(vocabulary, width, generator=generator, dtype=torch.float64))


def starting_noise(num: int, length: int, width: int, seed: int) -> Tensor:
    """x at t = 0, [num, length, width] float64."""
    return RowDraws([derive_seed(seed, "toy noise", row) for row in range(num)]).normal(
        length, width, dtype=torch.float64
    )


def flow(predictor: Predictor, grid: Tensor, noise: Tensor, decode: Any = "prediction", **how: Any) -> Endpoint:
    """Trajectories of the package's sampler from `noise` along a grid, one call a step; `how` as in `integrate`."""
    settings = Settings(nfe=len(grid), self_condition="none", grid=tuple(grid.tolist()), decode=decode)
    return integrate(predictor, settings, noise, **how)


class ToyPredictor:
    """The embedding-weighted predictor with a given base weight."""

    def __init__(self, table: Tensor, schedule: Schedule, log_base: BaseWeight) -> None:
        self.table, self.schedule, self.log_base = table, schedule, log_base
        self._identity = torch.eye(len(table), dtype=table.dtype)

    def __call__(self, x: Tensor, at: Coefficients, condition: Tensor | None) -> LogF:
        return KernelLogF(self.log_base(x, at), self._identity, None, self.table)


class ScaledStatePredictor:
    """The counterexample of Proposition 2: mu(x, t) = x/(alpha + sigma), smooth, and right in the limit t -> 1."""

    def __init__(self, table: Tensor, schedule: Schedule) -> None:
        self.table, self.schedule = table, schedule

    def __call__(self, x: Tensor, at: Coefficients, condition: Tensor | None) -> LogF:
        return DirectPrediction(x / spread(at.alpha + at.sigma, x))


def prior_base(log_prior: Tensor) -> BaseWeight:
    """f = the prior: the exact posterior of a single token drawn from it."""

    def log_base(x_t: Tensor, at: Coefficients) -> Tensor:
        return log_prior.expand(*x_t.shape[:-1], len(log_prior))

    return log_base


def wrong_base(vocabulary: int, width: int, seed: int, strength: float = 3.0) -> BaseWeight:
    """A base weight that has nothing to do with any posterior, but is Lipschitz: strength times tanh of x and of t.

    Along a trajectory |log f(x_t, t) - log f(x_s, s)| is bounded by a constant times |t - s|, as the theorem asks,
    since the state moves with bounded speed under the linear schedule.
    """
    generator = torch.Generator().manual_seed(derive_seed(seed, "wrong base"))
    mix = torch.randn(vocabulary, width, generator=generator, dtype=torch.float64) / math.sqrt(width)
    drift = torch.randn(vocabulary, generator=generator, dtype=torch.float64)

    def log_base(x_t: Tensor, at: Coefficients) -> Tensor:
        share = spread(at.alpha / (at.alpha + at.sigma), x_t)
        return strength * torch.tanh(x_t @ mix.T + drift * share)

    return log_base


def joint_base(log_joint: Tensor, table: Tensor) -> BaseWeight:
    """f = P(token here | the noisy other position) for two positions with joint law exp(log_joint) [V, V]."""

    def log_base(x_t: Tensor, at: Coefficients) -> Tensor:
        kernel = spread(at.kernel, x_t)[..., 0].expand(x_t.shape[:-1])
        evidence = kernel[..., None] * (x_t @ table.T)  # equal norms: the other term of the kernel is constant
        first = torch.logsumexp(log_joint[None] + evidence[:, 1, None, :], dim=-1)
        second = torch.logsumexp(log_joint.T[None] + evidence[:, 0, None, :], dim=-1)
        return torch.stack([first, second], dim=1).log_softmax(-1)

    return log_base
