"""Steps of the probability-flow ODE in data- and noise-prediction form (paper Eqs. 10, 11, 26, 32).

In the clock rho = alpha/sigma the ODE is d(x/sigma) = mu d rho: exact for a constant data prediction, which is why the
data form is the default. A solver is a frozen record of two choices: which history it wants and how it combines it.
Every step is written so that the data end (sigma = 0) is an ordinary point.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from convergeflow.errors import UserError
from convergeflow.flow.path import noise_from_data, spread
from convergeflow.flow.schedule import Coefficients


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


History = tuple[Tensor, Coefficients] | None
"""The previous step's prediction, and the noise level that it was made at."""


@dataclass(frozen=True)
class Solver:
    """How one step is made from data predictions."""

    form: str = "data"
    """`data` or `noise`: the variable in which the step is linear."""
    multistep: bool = False
    """Uses the previous step's prediction (no extra calls)."""
    corrector: bool = False
    """Predicts again at the end of the step and goes with the mean (a second prediction per step)."""
    kernel: bool = False
    """Keeps log f constant along a step, not mu, and goes on to where the kernel decides (`sampling.kernel`)."""

    def advance(
        self, x: Tensor, mu: Tensor, now: Coefficients, then: Coefficients, w_ug: float = 0.0, history: History = None
    ) -> Tensor:
        """One step from `now` to `then`."""
        if self.multistep and history is not None:
            previous, before = history
            mu = extrapolate_multistep(mu, previous, before, now, then)
        if self.form == "noise":
            return step_noise(x, noise_from_data(mu, x, now), now, then, w_ug)
        return step_guided(x, mu, now, then, w_ug)


EULER = Solver()
EULER_NOISE = Solver(form="noise")
MULTISTEP = Solver(multistep=True)
"""DPM-Solver++ (2M)."""
HEUN = Solver(corrector=True)
KERNEL = Solver(kernel=True)
