"""Curves at equal entropy: paired differences find what interpolation over a flat entropy cannot."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from convergeflow.experiments.trade_off import paired_ratio, ratio_at_equal_entropy


def curve(factor: float, entropy: float) -> list[dict[str, Any]]:
    """Three points of 200 samples whose difficulty varies a hundred times more than `factor` does."""
    rng = np.random.default_rng(0)
    hard = 1.0 + rng.normal(0, 0.5, 200)
    points = []
    for order in range(3):
        nll = 64 * (hard + math.log(factor) + rng.normal(0, 0.01, 200))
        ppl = math.exp(nll.sum() / (64 * 200))
        values = {"gen_ppl": ppl, "gen_ppl_se": 0.05 * ppl, "entropy": entropy + 0.001 * order, "entropy_se": 0.005,
                  "per_sample": {"nll": nll.tolist(), "tokens": [64] * 200}}  # fmt: skip
        points.append({"values": values, "order": order})
    return points


def test_noise_by_noise_a_small_difference_is_found() -> None:
    ratio = paired_ratio(curve(0.95, 3.4), curve(1.0, 3.4))
    assert ratio is not None and ratio.n == 200
    assert abs(ratio.value - 0.95) < 3 * ratio.se and ratio.se < 0.002
    blurred = ratio_at_equal_entropy(curve(0.95, 3.4), curve(1.0, 3.4))
    assert blurred is None or blurred.se > 10 * ratio.se


def test_other_entropies_or_other_samples_are_not_paired() -> None:
    assert paired_ratio(curve(0.9, 3.4), curve(1.0, 3.5)) is None
    fewer = curve(1.0, 3.4)
    fewer[0]["values"]["per_sample"]["nll"].pop()
    assert paired_ratio(curve(0.9, 3.4), fewer) is None
    assert paired_ratio([], []) is None
