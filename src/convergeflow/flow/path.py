"""The probability path x_t = alpha_t x* + sigma_t z, and every change of parameterisation on it (paper Eqs. 1, 4, 8).

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


def data_from_noise(epsilon: Tensor, x_t: Tensor, at: Coefficients) -> Tensor:
    """mu = (x_t - sigma epsilon)/alpha; undefined where alpha = 0."""
    return (x_t - spread(at.sigma, x_t) * epsilon) / spread(at.alpha, x_t)


def velocity_from_data(mu: Tensor, x_t: Tensor, at: Coefficients) -> Tensor:
    """v = (sigma'/sigma) x_t + (alpha' - (sigma'/sigma) alpha) mu."""
    rate = spread(at.d_sigma / at.sigma, x_t)
    return rate * x_t + (spread(at.d_alpha, x_t) - rate * spread(at.alpha, x_t)) * mu


def velocity_from_noise(epsilon: Tensor, x_t: Tensor, at: Coefficients) -> Tensor:
    """v = (alpha'/alpha) x_t + (sigma' - (alpha'/alpha) sigma) epsilon."""
    rate = spread(at.d_alpha / at.alpha, x_t)
    return rate * x_t + (spread(at.d_sigma, x_t) - rate * spread(at.sigma, x_t)) * epsilon


def data_from_velocity(velocity: Tensor, x_t: Tensor, at: Coefficients) -> Tensor:
    """The mu whose velocity this is: (sigma v - sigma' x_t)/(alpha' sigma - sigma' alpha)."""
    wronskian = at.d_alpha * at.sigma - at.d_sigma * at.alpha
    return spread(at.sigma / wronskian, x_t) * velocity - spread(at.d_sigma / wronskian, x_t) * x_t


def noise_from_velocity(velocity: Tensor, x_t: Tensor, at: Coefficients) -> Tensor:
    """The epsilon whose velocity this is: (alpha' x_t - alpha v)/(alpha' sigma - sigma' alpha)."""
    wronskian = at.d_alpha * at.sigma - at.d_sigma * at.alpha
    return spread(at.d_alpha / wronskian, x_t) * x_t - spread(at.alpha / wronskian, x_t) * velocity
