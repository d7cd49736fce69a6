"""Budgets: equal to independent allocations, exact for every budget, refused with the smallest possible one."""

from __future__ import annotations

import itertools
import json
import math
import re
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from convergeflow.errors import UserError
from convergeflow.flow.budget import allocate
from convergeflow.flow.guidance import Controls
from convergeflow.flow.schedule import Gumbel, Linear

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "allocations.json").read_text())
SCHEDULE = Gumbel(4.9563, 0.9637)


@pytest.mark.parametrize("case", GOLDEN)
def test_adaptive_allocations_equal_the_golden_ones(case: str) -> None:
    found = re.fullmatch(r"([BC]) K=(\d+) NFE=(\d+)", case)
    assert found is not None
    controls = Controls.configuration(found[1], refine=int(found[2]), scg=2.0)
    assert list(allocate(int(found[3]), controls, SCHEDULE).refinements) == GOLDEN[case]


def test_constant_configuration_takes_the_shortfall_off_evenly() -> None:
    assert allocate(64, Controls(refine=8), SCHEDULE).refinements == (7,) * 8
    assert allocate(64, Controls(refine=50), SCHEDULE).refinements == (31, 31)
    assert allocate(7, Controls(refine=1), SCHEDULE).refinements == (0, 1, 1, 1)
    assert allocate(1, Controls(refine=5), SCHEDULE).refinements == (0,)


def published(nfe: int, refine: int) -> list[int]:
    """Configuration A as the published code has it: the first steps lose one refinement each, and never more."""
    num_steps = math.ceil(nfe / (refine + 1))
    fewer = min(num_steps * (refine + 1) - nfe, num_steps)
    return [refine - 1] * fewer + [refine] * (num_steps - fewer)


def test_configuration_a_is_the_published_rule_wherever_that_spends_the_budget() -> None:
    exact = 0
    for nfe, refine in itertools.product(range(1, 129), range(1, 60)):
        theirs = published(nfe, refine)
        if sum(theirs) + len(theirs) == nfe:
            exact += 1
            assert list(allocate(nfe, Controls(refine=refine), SCHEDULE).refinements) == theirs
    assert exact > 1500
    overrun = published(64, 50)
    assert overrun == [49, 49] and sum(overrun) + len(overrun) == 100  # as docs/deviations.md and docs/sampling.md say


def test_without_self_conditioning_every_call_is_a_step() -> None:
    assert allocate(10, Controls(refine=4, scg=0.0), SCHEDULE).refinements == (0,) * 10
    assert allocate(10, Controls(refine=0), SCHEDULE).refinements == (0,) * 10


@settings(max_examples=60, deadline=None)
@given(
    nfe=st.integers(1, 200),
    refine=st.integers(0, 120),
    configuration=st.sampled_from("ABC"),
    scg=st.sampled_from([0.0, 1.0, 7.5]),
    grid=st.sampled_from(["midpoint", "langflow", "log-snr", "closing", "theorem"]),
    corrector=st.booleans(),
    linear=st.booleans(),
)
def test_every_budget_is_spent_exactly_or_refused_with_one_that_works(
    nfe: int, refine: int, configuration: str, scg: float, grid: str, corrector: bool, linear: bool
) -> None:
    controls = Controls.configuration(configuration, refine=refine, scg=scg)
    schedule = Linear() if linear else SCHEDULE
    try:
        allocation = allocate(nfe, controls, schedule, grid=grid, corrector=corrector)
    except UserError as refusal:
        named = re.search(r"raise `nfe` to (\d+)", str(refusal))
        assert named is not None and int(named[1]) > nfe
        assert allocate(int(named[1]), controls, schedule, grid=grid, corrector=corrector).nfe == int(named[1])
        return
    assert allocation.nfe == nfe
    assert len(allocation.grid) == allocation.num_steps
    assert min(allocation.refinements) >= 0


def test_a_users_grid_fixes_the_steps() -> None:
    times = torch.tensor([0.1, 0.5, 0.9])
    assert allocate(8, Controls(), SCHEDULE, grid=times).refinements == (1, 2, 2)
    with pytest.raises(UserError, match="at least as many"):
        allocate(2, Controls(), SCHEDULE, grid=times)
    with pytest.raises(UserError, match="needs `nfe` 3"):
        allocate(5, Controls(scg=0.0), SCHEDULE, grid=times)


def test_a_budget_below_one_is_refused() -> None:
    with pytest.raises(UserError, match="at least 1"):
        allocate(0, Controls(), SCHEDULE)
