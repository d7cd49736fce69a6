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
        (estimate(99), estimate(100), Verdict.NOT_TESTABLE),  # 1 % is within the tolerance
        (estimate(90, 6.0), estimate(100), Verdict.NOT_TESTABLE),  # two standard errors are 12 %
        (estimate(50, 6.0), estimate(100), Verdict.REPRODUCED),
        (estimate(50, math.nan), estimate(100), Verdict.NOT_TESTABLE),  # one sample has no error to speak of
    ],
)
def test_below(left: Estimate, right: Estimate, expected: Verdict) -> None:
    assert verdict.below(left, right, what="a against b").verdict == expected


def test_the_tolerance_cannot_be_set_below_two_per_cent() -> None:
    assert verdict.below(estimate(99), estimate(100), what="", tolerance=0.0).verdict == Verdict.NOT_TESTABLE
    assert verdict.equal(estimate(101.9), exactly(100), what="", tolerance=0.0).verdict == Verdict.REPRODUCED


@pytest.mark.parametrize(
    ("left", "expected"),
    [
        (estimate(101), Verdict.REPRODUCED),
        (estimate(105), Verdict.NOT_REPRODUCED),
        (estimate(101, 5.0), Verdict.NOT_TESTABLE),  # the run cannot see 2 %
        (estimate(130, 5.0), Verdict.NOT_REPRODUCED),  # but it can see 30 %
    ],
)
def test_equal(left: Estimate, expected: Verdict) -> None:
    assert verdict.equal(left, exactly(100.0), what="a").verdict == expected


def test_lower_counts_differences_not_ratios() -> None:
    assert verdict.lower(estimate(5.40), estimate(5.44), what="H").verdict == Verdict.REPRODUCED
    assert verdict.lower(estimate(5.43), estimate(5.44), what="H").verdict == Verdict.NOT_TESTABLE
    assert verdict.lower(estimate(5.50), estimate(5.44), what="H").verdict == Verdict.NOT_REPRODUCED
    assert verdict.lower(estimate(5.40, 0.03), estimate(5.44, 0.03), what="H").verdict == Verdict.NOT_TESTABLE


def test_a_claim_about_many_comparisons() -> None:
    yes, no, unclear = (Judgement(kind, "") for kind in Verdict)
    assert verdict.every([yes, yes, unclear], what="").verdict == Verdict.REPRODUCED
    assert verdict.every([yes, unclear, unclear], what="").verdict == Verdict.NOT_TESTABLE, "one of three is no proof"
    assert verdict.every([yes, no], what="").verdict == Verdict.NOT_TESTABLE
    assert verdict.every([yes, no, no], what="").verdict == Verdict.NOT_REPRODUCED
    assert verdict.every([unclear], what="").verdict == Verdict.NOT_TESTABLE


def test_evidence_holds_the_numbers() -> None:
    judgement = verdict.below(estimate(30, 1.0), estimate(60, 2.0), what="PPL", paper="33 against 60")
    assert "30 ± 1 against 60 ± 2" in judgement.evidence
    assert judgement.describe() == {"verdict": "reproduced", "evidence": judgement.evidence, "paper": "33 against 60"}
