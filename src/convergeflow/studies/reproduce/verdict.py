"""What a claim of the paper comes to in this run: computed from records, never typed in.

`reproduced` and `not reproduced` need a difference beyond the tolerance and beyond twice the standard error of this
run. The tolerance is 2 % or more: the paper itself has two values 2 % apart for one setting. A claim about several
comparisons of which some agree and as many or fewer contradict is `mixed`. What is left is open, and the verdict says
what would close it:

    too noisy               the difference is smaller than this run resolves: take more samples
    needs another corpus    this run would have seen the paper's own difference and it is not there (more samples
                            could only find a smaller one), or the claim is about numbers of the paper's corpus
    not measured            something the claim needs is missing here: a trained model, a comparison, a fetched corpus
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
    MIXED = "mixed"
    TOO_NOISY = "too noisy"
    OTHER_CORPUS = "needs another corpus"
    NOT_MEASURED = "not measured"


OPEN = (Verdict.TOO_NOISY, Verdict.OTHER_CORPUS, Verdict.NOT_MEASURED)
"""Verdicts that decide nothing, the first before the others where two of them are as frequent."""


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


def absent(difference: float, effect: float | None, resolution: float) -> bool:
    """Whether the paper's own difference, the `effect`, would have been seen here and is not what was found."""
    return effect is not None and abs(effect) > resolution and abs(difference - effect) > resolution


def decide(agrees: bool, *, resolved: bool, seen: bool = False) -> Verdict:
    """From a comparison and whether this run resolves it; `seen`: the paper's difference would be, and is `absent`."""
    if not resolved:
        return Verdict.OTHER_CORPUS if seen else Verdict.TOO_NOISY
    return Verdict.REPRODUCED if agrees else Verdict.NOT_REPRODUCED


def _unresolved(resolved: bool, seen: bool, effect: str) -> str:
    """What evidence says of a comparison that this run does not resolve."""
    if resolved:
        return ""
    return f"; a tie, though the paper's own difference, {effect}, would be seen" if seen else "; a tie within errors"


def _scale(right: Estimate, relative: bool) -> float:
    """What differences from `right` are divided by."""
    return (abs(right.value) or 1.0) if relative else 1.0


def resolution(left: Estimate, right: Estimate, tolerance: float = TOLERANCE, *, relative: bool = True) -> float:
    """The smallest difference that counts: the tolerance, or two standard errors of the difference."""
    noise = 2.0 * math.hypot(left.se, right.se) / _scale(right, relative)
    # An unknown error (one sample alone) resolves nothing.
    return max(TOLERANCE, tolerance, noise) if math.isfinite(noise) else math.inf


def below(
    left: Estimate,
    right: Estimate,
    *,
    what: str,
    relative: bool = True,
    tolerance: float = TOLERANCE,
    paper: str = "",
    effect: float | None = None,
) -> Judgement:
    """The claim that `left` is smaller than `right`; `effect` is the paper's own difference, if it has one.

    Differences are relative to `right`, or plain ones where ratios mean nothing (entropies in nats).
    """
    form = ".1%" if relative else ".3f"
    least = resolution(left, right, tolerance, relative=relative)
    difference = (left.value - right.value) / _scale(right, relative)
    resolved, seen = abs(difference) > least, absent(difference, effect, least)
    tie = _unresolved(resolved, seen, f"{effect or 0:+{form}}")
    found = f"{difference:+{form}}; this run resolves {least:{form}}{tie}"
    evidence = f"{what}: {show(left)} against {show(right)} ({found})"
    return Judgement(decide(difference < 0, resolved=resolved, seen=seen), evidence, paper)


def equal(left: Estimate, right: Estimate, *, what: str, tolerance: float = TOLERANCE, paper: str = "") -> Judgement:
    """The claim that two numbers agree within the tolerance, with two standard errors of their difference on top."""
    tolerance = max(TOLERANCE, tolerance)
    scale = _scale(right, relative=True)
    difference = abs(left.value - right.value) / scale
    noise = 2.0 * math.hypot(left.se, right.se) / scale
    apart = f"apart by {difference:.1%}, tolerance {tolerance:.1%}, noise {noise:.1%}"
    evidence = f"{what}: {show(left)} against {show(right)} ({apart})"
    resolved = abs(difference - tolerance) >= noise
    return Judgement(decide(difference <= tolerance, resolved=resolved), evidence, paper)


def at_most(value: float, bound: float, *, what: str) -> Judgement:
    """The claim that a number without sampling error stays below a bound."""
    return Judgement(decide(value <= bound, resolved=True), f"{what}: {value:.3g} (at most {bound:.3g})")


def at_least(value: float, bound: float, *, what: str) -> Judgement:
    """The claim that a number without sampling error reaches a bound."""
    return Judgement(decide(value >= bound, resolved=True), f"{what}: {value:.3g} (at least {bound:.3g})")


def every(judgements: list[Judgement], *, what: str, paper: str = "") -> Judgement:
    """A claim about several comparisons at once.

    Reproduced if none contradicts the claim and at least half of all are resolved and agree with it; not reproduced if
    the larger part of those that are resolved contradicts it; mixed if some contradict it and as many or more agree;
    otherwise open, for the reason that most of the open ones have.
    """
    verdicts = [judgement.verdict for judgement in judgements]
    yes, no = verdicts.count(Verdict.REPRODUCED), verdicts.count(Verdict.NOT_REPRODUCED)
    open_ = len(judgements) - yes - no
    counts = f"{what}: {yes} of {len(judgements)} comparisons agree, {no} contradict, {open_} are not resolved"
    details = "; ".join(judgement.evidence for judgement in judgements[:4])
    verdict = max(OPEN, key=verdicts.count) if open_ else Verdict.NOT_MEASURED
    if yes and not no and 2 * yes >= len(judgements):
        verdict = Verdict.REPRODUCED
    elif no > yes:
        verdict = Verdict.NOT_REPRODUCED
    elif no:
        verdict = Verdict.MIXED
    return Judgement(verdict, f"{counts} [{details}]" if details else counts, paper)


def both(*judgements: Judgement, paper: str = "") -> Judgement:
    """A claim that holds only if each of its parts does: one that fails decides, else one that is open."""
    order = (Verdict.NOT_REPRODUCED, Verdict.MIXED, *OPEN, Verdict.REPRODUCED)
    worst = min((judgement.verdict for judgement in judgements), key=order.index)
    return Judgement(worst, "; ".join(judgement.evidence for judgement in judgements), paper)


def not_measured(reason: str, paper: str = "") -> Judgement:
    """What the claim needs is not here."""
    return Judgement(Verdict.NOT_MEASURED, reason, paper)
