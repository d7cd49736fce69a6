"""A number with its standard error, and the three ways this package arrives at one.

Samples are independent (each has a seed of its own), tokens inside a sample are not: every standard error here is over
samples, never over tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Estimate:
    """A value, its standard error over `n` samples (nan where one sample cannot tell)."""

    value: float
    se: float
    n: int

    def describe(self) -> dict[str, Any]:
        """As JSON values; what is not a finite number is null."""
        return {"value": finite(self.value), "se": finite(self.se), "n": self.n}

    def map(self, function: Callable[[float], float], slope: float) -> Estimate:
        """The estimate of a function of this one, with its error by the delta method."""
        return Estimate(function(self.value), abs(slope) * self.se, self.n)


def finite(value: float) -> float | None:
    """The number, or None for nan and the infinities, which JSON does not have."""
    return float(value) if math.isfinite(value) else None


def number(value: float | None, se: float | None = None) -> str:
    """A value with its standard error, to the digit that the error allows."""
    if value is None or not math.isfinite(value):
        return "-"
    if se is None or not math.isfinite(se) or se == 0:
        return f"{value:.4g}"
    digits = max(0, 1 - math.floor(math.log10(se)))
    return f"{value:.{digits}f} ± {se:.{digits}f}"


def mean(values: ArrayLike) -> Estimate:
    """The mean of one number per sample."""
    numbers = np.asarray(values, dtype=np.float64)
    n = len(numbers)
    if n == 0:
        return Estimate(math.nan, math.nan, 0)
    se = float(numbers.std(ddof=1) / math.sqrt(n)) if n > 1 else math.nan
    return Estimate(float(numbers.mean()), se, n)


def ratio(numerators: ArrayLike, denominators: ArrayLike) -> Estimate:
    """sum(numerators)/sum(denominators) over samples; standard error by the delta method.

    With R the ratio and c the mean denominator: se^2 = sum_i (a_i - R b_i)^2 / (n (n - 1) c^2).
    """
    a, b = np.asarray(numerators, dtype=np.float64), np.asarray(denominators, dtype=np.float64)
    n, total = len(a), float(b.sum())
    if n == 0 or total == 0:
        return Estimate(math.nan, math.nan, n)
    value = float(a.sum()) / total
    if n == 1:
        return Estimate(value, math.nan, n)
    residual = a - value * b
    se = math.sqrt(float(residual @ residual) / (n * (n - 1))) / (total / n)
    return Estimate(value, se, n)


def pairwise_mean(pairs: Floats) -> Estimate:
    """The mean of a symmetric matrix off its diagonal, a U-statistic: se = 2 std(row means)/sqrt(n)."""
    n = len(pairs)
    if n < 2:
        return Estimate(math.nan, math.nan, n)
    rows = (pairs.sum(1) - np.diagonal(pairs)) / (n - 1)
    se = 2 * float(rows.std(ddof=1)) / math.sqrt(n) if n > 2 else math.nan
    return Estimate(float(rows.mean()), se, n)


def grouped_jackknife(parts: Sequence[Any], statistic: Callable[[Sequence[Any]], float], n: int) -> Estimate:
    """A statistic of all parts, with the delete-one-group jackknife for its error; `n` is the number of samples."""
    whole = statistic(parts)
    groups = len(parts)
    if groups < 2:
        return Estimate(whole, math.nan, n)
    without = np.array([statistic([*parts[:i], *parts[i + 1 :]]) for i in range(groups)])
    if not np.isfinite(without).all():
        return Estimate(whole, math.nan, n)
    return Estimate(whole, math.sqrt((groups - 1) / groups * float(((without - without.mean()) ** 2).sum())), n)


def groups_of(num: int, at_most: int = 32) -> list[slice]:
    """Consecutive samples in at most `at_most` groups of nearly equal size."""
    edges = np.linspace(0, num, min(num, at_most) + 1).astype(int)
    return [slice(int(a), int(b)) for a, b in pairwise(edges)]
