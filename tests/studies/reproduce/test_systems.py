"""Systems against each other: the ratio is computed from records, and what is missing is named."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from convergeflow.studies.reproduce.registry import experiment_by_name
from convergeflow.studies.reproduce.result import ExperimentResult


def a_result(ours: float | None, **rivals: tuple[str, float]) -> ExperimentResult:
    records: list[dict[str, Any]] = [
        {
            "curve": name,
            "label": "",
            "values": {"gen_ppl": ppl, "gen_ppl_se": 0.01 * ppl, "entropy": 3.9, "n": 128, "method": method},
        }
        for name, (method, ppl) in rivals.items()
    ]
    crossing = {"gen_ppl": ours, "se": None if ours is None else 0.01 * ours, "says": "the curve stays below"}
    return ExperimentResult("systems", "embedded", records, {"at_data_entropy": crossing, "real": {}})


@pytest.mark.parametrize(("ours", "verdict"), [(40.0, "reproduced"), (190.0, "not reproduced")])
def test_the_ratio_is_to_the_best_rival_that_is_no_ar_model(ours: float, verdict: str) -> None:
    result = a_result(ours, mdlm=("mdlm", 150.0), langflow=("langflow", 100.0), ar=("ar", 20.0))
    judgement = judged_one(result, "best")
    assert str(judgement.verdict) == verdict
    assert "langflow" in judgement.evidence and f"{ours / 100:.4g}" in judgement.evidence


@pytest.mark.parametrize(
    ("result", "reason"),
    [(a_result(40.0), "no other diffusion model"), (a_result(None, mdlm=("mdlm", 9.0)), "the curve stays below")],
)
def test_without_a_rival_or_a_crossing_nothing_is_decided(result: ExperimentResult, reason: str) -> None:
    judgement = judged_one(result, "best")
    assert str(judgement.verdict) == "not measured" and reason in judgement.evidence


def a_comparison(**at: float | None) -> ExperimentResult:
    rows = [
        {
            "system": name.replace("_", "+"),
            "nfe": 64,
            "at_data_entropy": {"gen_ppl": ppl, "se": 0.02 * (ppl or 0)},
            "default": {},
        }
        for name, ppl in at.items()
    ]
    study = {"study": "comparison-stories", "about": "1200 steps", "command": "convergeflow compare"}
    return ExperimentResult("systems", "embedded", [], {"comparison": rows, "judged_by": study})


def test_a_comparison_on_one_budget_decides() -> None:
    result = a_comparison(convergeflow=4.0, mdlm=20.0, langflow=5.0, langflow_controls=3.0, duo=None, ar=2.0)
    found = {name: judged_one(result, name) for name in ("best", "ratio", "ar")}
    verdicts = {name: str(judgement.verdict) for name, judgement in found.items()}
    assert verdicts == {"best": "reproduced", "ratio": "not reproduced", "ar": "not reproduced"}
    assert "0.8 ±" in found["best"].evidence and "langflow's" in found["best"].evidence
    assert "2 ±" in found["ar"].evidence
    for judgement in found.values():  # whose numbers these are, and who is missing among them
        assert "another study, comparison-stories" in judgement.evidence and "1200 steps" in judgement.evidence
        assert "duo never there" in judgement.evidence
    nothing = judged_one(a_comparison(convergeflow=None, mdlm=2.0), "ratio")
    assert str(nothing.verdict) == "not measured" and "convergeflow compare" in nothing.evidence


def judged_one(result: ExperimentResult, name: str) -> Any:
    systems_alone = experiment_by_name("systems")
    claims = tuple(claim for claim in systems_alone.claims if claim.name == name)
    return replace(systems_alone, claims=claims).judge(result)[name]
