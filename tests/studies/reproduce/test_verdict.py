"""Verdicts: both directions, the resolution of a run, and the floor of the tolerance."""

from __future__ import annotations

import math

import pytest

from convergeflow.evaluation.estimate import Estimate
from convergeflow.studies.reproduce import verdict
from convergeflow.studies.reproduce.verdict import Judgement, Verdict, exactly


def estimate(value: float, se: float = 0.0) -> Estimate:
    return Estimate(value, se, 10)


@pytest.mark.parametrize(
    ("left", "right", "expected"),
    [
        (estimate(90), estimate(100), Verdict.REPRODUCED),
        (estimate(110), estimate(100), Verdict.NOT_REPRODUCED),
        (estimate(99), estimate(100), Verdict.TOO_NOISY),  # 1 % is within the tolerance
        (estimate(90, 6.0), estimate(100), Verdict.TOO_NOISY),  # two standard errors are 12 %
        (estimate(50, 6.0), estimate(100), Verdict.REPRODUCED),
        (estimate(50, math.nan), estimate(100), Verdict.TOO_NOISY),  # one sample has no error to speak of
    ],
)
def test_below(left: Estimate, right: Estimate, expected: Verdict) -> None:
    assert verdict.below(left, right, what="a against b").verdict == expected


def test_the_tolerance_cannot_be_set_below_two_per_cent() -> None:
    assert verdict.below(estimate(99), estimate(100), what="", tolerance=0.0).verdict == Verdict.TOO_NOISY
    assert verdict.equal(estimate(101.9), exactly(100), what="", tolerance=0.0).verdict == Verdict.REPRODUCED


@pytest.mark.parametrize(
    ("left", "expected"),
    [
        (estimate(101), Verdict.REPRODUCED),
        (estimate(105), Verdict.NOT_REPRODUCED),
        (estimate(101, 5.0), Verdict.TOO_NOISY),  # the run cannot see 2 %
        (estimate(130, 5.0), Verdict.NOT_REPRODUCED),  # but it can see 30 %
        (estimate(101.5, 0.9), Verdict.TOO_NOISY),  # it could see 2 %, but not that 1.5 % is less
        (estimate(100.5, 0.7), Verdict.REPRODUCED),
    ],
)
def test_equal(left: Estimate, expected: Verdict) -> None:
    assert verdict.equal(left, exactly(100.0), what="a").verdict == expected


def test_below_counts_plain_differences_where_ratios_mean_nothing() -> None:
    assert verdict.below(estimate(5.40), estimate(5.44), relative=False, what="H").verdict == Verdict.REPRODUCED
    assert verdict.below(estimate(5.43), estimate(5.44), relative=False, what="H").verdict == Verdict.TOO_NOISY
    assert verdict.below(estimate(5.50), estimate(5.44), relative=False, what="H").verdict == Verdict.NOT_REPRODUCED
    assert (
        verdict.below(estimate(5.40, 0.03), estimate(5.44, 0.03), relative=False, what="H").verdict == Verdict.TOO_NOISY
    )


def test_a_claim_about_many_comparisons() -> None:
    yes, no, unclear, elsewhere = (
        Judgement(kind, "")
        for kind in (Verdict.REPRODUCED, Verdict.NOT_REPRODUCED, Verdict.TOO_NOISY, Verdict.OTHER_CORPUS)
    )
    assert verdict.every([yes, yes, unclear], what="").verdict == Verdict.REPRODUCED
    assert verdict.every([yes, unclear, unclear], what="").verdict == Verdict.TOO_NOISY, "one of three is no proof"
    assert verdict.every([yes, no], what="").verdict == Verdict.MIXED, "what is resolved both ways is no noise"
    assert verdict.every([elsewhere, elsewhere, unclear], what="").verdict == Verdict.OTHER_CORPUS
    assert verdict.every([elsewhere, unclear], what="").verdict == Verdict.TOO_NOISY
    assert verdict.every([], what="").verdict == Verdict.NOT_MEASURED
    assert verdict.every([yes, no, no], what="").verdict == Verdict.NOT_REPRODUCED
    assert verdict.every([unclear], what="").verdict == Verdict.TOO_NOISY


def test_what_is_not_there_is_told_from_what_cannot_be_seen() -> None:
    """Open for noise: the paper's own difference would not be seen. Open for the corpus: it would be, and is not."""
    left, right = estimate(3.38, 0.007), estimate(3.385, 0.007)
    assert verdict.below(left, right, relative=False, what="H", effect=-0.2).verdict == Verdict.OTHER_CORPUS
    assert verdict.below(left, right, relative=False, what="H", effect=-0.01).verdict == Verdict.TOO_NOISY
    assert verdict.below(left, right, relative=False, what="H").verdict == Verdict.TOO_NOISY
    assert "tie" in verdict.below(left, right, relative=False, what="H").evidence
    assert verdict.below(estimate(99, 3.0), estimate(100), what="", effect=-0.6).verdict == Verdict.OTHER_CORPUS
    assert verdict.below(estimate(94, 4.0), estimate(100), what="", effect=-0.11).verdict == Verdict.TOO_NOISY, "may be"
    assert verdict.below(estimate(80, 3.0), estimate(100), what="", effect=-0.6).verdict == Verdict.REPRODUCED


def test_a_claim_of_two_parts_needs_both() -> None:
    yes, no, open_ = (Judgement(kind, "e") for kind in (Verdict.REPRODUCED, Verdict.NOT_REPRODUCED, Verdict.TOO_NOISY))
    assert verdict.both(yes, yes).verdict == Verdict.REPRODUCED
    assert verdict.both(yes, open_).verdict == Verdict.TOO_NOISY
    assert verdict.both(yes, no).verdict == verdict.both(open_, no).verdict == Verdict.NOT_REPRODUCED


def test_evidence_holds_the_numbers() -> None:
    judgement = verdict.below(estimate(30, 1.0), estimate(60, 2.0), what="PPL", paper="33 against 60")
    assert "30 ± 1 against 60 ± 2" in judgement.evidence
    assert judgement.describe() == {"verdict": "reproduced", "evidence": judgement.evidence, "paper": "33 against 60"}
