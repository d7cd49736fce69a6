"""Curves at equal entropy: paired differences find what interpolation over a flat entropy cannot."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from convergeflow.studies.reproduce.trade_off import frontier_ratio, gen_ppl_below, paired_ratio, ratio_at_equal_entropy


def curve(factor: float, entropy: float) -> list[dict[str, Any]]:
    """Three points of 200 samples whose difficulty varies a hundred times more than `factor` does."""
    rng = np.random.default_rng(0)
    hard = 1.0 + rng.normal(0, 0.5, 200)
    points = []
    for order in range(3):
        nll = 64 * (hard + math.log(factor) + rng.normal(0, 0.01, 200))
        ppl = math.exp(nll.sum() / (64 * 200))
        values = {
            "gen_ppl": ppl,
            "gen_ppl_se": 0.05 * ppl,
            "entropy": entropy + 0.001 * order,
            "entropy_se": 0.005,
            "per_sample": {"nll": nll.tolist(), "tokens": [64] * 200},
        }
        points.append({"values": values, "order": order})
    return points


def test_noise_by_noise_a_small_difference_is_found() -> None:
    ratio = paired_ratio(curve(0.95, 3.4), curve(1.0, 3.4))
    assert ratio is not None and ratio.n == 200
    assert abs(ratio.value - 0.95) < 3 * ratio.se and ratio.se < 0.002
    blurred = ratio_at_equal_entropy(curve(0.95, 3.4), curve(1.0, 3.4))
    assert blurred is None or blurred.se > 10 * ratio.se


def test_where_nothing_moves_entropy_the_lowest_points_are_compared() -> None:
    low = [*curve(1.0, 3.4), *curve(0.9, 3.4)]
    ratio, how = frontier_ratio(low, curve(1.0, 3.4))
    assert ratio is not None and abs(ratio.value - 0.9) < 3 * ratio.se + 0.002 and "noise by noise" in how
    apart, how = frontier_ratio(curve(0.9, 3.4), curve(1.0, 3.5))
    assert apart is None and how == "at equal entropy"


def test_two_points_are_compared_noise_by_noise() -> None:
    left, right = curve(0.95, 3.4)[0], curve(1.0, 3.4)[0]
    assert str(gen_ppl_below(left, right, what="").verdict) == "reproduced"
    assert str(gen_ppl_below(right, left, what="").verdict) == "not reproduced"
    for point in (left, right):
        del point["values"]["per_sample"]
    assert str(gen_ppl_below(left, right, what="").verdict) == "too noisy", "5 % against errors of 5 % each"


def test_texts_of_different_lengths_weigh_by_their_tokens() -> None:
    """The mean of the differences is the difference of the corpus' log perplexities, not of the texts' own."""
    rng = np.random.default_rng(1)
    points = []
    for _ in range(2):
        tokens = rng.integers(5, 60, 50)
        nll = tokens * rng.uniform(0.5, 3.0, 50)
        points.append({"values": {"per_sample": {"nll": nll.tolist(), "tokens": tokens.tolist()}}})
    rates = [np.sum(p["values"]["per_sample"]["nll"]) / np.sum(p["values"]["per_sample"]["tokens"]) for p in points]
    ratio = paired_ratio(points[:1], points[1:])
    assert ratio is not None and math.isclose(ratio.value, math.exp(rates[0] - rates[1]), rel_tol=1e-9)


def test_other_samples_are_not_paired() -> None:
    fewer = curve(1.0, 3.4)
    fewer[0]["values"]["per_sample"]["nll"].pop()
    fewer[0]["values"]["per_sample"]["tokens"].pop()
    assert paired_ratio(curve(0.9, 3.4), fewer) is None
    assert paired_ratio([], []) is None
