"""Frontiers: Gen. PPL against entropy along a control, and Gen. PPL at the data's own entropy.

A single point can be moved to almost any Gen. PPL by giving up entropy, so systems are compared at one entropy, the
data's. `HOW` says how it is read off. Points made from the same seeds are resampled together, since their errors go
together.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from convergeflow.evaluation.estimate import Floats, finite, number
from convergeflow.evaluation.generative import resampled

BOOTSTRAPS = 1000
SAME = 2.0
"""Numbers this many standard errors of their difference apart, or fewer, are not told apart."""
NEAR = 0.05
"""Nats: an end of a frontier this close to the data's entropy is at it. The paper's own table compares systems at
entropies 0.04 nat apart as matched."""
ONE = 1e-5
"""Nats: points no further apart in entropy are at one entropy, where the mean of their log Gen. PPL counts. Records
keep a sample's entropy to six digits, so a line between such points would follow the rounding."""
HOW = (
    "points are off the frontier if another has a lower Gen. PPL beyond two standard errors and no less entropy within "
    "two; log Gen. PPL is interpolated linearly in entropy between the two points of the frontier that enclose "
    f"the data's; no extrapolation, but an end within {NEAR:g} nat or two standard errors of the data's entropy counts "
    f"as being there; uncertainty: {BOOTSTRAPS} bootstrap resamples of the whole curve (points of the same seeds "
    "together), the data's entropy varied with its standard error"
)


@dataclass(frozen=True)
class FrontierPoint:
    """One setting of the control and what was measured there."""

    value: Any
    gen_ppl: float
    gen_ppl_se: float
    entropy: float
    entropy_se: float
    nfe: int
    n: int
    seeds: Any
    per_sample: Mapping[str, Floats]
    """`nll`, `tokens` and `entropy` of each sample."""
    valid: float | None = None
    file: str | None = None

    @classmethod
    def from_record(cls, value: Any, record: Mapping[str, Any], file: str | None = None) -> FrontierPoint:
        """A point from an evaluation record."""
        known: dict[str, Any] = {name: record[name] for name in ("entropy", "nfe", "n", "seeds")}
        for name in ("gen_ppl_se", "entropy_se"):
            known[name] = math.nan if record[name] is None else record[name]
        per_sample = {name: np.array(record["per_sample"][name], np.float64) for name in ("nll", "tokens", "entropy")}
        return cls(
            value,
            math.inf if record["gen_ppl"] is None else record["gen_ppl"],
            **known,
            per_sample=per_sample,
            valid=record.get("valid"),
            file=file,
        )

    def describe(self) -> dict[str, Any]:
        """As JSON values."""
        names = ("value", "gen_ppl", "gen_ppl_se", "entropy", "entropy_se", "nfe", "n", "valid")
        values = {name: getattr(self, name) for name in names} | {"record": self.file}
        return {name: finite(value) if isinstance(value, float) else value for name, value in values.items()}


@dataclass(frozen=True)
class Crossing:
    """Gen. PPL where a curve has the data's entropy; `gen_ppl` is None where it never has."""

    says: str
    gen_ppl: float | None = None
    se: float | None = None
    interval_95: list[float] | None = None
    """The middle 95 % of the bootstrap."""
    between: list[Any] | None = None
    """The values of the control on both sides."""
    gap: float | None = None
    """Nats by which the entropy it was read at lies above the data's; 0 between two points."""
    tie: bool | None = None
    """Whether that is no more than two standard errors: the entropies tie."""

    def describe(self) -> dict[str, Any]:
        """As JSON values."""
        return {name: getattr(self, name) for name in ("gen_ppl", "se", "interval_95", "between", "gap", "tie", "says")}


def undominated(points: Sequence[FrontierPoint]) -> list[FrontierPoint]:
    """The points on the frontier, in the order of their entropy; infinite ones never are."""
    points = [point for point in points if math.isfinite(point.gen_ppl)]

    def beaten(point: FrontierPoint, other: FrontierPoint) -> bool:
        relative = _noise(point.gen_ppl_se / point.gen_ppl, other.gen_ppl_se / other.gen_ppl)
        lower = math.log(point.gen_ppl / other.gen_ppl) > relative
        return lower and other.entropy >= point.entropy - _noise(point.entropy_se, other.entropy_se)

    kept = [point for point in points if not any(beaten(point, other) for other in points)]
    return sorted(kept, key=lambda point: point.entropy)


def _noise(one: float, other: float) -> float:
    """The largest difference that is not told from none; an unknown error counts as none."""
    return SAME * math.hypot(*(error if math.isfinite(error) else 0.0 for error in (one, other)))


def interpolate(
    points: Sequence[FrontierPoint], entropy: float, entropy_se: float = 0.0, *, bootstraps: int = BOOTSTRAPS
) -> Crossing:
    """Gen. PPL of a curve at an entropy; see `HOW`."""
    ordered = undominated(points)
    if not ordered:
        return Crossing("no point has a finite Gen. PPL")
    groups = _at_one_entropy(ordered)
    entropies = _means([point.entropy for point in ordered], groups)
    lowest, highest = entropies[0], entropies[-1]
    nearest = ordered[0] if entropy < lowest else ordered[-1]
    outside = not lowest <= entropy <= highest
    gap, noise = nearest.entropy - entropy if outside else 0.0, _noise(nearest.entropy_se, entropy_se)
    if abs(gap) > max(NEAR, noise):
        where = "below" if highest < entropy else "above"
        seen = [point.entropy for point in points if math.isfinite(point.gen_ppl)]
        covered = f"its points have {min(seen):.3f} to {max(seen):.3f}"
        return Crossing(
            f"stays {where} the data's entropy {entropy:.3f} ({covered}): no Gen. PPL can be read off there"
        )
    above = next((i for i, found in enumerate(entropies) if found >= entropy), len(groups) - 1)
    enclosing = ordered[groups[max(above - 1, 0)].start], ordered[groups[above].stop - 1]
    left, right = (nearest, nearest) if outside else enclosing
    value = float(np.interp(entropy, entropies, _means([math.log(point.gen_ppl) for point in ordered], groups)))
    draws = _bootstrap(ordered, groups, entropy, entropy_se, bootstraps)
    gen_ppl, se = math.exp(value), math.exp(value) * float(draws.std(ddof=1))
    low, high = (math.exp(q) for q in np.quantile(draws, [0.025, 0.975]))
    place = f"between {left.value} and {right.value}"
    if outside:
        place = f"its nearest point, {nearest.value}, {gap:+.3f} nat: {'a tie' if abs(gap) <= noise else 'not a tie'}"
    interval = f"95 %: {low:.3g} to {high:.3g}"
    says = f"Gen. PPL {number(gen_ppl, se)} at the data's entropy {entropy:.3f} ({interval}; {place})"
    return Crossing(says, gen_ppl, se, [low, high], [left.value, right.value], gap, abs(gap) <= noise)


def _at_one_entropy(ordered: Sequence[FrontierPoint]) -> list[slice]:
    """Runs of points in the order of their entropy that differ by no more than `ONE` from the first of the run."""
    starts = [0]
    for i, point in enumerate(ordered):
        if point.entropy - ordered[starts[-1]].entropy > ONE:
            starts.append(i)
    return [slice(first, last) for first, last in zip(starts, [*starts[1:], len(ordered)], strict=True)]


def _means(values: Sequence[float], groups: Sequence[slice]) -> list[float]:
    return [float(np.mean(values[group])) for group in groups]


def _bootstrap(
    points: Sequence[FrontierPoint], groups: Sequence[slice], entropy: float, entropy_se: float, times: int
) -> Floats:
    """log Gen. PPL at the data's entropy in resamples of the whole curve, [times].

    A resample may leave the data's entropy just outside its outermost points; then the nearest of them counts.
    """
    rng = np.random.default_rng([0, 0xF20])
    targets = entropy + entropy_se * rng.standard_normal(times)
    together: dict[str, np.ndarray[Any, Any]] = {}
    drawn = []
    for point in points:
        num = len(point.per_sample["nll"])
        key = f"{point.seeds}:{num}"
        if key not in together:
            together[key] = rng.integers(0, num, (times, num))
        drawn.append(resampled(point.per_sample, together[key]))
    values, entropies = (
        np.stack([np.mean([pair[side] for pair in drawn[group]], axis=0) for group in groups], axis=1)
        for side in (0, 1)
    )
    found = np.empty(times)
    for b in range(times):
        order = np.argsort(entropies[b], kind="stable")
        found[b] = np.interp(targets[b], entropies[b][order], values[b][order])
    return found


@dataclass(frozen=True)
class Frontier:
    """Curves of one model, corpus and protocol, and the data's own point."""

    title: str
    control: str
    curves: Mapping[str, Sequence[FrontierPoint]]
    """Label -> the points along the control, with everything else fixed."""
    real: Mapping[str, Any]
    """gen_ppl, gen_ppl_se, entropy, entropy_se of real text; empty without any."""
    scorer: str
    protocol: str
    facts: Mapping[str, Any]
    """What else a reader needs: model, corpus, length, n, command."""
    floor: float | None = None
    """exp of the data's true entropy per token, where it is known."""

    def crossing(self, label: str) -> Crossing:
        """Gen. PPL of a curve at the data's entropy."""
        if self.real.get("entropy") is None:
            return Crossing("there is no real text to take the entropy from")
        return interpolate(self.curves[label], self.real["entropy"], self.real.get("entropy_se") or 0.0)

    def describe(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "kind": "frontier",
            "format": 1,
            **{name: getattr(self, name) for name in ("title", "control", "scorer", "protocol")},
            "real": dict(self.real),
            "floor": self.floor,
            "how": HOW,
            **dict(self.facts),
            "curves": [
                {
                    "label": label,
                    "points": [point.describe() for point in points],
                    "at_data_entropy": self.crossing(label).describe(),
                }
                for label, points in self.curves.items()
            ],
        }
