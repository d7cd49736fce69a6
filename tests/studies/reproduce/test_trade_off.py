"""Curves at equal entropy: points of the same noises are resampled together, so that what they share cancels."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from convergeflow.evaluation.estimate import Floats
from convergeflow.studies.reproduce import judges
from convergeflow.studies.reproduce.result import ExperimentResult
from convergeflow.studies.reproduce.trade_off import (
    entropy_below,
    frontier_ratio,
    gen_ppl_below,
    paired_ratio,
    ratio_at_equal_entropy,
    same_entropy,
    together,
)


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
            "per_sample": {
                "nll": nll.tolist(),
                "tokens": [64] * 200,
                "entropy": (entropy + 0.001 * order + rng.normal(0, 0.05, 200)).tolist(),
            },
        }
        points.append({"values": values, "order": order})
    return points


def test_noise_by_noise_a_small_difference_is_found() -> None:
    ratio = paired_ratio(curve(0.95, 3.4), curve(1.0, 3.4))
    assert ratio is not None and ratio.n == 200
    assert abs(ratio.value - 0.95) < 3 * ratio.se and ratio.se < 0.002


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


# ------------------------------------------------------------------------------------------ resampled together


def point(nll: Floats, entropy: Floats) -> dict[str, Any]:
    """A record of samples of one token each."""
    n = len(nll)
    ppl = math.exp(nll.mean())
    values = {
        "gen_ppl": ppl,
        "gen_ppl_se": ppl * nll.std(ddof=1) / math.sqrt(n),
        "entropy": entropy.mean(),
        "entropy_se": entropy.std(ddof=1) / math.sqrt(n),
        "per_sample": {"nll": nll.tolist(), "tokens": [1] * n, "entropy": entropy.tolist()},
    }
    return {"values": values, "paper": {"gen_ppl": ppl, "entropy": float(entropy.mean())}}


def crossed(left: tuple[float, float], right: tuple[float, float], n: int = 400, seed: int = 0) -> Any:
    """Two straight curves over entropies 3 to 4, of (log Gen. PPL at 3, at 4), whose points share each noise's part."""
    rng = np.random.default_rng(seed)
    hard, rich = rng.normal(0, 1.0, n), rng.normal(0, 0.3, n)
    made = []
    for ends in (left, right):
        own = [rng.normal(0, 0.1, n) for _ in ends]
        made.append([point(end + hard + o, 3.0 + i + rich) for i, (end, o) in enumerate(zip(ends, own, strict=True))])
    return made


def test_the_error_of_a_ratio_is_that_of_its_linear_part() -> None:
    """All entropies move alike, so the ratio is the mean of the points' differences, which has an error of its own."""
    left, right = crossed((5.0, 5.5), (5.1, 5.6))
    ratio = ratio_at_equal_entropy(left, right)
    each = [np.array([p["values"]["per_sample"]["nll"] for p in curve]).mean(0) for curve in (left, right)]
    apart = each[0] - each[1]
    assert ratio is not None and math.isclose(ratio.value, math.exp(apart.mean()), rel_tol=1e-6)
    assert ratio.se == pytest.approx(ratio.value * apart.std(ddof=1) / math.sqrt(400), rel=0.1)


def test_points_of_other_noises_vary_each_on_its_own() -> None:
    """Without numbers per sample the errors of the points add up: here sqrt(2 (s^2 + s^2) / 4) with s = 0.05."""
    left, right = crossed((5.0, 5.5), (5.1, 5.6))
    for record in (*left, *right):
        del record["values"]["per_sample"]
        record["values"] |= {"gen_ppl_se": 0.05 * record["values"]["gen_ppl"], "entropy_se": 0.0}
    ratio = ratio_at_equal_entropy(left, right)
    assert ratio is not None and ratio.se == pytest.approx(0.05 * ratio.value, rel=0.1)


def test_two_standard_errors_hold_the_truth() -> None:
    """Over fresh noises the truth, exp(-0.1), is missed about once in twenty."""
    missed = 0
    for seed in range(60):
        ratio = ratio_at_equal_entropy(*crossed((5.0, 5.5), (5.1, 5.6), n=100, seed=seed))
        assert ratio is not None
        missed += abs(ratio.value - math.exp(-0.1)) > 2 * ratio.se
    assert missed <= 9, "the chance of ten or more misses among 60 at 5 % is below one in a thousand"


def test_a_range_that_few_resamples_share_is_none() -> None:
    rng = np.random.default_rng(3)
    noise = [rng.normal(0, 1.0, 100) for _ in range(4)]
    left = [point(noise[0], 3.0 + 0.1 * noise[0]), point(noise[1], 3.5 + 0.1 * noise[1])]
    right = [point(noise[2], 3.495 + 0.1 * noise[2]), point(noise[3], 4.0 + 0.1 * noise[3])]
    shared = [p["values"]["entropy"] for p in (left[1], right[0])]
    right[0]["values"]["entropy"] = min(shared[1], shared[0] - 1e-4)  # by a hair, as measured
    assert ratio_at_equal_entropy(left, right) is None


def test_entropies_of_the_same_noises_are_told_apart() -> None:
    rng = np.random.default_rng(4)
    rich = rng.normal(3.0, 0.3, 400)
    low, high = (point(rich, rich + shift + rng.normal(0, 0.01, 400)) for shift in (0.0, 0.03))
    assert low["values"]["entropy_se"] > 0.01, "too large for 0.03 if the points had noises of their own"
    assert not same_entropy([low, high])
    judged = entropy_below(low, high, what="entropy")
    assert str(judged.verdict) == "reproduced" and "noise by noise" in judged.evidence


def test_one_sample_has_no_error() -> None:
    values = {"gen_ppl": math.e, "gen_ppl_se": None, "entropy": 1.0, "entropy_se": None}
    alone = {"values": {**values, "per_sample": {"nll": [1.0], "tokens": [1], "entropy": [1.0]}}}
    found = together(lambda curve: float(curve[0, 0]), [alone])
    assert found is not None and found.value == 1.0 and math.isnan(found.se)


def result_of(**curves: list[dict[str, Any]]) -> ExperimentResult:
    records = [
        {**record, "curve": name, "order": i} for name, points in curves.items() for i, record in enumerate(points)
    ]
    return ExperimentResult("test", "test", records)


def test_the_lowest_point_is_the_lowest_beyond_the_noise_that_all_share() -> None:
    """A is 5 % below B, each with an error of 5 %, nearly all of it common."""
    a, b = crossed((5.0, 5.5), (5.05, 5.6))
    options = {"curves": ["?"], "first": "a", "number": "gen_ppl", "end": "lowest", "what": "lowest"}
    assert str(judges.extreme(result_of(a=a, b=b), **options).verdict) == "reproduced"  # type: ignore[arg-type]
    assert str(judges.extreme(result_of(a=b, b=a), **options).verdict) == "not reproduced"  # type: ignore[arg-type]
    apart = {**options, "number": "entropy"}
    assert "tie" in judges.extreme(result_of(a=a, b=b), **apart).evidence  # type: ignore[arg-type]


def test_ranges_are_compared_noise_by_noise() -> None:
    """Ranges of 1.0 and 0.9 nats: each end is known to 0.015 only, but all ends move alike. 0.01 less is too little."""
    (a, b), (c, d) = crossed((5.0, 5.5), (5.0, 5.6), seed=1)
    for shift, expected in ((0.1, "reproduced"), (0.01, "too noisy")):
        each = b["values"]["per_sample"]
        moved = point(np.array(each["nll"]), np.array(each["entropy"]) - shift)
        result = result_of(narrow=[a, moved], broad=[c, d])
        found = judges.narrower_range(result, ["narrow", "broad"], "narrow", "broad", "ranges")
        assert str(found.verdict) == expected and f"less narrow {shift:.2g}" in found.evidence
    less = judges.varies_less(result_of(x=[a, b], y=[c, d]), "x", "y", "gen_ppl", "range", "")
    assert str(less.verdict) == "reproduced", "0.5 against 0.6"
