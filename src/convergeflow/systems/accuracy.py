"""How often the largest of K noisy coordinates is the right one: FLM's clock, and Duo's bridge from Gaussian noise.

For w = one-hot(x) m + noise with unit variance, p(m) = P(argmax w = x) = E_z Phi(z + m)^(K-1). Corrected for chance,
a = (K p - 1)/(K - 1) runs from 0 (pure noise) to 1. FLM has m = c/(1 - c), Duo m = exp(-gamma/2).
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from scipy.special import log_ndtr

_Z = np.linspace(-9.0, 9.0, 721)
"""Nodes for z ~ N(0, 1): the trapezoid rule converges geometrically on a smooth decaying integrand."""
_WEIGHT = np.exp(-0.5 * _Z**2) / np.sqrt(2 * np.pi) * (_Z[1] - _Z[0])


def argmax_share(signal: np.ndarray | float, K: int) -> np.ndarray:
    """a(m) for signals m >= 0 (infinity gives 1)."""
    m = np.atleast_1d(np.asarray(signal, dtype=np.float64))
    found = np.empty_like(m)
    for start in range(0, len(m), 512):
        part = m[start : start + 512]
        p = np.exp((K - 1) * log_ndtr(_Z + part[:, None])) @ _WEIGHT
        found[start : start + 512] = (K * p - 1) / (K - 1)
    return found.clip(0.0, 1.0).reshape(np.shape(signal))


@lru_cache(maxsize=8)
def _table(K: int, points: int) -> tuple[np.ndarray, np.ndarray]:
    c = np.linspace(0.0, 1.0, points)
    with np.errstate(divide="ignore"):
        share = argmax_share(c / (1.0 - c), K)
    share[0], share[-1] = 0.0, 1.0
    keep = np.concatenate([[True], np.diff(np.maximum.accumulate(share)) > 0])
    keep[-1] = True
    if share[keep][-2] >= 1.0:  # the end must be c = 1, not the first c that rounds to certainty
        keep[np.flatnonzero(keep)[-2]] = False
    return share[keep], c[keep]


def interpolation_at(share: np.ndarray, K: int, points: int = 10_000) -> np.ndarray:
    """c with a(c/(1 - c)) = share: 0 and 1 at the ends exactly, monotone in between."""
    known, c = _table(K, points)
    return np.interp(share, known, c)


def signal_at(share: float, K: int) -> float:
    """m with a(m) = share, by bisection."""
    low, high = 0.0, 60.0
    for _ in range(100):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if float(argmax_share(middle, K)) < share else (low, middle)
    return 0.5 * (low + high)
