"""The probability path x_t = alpha_t x* + sigma_t z (paper Eq. 1), and the noise that a data prediction implies.

One time convention in this package: t = 0 is noise, t = 1 is data. Coefficients are [batch], or [batch, length] when
each position has a noise level of its own; this file and the solver are the only ones that broadcast them.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from convergeflow.flow.schedule import Coefficients


@dataclass(frozen=True)
class PathSample:
    """A point of the path and what it was made of."""

    x_t: Tensor
    x_star: Tensor
    noise: Tensor
    coefficients: Coefficients


def spread(value: Tensor, like: Tensor) -> Tensor:
    """A per-row (or per-position) coefficient in the shape, dtype and device that multiplies `like`."""
    trailing = (1,) * (like.dim() - value.dim())
    return value.to(device=like.device, dtype=like.dtype).reshape(value.shape + trailing)


def sample_path(x_star: Tensor, noise: Tensor, at: Coefficients) -> PathSample:
    """x_t = alpha x* + sigma z."""
    x_t = spread(at.alpha, x_star) * x_star + spread(at.sigma, x_star) * noise
    return PathSample(x_t, x_star, noise, at)


def noise_from_data(mu: Tensor, x_t: Tensor, at: Coefficients) -> Tensor:
    """epsilon = (x_t - alpha mu)/sigma; undefined where sigma = 0."""
    return (x_t - spread(at.alpha, x_t) * mu) / spread(at.sigma, x_t)
