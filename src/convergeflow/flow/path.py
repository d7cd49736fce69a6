"""The probability path x_t = alpha_t x* + sigma_t z (paper Eq. 1), the noise that a prediction implies, distances.

One time convention in this package: t = 0 is noise, t = 1 is data. Coefficients are [batch], or [batch, length] when
each position has a noise level of its own; this file and the solver are the only ones that broadcast them.
"""

from __future__ import annotations

import math

from torch import Tensor

from convergeflow.flow.schedule import Coefficients


def spread(value: Tensor, like: Tensor) -> Tensor:
    """A per-row (or per-position) coefficient in the shape, dtype and device that multiplies `like`."""
    trailing = (1,) * (like.dim() - value.dim())
    # The host, which makes these few numbers, does not wait for a device to take them; MPS would read them too late.
    value = value.to(device=like.device, dtype=like.dtype, non_blocking=value.is_cpu and not like.is_mps)
    return value.reshape(value.shape + trailing)


def sample_path(x_star: Tensor, noise: Tensor, at: Coefficients) -> Tensor:
    """x_t = alpha x* + sigma z (Eq. 1)."""
    return spread(at.alpha, x_star) * x_star + spread(at.sigma, x_star) * noise


def noise_from_data(mu: Tensor, x_t: Tensor, at: Coefficients) -> Tensor:
    """epsilon = (x_t - alpha mu)/sigma; undefined where sigma = 0."""
    return (x_t - spread(at.alpha, x_t) * mu) / spread(at.sigma, x_t)


def normalised_distance(distance: Tensor, at: Coefficients, width: int) -> Tensor:
    """||x - alpha e_j||/(sigma sqrt d) from ||x - alpha e_j||: what Theorem 1 shows on a trajectory (Figure 2).

    It tends to 1 at the token that the state converges to, for there x = alpha e_j + sigma z, and grows with the
    signal-to-noise ratio at every other. This also holds for schedules whose noise never vanishes.
    """
    return distance / (spread(at.sigma, distance) * math.sqrt(width))
