"""Guidance: the factors, the recursion by hand, neutral values, rescaled presets."""

from __future__ import annotations

import pytest
import torch

from convergeflow.errors import UserError
from convergeflow.flow.guidance import GUIDANCE, Controls, effective_strengths, rescaled
from convergeflow.flow.schedule import Gumbel, Linear, gumbel_for_width


def test_factors_are_the_papers() -> None:
    at = Linear()(torch.tensor([0.2, 0.5, 0.8], dtype=torch.float64))
    ratio = torch.tensor([4.0, 1.0, 0.25], dtype=torch.float64)
    torch.testing.assert_close(GUIDANCE["A"](at), torch.ones(3, dtype=torch.float64))
    torch.testing.assert_close(GUIDANCE["B"](at), 1 / (1 + ratio.sqrt()))
    torch.testing.assert_close(GUIDANCE["C"](at), 1 / (1 + ratio))


def test_each_control_has_a_schedule_of_its_own() -> None:
    controls = Controls(scg=2.0, ug=3.0, scg_schedule="A", ug_schedule="C")
    w_scg, w_ug = effective_strengths(controls, Linear()(torch.tensor([0.5], dtype=torch.float64)))
    assert float(w_scg) == 2.0 and float(w_ug) == 1.5


def test_the_factor_at_the_last_point_depends_on_the_width() -> None:
    last = torch.tensor(1 - 0.5 / 64, dtype=torch.float64)
    assert float(GUIDANCE["C"](Gumbel(4.9563, 0.9637)(last))) == pytest.approx(0.15, abs=0.005)
    assert float(GUIDANCE["C"](gumbel_for_width(128)(last))) == pytest.approx(0.31, abs=0.02)


@pytest.mark.parametrize("configuration", ["A", "B", "C"])
def test_rescaled_controls_have_equal_effective_strength_at_the_end(configuration: str) -> None:
    paper, here, end = Gumbel(4.9563, 0.9637), gumbel_for_width(128), 13 / 14
    controls = Controls.configuration(configuration, refine=100, scg=37.0, ug=0.5)
    moved = rescaled(controls, paper, here, end=end)
    t = torch.tensor(end, dtype=torch.float64)
    for left, right in zip(effective_strengths(controls, paper(t)), effective_strengths(moved, here(t)), strict=True):
        torch.testing.assert_close(left, right)
    assert rescaled(controls, paper, paper, end=end) == controls


@pytest.mark.parametrize(
    "wrong", [{"refine": -1}, {"scg": -0.5}, {"ug": float("nan")}, {"scg": float("inf")}, {"scg_schedule": "D"}]
)
def test_impossible_controls_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(UserError):
        Controls(**wrong)  # type: ignore[arg-type]
