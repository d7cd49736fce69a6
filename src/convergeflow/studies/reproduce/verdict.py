"""What a claim of the paper comes to in this run: computed from records, never typed in.

Three verdicts. `reproduced` and `not reproduced` need a difference beyond the tolerance and beyond twice the standard
error of this run; what lies between, and what a scale cannot show, is `not testable here`, with the reason. The
tolerance is 2 % or more: the paper itself has two values 2 % apart for one setting.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from convergeflow.evaluation.estimate import Estimate

TOLERANCE = 0.02
"""Relative; the floor of every comparison."""


class Verdict(StrEnum):
    REPRODUCED = "reproduced"
    NOT_REPRODUCED = "not reproduced"
    NOT_TESTABLE = "not testable here"


@dataclass(frozen=True)
class Judgement:
    """A verdict and the numbers it rests on."""

    verdict: Verdict
    evidence: str
    paper: str = ""
    """The paper's own numbers for the same comparison, where it has any."""

    def describe(self) -> dict[str, Any]:
        return {**asdict(self), "verdict": str(self.verdict)}


def measured(values: dict[str, Any], name: str, n: int = 0) -> Estimate:
    """The number `name` and its error `name_se` of a record's values."""
    error = values.get(f"{name}_se")
    return Estimate(float(values[name]), float("nan") if error is None else float(error), n)


def exactly(value: float) -> Estimate:
    """A number without sampling error."""
    return Estimate(value, 0.0, 0)


def show(estimate: Estimate) -> str:
    """The number with its error behind it."""
    return f"{estimate.value:.4g}" + (f" ± {estimate.se:.2g}" if estimate.se > 0 else "")


def decide(agrees: bool, *, resolved: bool) -> Verdict:
    """From a comparison and whether this run resolves it."""
    if not resolved:
        return Verdict.NOT_TESTABLE
    return Verdict.REPRODUCED if agrees else Verdict.NOT_REPRODUCED


def relative_resolution(left: Estimate, right: Estimate, tolerance: float = TOLERANCE) -> float:
    """The smallest relative difference that counts: the tolerance, or two standard errors of the difference."""
    noise = 2.0 * math.hypot(left.se, right.se) / (abs(right.value) or 1.0)
    # An unknown error (one sample alone) resolves nothing.
    return max(TOLERANCE, tolerance, noise) if math.isfinite(noise) else math.inf


def below(left: Estimate, right: Estimate, *, what: str, tolerance: float = TOLERANCE, paper: str = "") -> Judgement:
    """The claim that `left` is smaller than `right`."""
    resolution = relative_resolution(left, right, tolerance)
    difference = (right.value - left.value) / (abs(right.value) or 1.0)
    evidence = f"{what}: {show(left)} against {show(right)} ({-difference:+.1%}; this run resolves {resolution:.1%})"
    return Judgement(decide(difference > 0, resolved=abs(difference) > resolution), evidence, paper)


def lower(left: Estimate, right: Estimate, *, what: str, resolution: float = TOLERANCE, paper: str = "") -> Judgement:
    """The claim that `left` is smaller, where differences matter and not ratios (entropies in nats)."""
    difference = left.value - right.value
    noise = 2.0 * math.hypot(left.se, right.se)
    resolution = max(resolution, noise) if math.isfinite(noise) else math.inf
    evidence = f"{what}: {show(left)} against {show(right)} ({difference:+.3f}; this run resolves {resolution:.3f})"
    return Judgement(decide(difference < 0, resolved=abs(difference) > resolution), evidence, paper)


def equal(left: Estimate, right: Estimate, *, what: str, tolerance: float = TOLERANCE, paper: str = "") -> Judgement:
    """The claim that two numbers agree within the tolerance; a run that cannot resolve the tolerance says so."""
    tolerance = max(TOLERANCE, tolerance)
    scale = abs(right.value) or 1.0
    difference = abs(left.value - right.value) / scale
    noise = 2.0 * math.hypot(left.se, right.se) / scale
    apart = f"apart by {difference:.1%}, tolerance {tolerance:.1%}, noise {noise:.1%}"
    evidence = f"{what}: {show(left)} against {show(right)} ({apart})"
    resolved = noise <= tolerance or difference > tolerance + noise
    return Judgement(decide(difference <= tolerance, resolved=resolved), evidence, paper)


def at_most(value: float, bound: float, *, what: str, paper: str = "") -> Judgement:
    """The claim that a number without sampling error stays below a bound."""
    return Judgement(decide(value <= bound, resolved=True), f"{what}: {value:.3g} (at most {bound:.3g})", paper)


def at_least(value: float, bound: float, *, what: str, paper: str = "") -> Judgement:
    """The claim that a number without sampling error reaches a bound."""
    return Judgement(decide(value >= bound, resolved=True), f"{what}: {value:.3g} (at least {bound:.3g})", paper)


def every(judgements: list[Judgement], *, what: str, paper: str = "") -> Judgement:
    """A claim about several comparisons at once.

    Reproduced if none contradicts the claim and at least half of all are resolved and agree with it; not reproduced if
    the larger part of those that are resolved contradicts it; otherwise undecided.
    """
    yes = sum(judgement.verdict == Verdict.REPRODUCED for judgement in judgements)
    no = sum(judgement.verdict == Verdict.NOT_REPRODUCED for judgement in judgements)
    open_ = len(judgements) - yes - no
    counts = f"{what}: {yes} of {len(judgements)} comparisons agree, {no} contradict, {open_} are not resolved"
    details = "; ".join(judgement.evidence for judgement in judgements[:4])
    verdict = Verdict.NOT_TESTABLE
    if yes and not no and 2 * yes >= len(judgements):
        verdict = Verdict.REPRODUCED
    elif no > yes:
        verdict = Verdict.NOT_REPRODUCED
    return Judgement(verdict, f"{counts} [{details}]" if details else counts, paper)


def not_testable(reason: str, paper: str = "") -> Judgement:
    return Judgement(Verdict.NOT_TESTABLE, reason, paper)
