"""Curves of Gen. PPL against entropy, compared at equal entropy.

One curve lies below another if its log Gen. PPL, interpolated linearly in entropy, is smaller on average over the
entropies that both cover. Errors of Gen. PPL and of entropy (through the slope) both enter. Where a control does not
move entropy at all, there is nothing to trade and every point is at equal entropy: then the lowest points of two curves
are compared.

All points start from the same noises. So points and curves are compared noise by noise: a resample of the noises serves
all points at once, and what one noise makes of every setting cancels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from convergeflow.evaluation import generative
from convergeflow.evaluation.estimate import Estimate, Floats
from convergeflow.studies.reproduce.result import Record
from convergeflow.studies.reproduce.verdict import Judgement, below, exactly, measured, resolution, show

RESAMPLES = 1000
SHARED = 0.95
"""The share of resamples in which a statistic has to exist (two curves share a range of entropy, say)."""
GEN_PPL, ENTROPY = 0, 1
"""Columns of a curve, [points, 2]: the logarithm of Gen. PPL, and the entropy."""


def points_of(records: Sequence[Record], source: str = "values") -> list[tuple[float, float]]:
    """(Gen. PPL, entropy) of this run (`values`) or of the paper (`paper`)."""
    return [(record[source]["gen_ppl"], record[source]["entropy"]) for record in records]


def curve_of(records: Sequence[Record], source: str = "values") -> Floats:
    """The points as a curve, [points, 2]."""
    found = np.array(points_of(records, source), dtype=np.float64).reshape(-1, 2)
    return np.column_stack([np.log(found[:, 0]), found[:, 1]])


def together(statistic: Callable[..., float], *curves: Sequence[Record]) -> Estimate | None:
    """A number made of curves (`statistic` takes them as arrays) with its error over the noises that they share.

    The error is the root mean square of resamples about the number itself, so that it holds their bias too: where a
    curve folds back, a resample may order its points in another way. Points without numbers per sample, or of other
    noises, vary each on its own by their standard errors. None where the statistic does not exist (nan), here or in
    too many resamples.
    """
    value = statistic(*map(curve_of, curves))
    if math.isnan(value):
        return None
    drawn = _resampled(curves)
    found = np.array([statistic(*(curve[b] for curve in drawn)) for b in range(RESAMPLES)])
    exists = ~np.isnan(found)
    n = sum(map(len, curves))
    if not all(np.isfinite(curve).all() for curve in drawn):
        return Estimate(value, math.nan, n)  # an unknown error, as of one sample
    error = math.sqrt(float(np.mean((found[exists] - value) ** 2))) if exists.any() else math.nan
    return Estimate(value, error, n) if exists.mean() >= SHARED else None


def _resampled(curves: Sequence[Sequence[Record]]) -> list[Floats]:
    """Of each curve [resamples, points, 2]."""
    rng = np.random.default_rng([0, 0x7A0])
    parts = [record["values"].get("per_sample", {}) for records in curves for record in records]
    sizes = {len(part["entropy"]) if "entropy" in part else 0 for part in parts}
    if len(sizes) == 1 and min(sizes) > 1:
        num = min(sizes)
        picks = rng.integers(0, num, (RESAMPLES, num))
        points = [np.stack(generative.resampled(part, picks), axis=-1) for part in parts]
    else:
        points = []
        for record in (record for records in curves for record in records):
            ppl, entropy = (measured(record["values"], name) for name in ("gen_ppl", "entropy"))
            errors = np.array([ppl.se / ppl.value, entropy.se])
            points.append([math.log(ppl.value), entropy.value] + errors * rng.standard_normal((RESAMPLES, 2)))
    ends = np.cumsum([len(records) for records in curves])
    return [np.stack(points[end - len(records) : end], axis=1) for records, end in zip(curves, ends, strict=True)]


def ratio_at_equal_entropy(left: Sequence[Record], right: Sequence[Record], source: str = "values") -> Estimate | None:
    """Gen. PPL of `left` over `right`'s at the entropies both reach; None where they share none."""
    if source == "paper":
        value = _log_ratio(curve_of(left, source), curve_of(right, source))
        return None if math.isnan(value) else exactly(math.exp(value))
    found = together(_log_ratio, left, right)
    return None if found is None else found.map(math.exp, math.exp(found.value))


def _log_ratio(left: Floats, right: Floats) -> float:
    """The mean difference of log Gen. PPL over the range of entropy that two curves share; nan where there is none."""
    if len(left) < 2 or len(right) < 2:
        return math.nan
    low, high = max(c[:, ENTROPY].min() for c in (left, right)), min(c[:, ENTROPY].max() for c in (left, right))
    if not high > low:
        return math.nan
    levels = np.linspace(low, high, 9)
    ordered = [curve[np.argsort(curve[:, ENTROPY], kind="stable")] for curve in (left, right)]
    logs = [np.interp(levels, curve[:, ENTROPY], curve[:, GEN_PPL]) for curve in ordered]
    return float(np.mean(logs[0] - logs[1]))


def paired_ratio(left: Sequence[Record], right: Sequence[Record]) -> Estimate | None:
    """Gen. PPL of `left` over `right`'s, point by point and noise by noise; None where points have no pairs."""
    parts = [[record["values"].get("per_sample") for record in records] for records in (left, right)]
    if len(left) != len(right) or any(each is None for side in parts for each in side):
        return None
    return generative.paired_ratio(list(zip(*parts, strict=True)))


def same_entropy(records: Sequence[Record]) -> bool:
    """Whether no two of these points are apart in entropy by more than counts."""
    low, high = (choose(records, key=lambda r: r["values"]["entropy"]) for choose in (min, max))
    apart = together(_entropy_apart, [high], [low])
    return apart is not None and apart.value <= resolution(apart, exactly(0.0), relative=False)


def _entropy_apart(left: Floats, right: Floats) -> float:
    return float(left[0, ENTROPY] - right[0, ENTROPY])


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


def entropy_below(left: Record, right: Record, *, what: str, paper: str = "", effect: float | None = None) -> Judgement:
    """The claim that one point has a lower entropy than another, noise by noise."""
    values = [show(measured(record["values"], "entropy")) for record in (left, right)]
    apart = together(_entropy_apart, [left], [right])
    assert apart is not None
    what = f"{what}: {values[0]} against {values[1]}; noise by noise"
    return below(apart, exactly(0.0), relative=False, what=what, paper=paper, effect=effect)


def spread(curve: Floats, column: int = ENTROPY) -> float:
    """The range that a curve covers, of entropy or of log Gen. PPL."""
    return float(np.ptp(curve[:, column]))
