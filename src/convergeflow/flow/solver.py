"""Steps of the probability-flow ODE in data- and noise-prediction form (paper Eqs. 10, 11, 26, 32).

In the clock rho = alpha/sigma the ODE is d(x/sigma) = mu d rho: exact for a constant data prediction, which is why the
data form is the default. A solver is a frozen record of two choices: which history it wants and how it combines it.
Every step is written so that the data end (sigma = 0) is an ordinary point.

The `kernel` solver (not the paper's) keeps one thing constant along a step: log f, what the network said. The Gaussian
kernel is known at every state without a call, so the step follows d(x/sigma) = mu(x) d rho with mu's own kernel, in as
many substeps as the step's length asks for. Where log f does not depend on the state (one token after known ones) that
flow draws from f exactly, however few calls there are.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from convergeflow.errors import UserError
from convergeflow.flow.path import noise_from_data, spread
from convergeflow.flow.schedule import Coefficients, Schedule


def step_data(x: Tensor, mu: Tensor, now: Coefficients, then: Coefficients) -> Tensor:
    """Euler on d(x/sigma) = mu d(alpha/sigma): x_s = alpha_s mu + (sigma_s/sigma_t)(x - alpha_t mu)."""
    kept = spread(then.sigma / now.sigma, x)
    return kept * x + (spread(then.alpha, x) - kept * spread(now.alpha, x)) * mu


def step_noise(x: Tensor, epsilon: Tensor, now: Coefficients, then: Coefficients, w_ug: Tensor | float = 0.0) -> Tensor:
    """Euler on d(x/alpha) = epsilon d(sigma/alpha), its displacement multiplied by 1 + w_ug (unconditional guidance).

    For w_ug = 0 this is `step_data` with the epsilon of the same mu. It needs alpha_t > 0.
    """
    if not bool((now.alpha > 0).all()):
        raise UserError("the noise-prediction step needs alpha > 0: start the grid after t = 0")
    ratio = spread(then.alpha / now.alpha, x)
    displacement = spread(then.sigma - then.alpha * now.sigma / now.alpha, x)
    return ratio * x + (1.0 + w_ug) * displacement * epsilon


def step_guided(x: Tensor, mu: Tensor, now: Coefficients, then: Coefficients, w_ug: float = 0.0) -> Tensor:
    """The data step, or the noise step with unconditional guidance where w_ug is not 0."""
    if w_ug == 0.0:
        return step_data(x, mu, now, then)
    return step_noise(x, noise_from_data(mu, x, now), now, then, w_ug)


def extrapolate_multistep(
    mu: Tensor, previous: Tensor, before: Coefficients, now: Coefficients, then: Coefficients
) -> Tensor:
    """The data prediction of DPM-Solver++ (2M): the line through two of them in log(alpha/sigma) at the half step."""
    lambda_before, lambda_now = -0.5 * before.gamma, -0.5 * now.gamma
    # At the data end log(alpha/sigma) is infinite: the weight h/h_before has no limit there, so none is used.
    if not bool((then.sigma > 0).all()) or not bool((before.alpha > 0).all()):
        return mu
    ratio = (-0.5 * then.gamma - lambda_now) / (lambda_now - lambda_before)
    return mu + spread(0.5 * ratio, mu) * (mu - previous)


SUBSTEP = 0.25
"""Length of a substep of the `kernel` solver in gamma."""
OPENING_SPREAD = 0.05
"""Its even substeps begin where kernel scores differ between tokens by this many nats (their standard deviation)."""
OPENING_LEAP = 8.0
"""Before them one substep of this length in gamma comes out of all but pure noise, where mu hardly changes."""
CLOSING_MARGIN = 60.0
"""It ends where the kernel puts a token this many nats before the others on average, and so decides every one."""


def opening_gamma(width: int) -> float:
    """Where the `kernel` solver begins its even substeps: alpha/sigma sqrt(width) = OPENING_SPREAD."""
    return math.log(width) - 2.0 * math.log(OPENING_SPREAD)


def closing_gamma(width: int) -> float:
    """Where it ends: (alpha/sigma)^2 width = CLOSING_MARGIN."""
    return math.log(width) - math.log(CLOSING_MARGIN)


def substeps(schedule: Schedule, start: float, end: float, rows: int, *, leap: bool = False) -> list[Coefficients]:
    """Noise levels from gamma = start down to end, both included, evenly and at most SUBSTEP apart.

    With a `leap` they come after one level in all but pure noise.
    """
    count = max(1, math.ceil((start - end) / SUBSTEP))
    gammas = torch.linspace(start, end, count + 1, dtype=torch.float64)
    levels = schedule.at_gamma(torch.cat([gammas[:1] + OPENING_LEAP, gammas]) if leap else gammas)
    return [levels[i].expand(rows) for i in range(len(levels.alpha))]


def follow(
    x: Tensor, predict: Callable[[Tensor, Coefficients], Tensor], levels: Sequence[Coefficients], *, w_ug: float = 0.0
) -> Tensor:
    """The state carried through noise levels by Heun's rule, `predict` giving mu at a state without a network call."""
    mu = predict(x, levels[0])
    for now, then in itertools.pairwise(levels):
        ahead = predict(step_guided(x, mu, now, then, w_ug), then)
        x = step_guided(x, 0.5 * (mu + ahead), now, then, w_ug)
        mu = predict(x, then) if then is not levels[-1] else mu
    return x


@dataclass(frozen=True)
class Solver:
    """How one step is made from data predictions."""

    name: str
    form: str
    """`data` or `noise`: the variable in which the step is linear."""
    multistep: bool = False
    """Uses the previous step's prediction (no extra calls)."""
    corrector: bool = False
    """Predicts again at the end of the step and averages (a second prediction per step)."""
    kernel: bool = False
    """Keeps log f constant along a step, not mu, and goes on to where the kernel decides (`follow`)."""

    def advance(
        self,
        x: Tensor,
        mu: Tensor,
        now: Coefficients,
        then: Coefficients,
        *,
        w_ug: float = 0.0,
        history: tuple[Tensor, Coefficients] | None = None,
    ) -> Tensor:
        """One step from `now` to `then`; `history` is the previous step's prediction and coefficients."""
        if self.multistep and history is not None:
            previous, before = history
            mu = extrapolate_multistep(mu, previous, before, now, then)
        if self.form == "noise":
            return step_noise(x, noise_from_data(mu, x, now), now, then, w_ug)
        return step_guided(x, mu, now, then, w_ug)

    def correct(
        self, x: Tensor, mu: Tensor, mu_then: Tensor, now: Coefficients, then: Coefficients, *, w_ug: float = 0.0
    ) -> Tensor:
        """The trapezoidal step: the mean of the predictions at both ends, in the clock rho = alpha/sigma."""
        return step_guided(x, 0.5 * (mu + mu_then), now, then, w_ug)


EULER = Solver("euler", form="data")
EULER_NOISE = Solver("euler-noise", form="noise")
MULTISTEP = Solver("multistep", form="data", multistep=True)
"""DPM-Solver++ (2M)."""
HEUN = Solver("heun", form="data", corrector=True)
KERNEL = Solver("kernel", form="data", kernel=True)
