"""The argmax clock: golden values, closed forms and simulation.

The golden values are those of the published code, which integrates by 100-point Gauss-Hermite; that rule is
off by up to 1e-4 at this vocabulary, so the exact integral is compared to adaptive quadrature as well.
"""

from __future__ import annotations

import numpy as np
import pytest
from numpy.polynomial.hermite_e import hermegauss
from scipy.integrate import quad
from scipy.special import log_ndtr, ndtr

from convergeflow.systems.accuracy import argmax_share, interpolation_at, signal_at

K = 50257
FLM = {0.3: 9.2e-5, 0.5: 8.49e-4, 0.7: 0.033288, 0.8: 0.412666, 0.85: 0.916145, 0.9: 0.999997}
DUO = {-3.55: 0.945471, -3.5: 0.928356, -2.5: 0.237997, -1.85: 0.049327, -1.75: 0.038251}


def gauss_hermite(m: float) -> float:
    nodes, weights = hermegauss(100)
    p = (weights / weights.sum()) @ np.exp((K - 1) * log_ndtr(nodes + m))
    return float((K * p - 1) / (K - 1))


@pytest.mark.parametrize(("c", "golden"), FLM.items())
def test_flm_golden_values(c: float, golden: float) -> None:
    m = c / (1 - c)
    assert gauss_hermite(m) == pytest.approx(golden, abs=1e-6)
    assert float(argmax_share(m, K)) == pytest.approx(golden, abs=1e-4)


@pytest.mark.parametrize(("gamma", "golden"), DUO.items())
def test_duo_golden_values(gamma: float, golden: float) -> None:
    assert float(argmax_share(np.exp(-gamma / 2), K)) == pytest.approx(golden, abs=1e-4)


@pytest.mark.parametrize("m", [0.3, 1.0, 2.3333, 4.0])
def test_the_integral_is_exact(m: float) -> None:
    def integrand(z: float) -> float:
        return float(np.exp(-z * z / 2 + (K - 1) * log_ndtr(z + m)) / np.sqrt(2 * np.pi))

    p = quad(integrand, -12, 12, limit=2000, epsabs=1e-15, points=[0, 1, 2, 3, 4])[0]
    assert float(argmax_share(m, K)) == pytest.approx((K * p - 1) / (K - 1), abs=1e-11)


def test_two_tokens_have_a_closed_form() -> None:
    m = np.array([0.2, 1.0, 3.0])
    assert argmax_share(m, 2) == pytest.approx(2 * ndtr(m / np.sqrt(2)) - 1, abs=1e-12)
    assert float(argmax_share(1.0, 2)) == pytest.approx(0.5205, abs=1e-4)


@pytest.mark.parametrize("vocabulary", [3, 300, K])
def test_the_inverse_meets_both_ends_and_comes_back(vocabulary: int) -> None:
    t = np.linspace(0, 1, 101)
    c = interpolation_at(t, vocabulary)
    assert c[0] == 0.0 and c[-1] == 1.0 and bool((np.diff(c) > 0).all())
    back = argmax_share(c[:-1] / (1 - c[:-1]), vocabulary)
    assert back == pytest.approx(t[:-1], abs=2e-4)
    assert float(argmax_share(signal_at(0.4, vocabulary), vocabulary)) == pytest.approx(0.4, abs=1e-9)


def test_simulated_argmax_is_right_as_often_as_the_clock_says() -> None:
    V, n = 40, 40_000
    noise = np.random.default_rng(0).standard_normal((n, V))
    for t in (0.1, 0.5, 0.9):
        c = float(interpolation_at(np.array(t), V))
        x = (1 - c) * noise
        x[:, 0] += c
        expected = 1 / V + t * (1 - 1 / V)
        assert (x.argmax(1) == 0).mean() == pytest.approx(expected, abs=4 * np.sqrt(0.25 / n))
