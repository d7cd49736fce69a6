"""Noise schedules: alpha_t and sigma_t of x_t = alpha_t x* + sigma_t z, and the inverse map (paper Sec. 2.1).

Time runs from t = 0 (noise) to t = 1 (data). gamma = log(sigma^2/alpha^2) is the log noise-to-signal ratio, the
negative of the log-SNR. A schedule is immutable and maps a tensor of times to `Coefficients`. All arithmetic here is
float64.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from convergeflow.errors import UserError
from convergeflow.plugins import Registry


@dataclass(frozen=True)
class Coefficients:
    """alpha and sigma at some times, in the shape of the times."""

    alpha: Tensor
    sigma: Tensor

    @property
    def gamma(self) -> Tensor:
        """log(sigma^2/alpha^2); +inf at pure noise, -inf at clean data."""
        return 2.0 * (self.sigma.log() - self.alpha.log())

    @property
    def signal_to_noise(self) -> Tensor:
        """rho = alpha/sigma: the clock of the data-prediction ODE."""
        return self.alpha / self.sigma

    @property
    def kernel(self) -> Tensor:
        """alpha/sigma^2: the factor of <x_t, e_j> in the Gaussian kernel."""
        return self.alpha / self.sigma.square()

    def __getitem__(self, index: Any) -> Coefficients:
        return Coefficients(self.alpha[index], self.sigma[index])

    @staticmethod
    def joined(parts: Sequence[Coefficients], dim: int = 0) -> Coefficients:
        """Several groups of rows (0), or of positions (-1), one after the other."""
        return Coefficients(torch.cat([at.alpha for at in parts], dim), torch.cat([at.sigma for at in parts], dim))

    def wide(self, length: int) -> Coefficients:
        """The noise level of each row [B] at each of its `length` positions, [B, length]."""
        return Coefficients(self.alpha[:, None].expand(-1, length), self.sigma[:, None].expand(-1, length))

    def expand(self, rows: int) -> Coefficients:
        """The same noise level for `rows` rows, [rows]."""
        return Coefficients(self.alpha.expand(rows), self.sigma.expand(rows))


class Schedule(Protocol):
    """What paths, grids and solvers need of a schedule."""

    def __call__(self, t: Tensor) -> Coefficients:
        """The coefficients at times t in [0, 1]."""

    def time_at(self, log_snr: Tensor) -> Tensor:
        """The time at which the log-SNR has this value."""

    def at_gamma(self, gamma: Tensor) -> Coefficients:
        """The coefficients where log(sigma^2/alpha^2) = gamma."""

    def describe(self) -> dict[str, Any]:
        """A JSON description from which `schedule_from` makes it again."""


def _as_times(t: Tensor | float) -> Tensor:
    return torch.as_tensor(t, dtype=torch.float64)


@dataclass(frozen=True)
class Linear:
    """alpha = t, sigma = 1 - t: rectified flow."""

    def __call__(self, t: Tensor | float) -> Coefficients:
        t = _as_times(t)
        return Coefficients(t, 1.0 - t)

    def time_at(self, log_snr: Tensor | float) -> Tensor:
        return torch.sigmoid(_as_times(log_snr) / 2)

    def at_gamma(self, gamma: Tensor | float) -> Coefficients:
        half = _as_times(gamma) / 2
        # sigma by its own sigmoid: 1 - t would lose all digits near the data end.
        return Coefficients(torch.sigmoid(-half), torch.sigmoid(half))

    def describe(self) -> dict[str, Any]:
        return {"kind": "linear"}


def variance_preserving(gamma: Tensor) -> Coefficients:
    """alpha^2 = sigmoid(-gamma), sigma^2 = sigmoid(gamma)."""
    return Coefficients(torch.sigmoid(-gamma).sqrt(), torch.sigmoid(gamma).sqrt())


class _VariancePreserving:
    """alpha^2 + sigma^2 = 1."""

    def at_gamma(self, gamma: Tensor | float) -> Coefficients:
        return variance_preserving(_as_times(gamma))


@dataclass(frozen=True)
class Cosine(_VariancePreserving):
    """alpha = sin(pi t/2), sigma = cos(pi t/2): variance preserving."""

    def __call__(self, t: Tensor | float) -> Coefficients:
        t = _as_times(t)
        # cos(pi/2) is 6e-17 in floating point; the sine of the complement is exactly 0 at the data end.
        return Coefficients(torch.sin(t * (math.pi / 2)), torch.sin((1.0 - t) * (math.pi / 2)))

    def time_at(self, log_snr: Tensor | float) -> Tensor:
        return torch.atan((_as_times(log_snr) / 2).exp()) * (2 / math.pi)

    def describe(self) -> dict[str, Any]:
        return {"kind": "cosine"}


@dataclass(frozen=True)
class Gumbel(_VariancePreserving):
    """LangFlow's schedule: gamma = loc - scale log(-log q) with q = 1 - t, clamped at two quantiles.

    Variance preserving. The clamp keeps sigma away from zero: at the data end gamma = gamma_min, not -inf. The defaults
    are those of LangFlow at width 768; the useful range of gamma shifts by log(width).
    """

    loc: float = 4.723
    scale: float = 0.852
    cutoff: float = 1e-5

    def __post_init__(self) -> None:
        if not (self.scale > 0 and math.isfinite(self.loc) and math.isfinite(self.scale)):
            raise UserError(f"the Gumbel schedule needs a finite loc and scale > 0, not {self.loc}, {self.scale}")
        if not 0 < self.cutoff < 0.5:
            raise UserError(f"the Gumbel cutoff must lie in (0, 0.5), not {self.cutoff}")

    @property
    def gamma_min(self) -> float:
        """gamma at the data end."""
        return self.loc - self.scale * math.log(-math.log(self.cutoff))

    @property
    def gamma_max(self) -> float:
        """gamma at the noise end, loc - scale log(cutoff): LangFlow's form of the upper quantile (-log(1-c) ~ c)."""
        return self.loc - self.scale * math.log(self.cutoff)

    def gamma(self, t: Tensor | float) -> Tensor:
        """The clamped log noise-to-signal ratio at times t."""
        # log1p keeps the digits of -log(1 - t) near the noise end; the clamps on its value are the quantile clamps.
        minus_log_q = -torch.log1p(-_as_times(t).clamp(0.0, 1.0))
        return (self.loc - self.scale * minus_log_q.log()).clamp(self.gamma_min, self.gamma_max)

    def __call__(self, t: Tensor | float) -> Coefficients:
        return self.at_gamma(self.gamma(t))

    def time_at(self, log_snr: Tensor | float) -> Tensor:
        gamma = (-_as_times(log_snr)).clamp(self.gamma_min, self.gamma_max)
        return -torch.expm1(-torch.exp(-(gamma - self.loc) / self.scale))

    def cdf(self, gamma: Tensor) -> Tensor:
        """F(gamma): the share q of training draws with less noise than gamma (before clamping)."""
        return torch.exp(-torch.exp(-(gamma - self.loc) / self.scale))

    def describe(self) -> dict[str, Any]:
        return {"kind": "gumbel", "loc": self.loc, "scale": self.scale, "cutoff": self.cutoff}


SCHEDULES: Registry[type[Any]] = Registry(
    "schedule", "schedules", {"linear": Linear, "cosine": Cosine, "gumbel": Gumbel}
)
"""Kind -> dataclass; other packages add theirs by entry points `convergeflow.schedules`."""


def schedule_from(description: dict[str, Any]) -> Schedule:
    """The schedule described by `Schedule.describe`."""
    values = dict(description)
    kind = str(values.pop("kind", None))
    try:
        schedule: Schedule = SCHEDULES[kind](**values)
    except TypeError as error:
        raise UserError(f"schedule {kind!r}: {error}") from None
    return schedule


def gumbel_for_width(width: int) -> Gumbel:
    """LangFlow's default moved to another width: norms are sqrt(width), so gamma shifts by its logarithm."""
    return Gumbel(loc=4.723 - math.log(768 / width))


def plain_for_width(width: int, rows: int, length: int) -> Coefficients:
    """A noise level at which words are read without doubt, [rows, length]: where words that are known stand.

    It is the data end of the schedule that training starts from, whatever the schedule has learned since.
    """
    start = gumbel_for_width(width)
    return start.at_gamma(torch.full((rows, length), start.gamma_min, dtype=torch.float64))
