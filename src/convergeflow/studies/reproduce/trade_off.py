"""Curves of Gen. PPL against entropy, compared at equal entropy.

One curve lies below another if its log Gen. PPL, interpolated linearly in entropy, is smaller on average over the
entropies that both cover. Errors of Gen. PPL and of entropy (through the slope) both enter. Where a control does not
move entropy at all, there is nothing to trade and every point is at equal entropy: then the lowest points of two curves
are compared.

All points start from the same noises. So two settings are compared noise by noise where that can be done: what they
make of one noise is subtracted before anything is averaged.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from convergeflow.evaluation import generative
from convergeflow.evaluation.estimate import Estimate
from convergeflow.studies.reproduce.result import Record
from convergeflow.studies.reproduce.verdict import Judgement, below, exactly, measured, show


def points_of(records: Sequence[Record], source: str = "values") -> list[tuple[float, float]]:
    """(Gen. PPL, entropy) of this run (`values`) or of the paper (`paper`)."""
    return [(record[source]["gen_ppl"], record[source]["entropy"]) for record in records]


def ratio_at_equal_entropy(left: Sequence[Record], right: Sequence[Record], source: str = "values") -> Estimate | None:
    """Gen. PPL of `left` over `right`'s at the entropies both reach; None where they share none."""
    curves = [sorted(points_of(records, source), key=lambda point: point[1]) for records in (left, right)]
    low = max(curve[0][1] for curve in curves)
    high = min(curve[-1][1] for curve in curves)
    if any(len(curve) < 2 for curve in curves) or not high > low:
        return None
    levels = np.linspace(low, high, 9)
    logs = [np.interp(levels, [point[1] for point in curve], np.log([point[0] for point in curve])) for curve in curves]
    value = math.exp(float(np.mean(logs[0] - logs[1])))
    if source == "paper":
        return exactly(value)
    errors = [_log_error(records, curve) for records, curve in zip((left, right), curves, strict=True)]
    return Estimate(value, value * math.hypot(*errors), len(left) + len(right))


def paired_ratio(left: Sequence[Record], right: Sequence[Record]) -> Estimate | None:
    """Gen. PPL of `left` over `right`'s, point by point and noise by noise; None where points have no pairs."""
    parts = [[record["values"].get("per_sample") for record in records] for records in (left, right)]
    if len(left) != len(right) or any(each is None for side in parts for each in side):
        return None
    return generative.paired_ratio(list(zip(*parts, strict=True)))


def same_entropy(records: Sequence[Record]) -> bool:
    """Whether no two of these points can be told apart by their entropy."""
    low, high = (choose(records, key=lambda r: r["values"]["entropy"])["values"] for choose in (min, max))
    return bool(high["entropy"] - low["entropy"] <= 2 * math.hypot(low["entropy_se"], high["entropy_se"]))


def nearest_ends(left: Sequence[Record], right: Sequence[Record]) -> tuple[Record, Record, float]:
    """The points of two curves whose entropies are closest, and by how much the first one's is higher."""
    pairs = [(a, b, a["values"]["entropy"] - b["values"]["entropy"]) for a in left for b in right]
    return min(pairs, key=lambda pair: abs(pair[2]))


def frontier_ratio(left: Sequence[Record], right: Sequence[Record]) -> tuple[Estimate | None, str]:
    """Gen. PPL of `left` over `right`'s at equal entropy, and how it was found."""
    if left and right and same_entropy([*left, *right]):
        lowest = [min(records, key=lambda r: float(r["values"]["gen_ppl"])) for records in (left, right)]
        ratio = paired_ratio([lowest[0]], [lowest[1]])
        if ratio is not None:
            return ratio, "at equal entropy (no setting changes it: lowest points, noise by noise)"
    return ratio_at_equal_entropy(left, right), "at equal entropy"


def gen_ppl_below(left: Record, right: Record, *, what: str, paper: str = "", effect: float | None = None) -> Judgement:
    """The claim that one point has a lower Gen. PPL than another, noise by noise where it can be had."""
    one, other = measured(left["values"], "gen_ppl"), measured(right["values"], "gen_ppl")
    ratio = paired_ratio([left], [right])
    if ratio is None:
        return below(one, other, what=what, paper=paper, effect=effect)
    what = f"{what}: {show(one)} against {show(other)}; noise by noise"
    return below(ratio, exactly(1.0), what=what, paper=paper, effect=effect)


def _log_error(records: Sequence[Record], curve: list[tuple[float, float]]) -> float:
    """Standard error of a curve's log Gen. PPL: its points' own, and their entropy's through the curve's slope."""
    span = curve[-1][1] - curve[0][1]
    slope = (math.log(curve[-1][0]) - math.log(curve[0][0])) / span if span else 0.0
    squares = [
        (r["values"]["gen_ppl_se"] / r["values"]["gen_ppl"]) ** 2 + (slope * r["values"]["entropy_se"]) ** 2
        for r in records
    ]
    # An average along the curve rests on about two independent points.
    return math.sqrt(float(np.mean(squares)) / 2)


def entropy_range(records: Sequence[Record], source: str = "values") -> float:
    entropies = [point[1] for point in points_of(records, source)]
    return max(entropies) - min(entropies)
