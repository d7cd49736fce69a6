"""The ratios of a comparison, budget by budget: read from tables, judged by two standard errors, written and drawn."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from convergeflow.cli.compare import CompareOptions
from convergeflow.cli.main import main
from convergeflow.errors import UserError
from convergeflow.evaluation.estimate import Estimate
from convergeflow.studies import curve
from convergeflow.studies.fair import RATES
from convergeflow.systems import OURS


def row(system: str, gen_ppl: float | None, se: float, **more: Any) -> dict[str, Any]:
    return {"system": system, "nfe": 64, "at_data_entropy": {"gen_ppl": gen_ppl, "se": se, **more}}


def summary(ours: float, *, langflow: float = 200.0, mdlm: float | None = 300.0, ar: float = 80.0) -> dict[str, Any]:
    rows = [row("ar", ar, 4.0), row(OURS, ours, 6.0), row("langflow", langflow, 10.0), row("mdlm", mdlm, 15.0)]
    rows.append(row("langflow+controls", 1.0, 0.1))  # shares half of what is compared: never the best other system
    objective = [{"nfe": 64, "setting": None, "value": 0.9, "se": 0.02, "more_entropy": 0.0}]
    return {"rows": rows, "objective": objective, "corpus": "basic", "about": "about", "command": "compare"}


def test_ratios_are_those_of_the_tables_with_the_errors_of_both() -> None:
    (entry,) = curve.budgets({500: summary(120.0)})
    best, ar = entry["ratios"]
    assert (best["to"], ar["to"]) == ("langflow", "ar")
    assert best["value"] == pytest.approx(120 / 200) and ar["value"] == pytest.approx(120 / 80)
    assert best["se"] == pytest.approx(0.6 * math.hypot(6 / 120, 10 / 200))
    assert entry["steps"] == 500 and entry["objective"]["value"] == 0.9
    second = curve.budgets({500: summary(120.0, langflow=400.0)})[0]["ratios"][0]
    assert second["to"] == "mdlm", "the best is the lowest of those that have a value"
    alone = curve.budgets({500: summary(120.0, langflow=400.0, mdlm=None)})[0]["ratios"][0]
    assert alone["to"] == "langflow"


@pytest.mark.parametrize(
    ("value", "se", "said"),
    [(0.40, 0.05, "reproduced"), (0.70, 0.05, "not reproduced"), (0.60, 0.05, "too noisy"), (0.50, 0.05, "too noisy")],
)
def test_a_verdict_needs_two_standard_errors(value: float, se: float, said: str) -> None:
    assert curve.says(Estimate(value, se, 0), 0.55) == said


def test_a_trend_needs_two_standard_errors_between_the_ends() -> None:
    falling = curve.budgets({1000: summary(100.0), 125: summary(180.0)})
    assert [entry["steps"] for entry in falling] == [125, 1000], "the smallest budget comes first"
    assert curve.trend(falling, 0).endswith("it falls")
    assert curve.trend(falling[::-1], 0).endswith("it rises")
    assert curve.trend(curve.budgets({125: summary(100.0), 1000: summary(101.0)}), 0).endswith("no trend is resolved")
    assert "fewer than two" in curve.trend(falling[:1], 1)


def test_the_page_has_a_line_per_budget_and_says_who_never_gets_there(tmp_path: Path) -> None:
    found = {125: summary(180.0, mdlm=None), 1000: summary(100.0)}
    curve.write(tmp_path, found, {"gen_ppl": 45.0, "entropy": 3.6}, complete=False)
    lines = (tmp_path / "budgets.md").read_text().splitlines()
    first, last = (next(line for line in lines if line.startswith(f"| {steps} ")) for steps in (125, 1000))
    assert "never there" in first and "never there" not in last
    assert "(langflow): not reproduced" in first and "NFE 64, over AR" in "\n".join(lines)
    kept = json.loads((tmp_path / "budgets.json").read_text())
    assert [entry["steps"] for entry in kept["budgets"]] == [125, 1000] and kept["real"]["gen_ppl"] == 45.0
    assert (tmp_path / "budgets.png").stat().st_size > 10_000


def test_claims_are_judged_by_the_largest_budget_once_all_are_done(tmp_path: Path) -> None:
    found = {125: summary(180.0), 1000: summary(100.0)}
    assert curve.judging_table(tmp_path) is None
    curve.write(tmp_path, found, {}, complete=False)
    assert curve.judging_table(tmp_path) is None
    curve.write(tmp_path, found, {}, complete=True)
    assert curve.judging_table(tmp_path) == tmp_path / "steps-1000" / "table.json"
    (tmp_path / "table.json").write_text("{}")
    assert curve.judging_table(tmp_path) == tmp_path / "table.json", "a comparison on one budget has one table"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"steps": "5,six"}, "--steps takes whole numbers separated by commas, not '5,six'"),
        ({"steps": "0"}, "--steps must be at least 1"),
        ({"rates": "1"}, "--rates belongs to --fair"),
        ({"rates": "1,x", "fair": True}, "--rates takes numbers such as 1,1/3,3, not '1,x'"),
        ({"rates": "1/0", "fair": True}, "--rates takes numbers such as 1,1/3,3, not '1/0'"),
        ({"rates": "1,-1", "fair": True}, "--rates takes different numbers above 0"),
        ({"rates": "1,1", "fair": True}, "--rates takes different numbers above 0"),
    ],
)
def test_what_cannot_be_compared_is_refused_in_a_line(given: dict[str, Any], said: str) -> None:
    asked = CompareOptions(**given)
    with pytest.raises(UserError) as caught:
        _ = asked.lengths, asked.multiples
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_budgets_and_rates_are_read_as_they_are_meant() -> None:
    assert CompareOptions().lengths == [None]
    assert CompareOptions(steps="500, 125").lengths == [125, 500]
    assert CompareOptions(fair=True).multiples == RATES
    assert CompareOptions(fair=True, rates="1/4,2").multiples == (0.25, 2.0)


def test_several_budgets_want_the_fair_comparison(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "--corpus", "test", "--steps", "5,6", "--out", str(tmp_path / "out")]) == 2
    assert "add it" in capsys.readouterr().err and not (tmp_path / "out").exists()
