from __future__ import annotations

import math

import numpy as np
import pytest

from convergeflow.evaluation.estimate import Estimate, finite, grouped_jackknife, groups_of, mean, pairwise_mean, ratio


def test_mean_by_hand() -> None:
    found = mean([1.0, 2.0, 6.0])
    # deviations -2, -1, 3: variance 14/2 = 7, standard error sqrt(7/3)
    assert found.value == 3.0 and found.se == pytest.approx(math.sqrt(7 / 3)) and found.n == 3
    assert math.isnan(mean([4.0]).se) and math.isnan(mean([]).value)


def test_ratio_by_hand_and_with_equal_denominators() -> None:
    found = ratio([1.0, 4.0], [1.0, 3.0])
    # R = 5/4; residuals 1 - 5/4 = -1/4 and 4 - 15/4 = 1/4; sqrt((1/8)/(2 * 1))/2 = 1/8
    assert found.value == 1.25 and found.se == pytest.approx(0.125)
    values = np.array([0.3, 0.8, 0.1, 0.5])
    assert ratio(5 * values, np.full(4, 5.0)).se == pytest.approx(mean(values).se)


def test_ratio_error_is_that_of_repeated_experiments() -> None:
    rng = np.random.default_rng(0)
    claims, values = [], []
    for _ in range(400):
        tokens = rng.integers(5, 50, 60)
        nll = tokens * 2.0 + rng.normal(0, 1, 60) * tokens
        found = ratio(nll, tokens)
        claims.append(found.se)
        values.append(found.value)
    assert np.mean(claims) == pytest.approx(np.std(values), rel=0.12)


def test_pairwise_error_is_that_of_repeated_experiments() -> None:
    rng = np.random.default_rng(1)
    claims, values = [], []
    for _ in range(300):
        x = rng.normal(1.0, 1.0, 40)
        found = pairwise_mean(np.outer(x, x))  # mean over pairs estimates the squared mean, 1
        claims.append(found.se)
        values.append(found.value)
    assert np.mean(values) == pytest.approx(1.0, abs=0.06)
    assert np.mean(claims) == pytest.approx(np.std(values), rel=0.15)


def test_jackknife_of_a_mean_is_its_standard_error() -> None:
    values = np.array([1.0, 5.0, 2.0, 2.5, 9.0])
    found = grouped_jackknife(list(values), lambda parts: float(np.mean(parts)), 5)
    assert found.se == pytest.approx(mean(values).se) and found.value == pytest.approx(3.9)


def test_groups_cover_every_sample_once() -> None:
    for num in (1, 7, 32, 129):
        parts = groups_of(num, 12)
        assert [i for part in parts for i in range(num)[part]] == list(range(num))
        assert len(parts) == min(num, 12)


def test_json_has_no_nan() -> None:
    assert Estimate(math.nan, math.inf, 0).describe() == {"value": None, "se": None, "n": 0}
    assert finite(2.5) == 2.5
