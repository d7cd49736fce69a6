"""Times: stratification over the global batch, grids, the theorem's condition."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from convergeflow.errors import UserError
from convergeflow.flow import GRIDS, grid
from convergeflow.flow.schedule import Gumbel, Linear
from convergeflow.studies.reproduce.theorem1 import theorem_ratio


def test_training_times_fall_one_into_each_stratum_of_the_global_batch() -> None:
    times = grid.training_times(480, seed=3)
    stratum = ((times - 1e-5) / (1 - 2e-5) * 480).floor().long()
    assert sorted(stratum.tolist()) == list(range(480))
    assert stratum.tolist() != list(range(480)), "the order must be random"
    assert bool((grid.training_times(480, seed=3) == times).all())
    assert bool((grid.training_times(480, seed=4) != times).any())


def test_midpoint_grid_is_the_papers() -> None:
    assert grid.midpoint_grid(4).tolist() == [0.125, 0.375, 0.625, 0.875]


def test_langflow_grid_is_a_reversed_linspace_of_q() -> None:
    expected = 1 - torch.linspace(1 - 1e-5, 1e-5, 7, dtype=torch.float64)
    torch.testing.assert_close(grid.langflow_grid(7), expected, rtol=0, atol=1e-12)


def test_log_snr_grid_is_even_in_log_snr() -> None:
    schedule = Gumbel()
    steps = (-schedule(grid.log_snr_grid(20, schedule)).gamma).diff()
    torch.testing.assert_close(steps, steps[:1].expand(19), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(
    ("schedule", "end"), [(Gumbel(), None), (Gumbel(4.8, 1.1, cutoff=1e-12), None), (Linear(), 12.0)]
)
def test_closing_grid_is_a_midpoint_grid_that_goes_on_to_the_end(schedule: Any, end: float | None) -> None:
    times = grid.closing_grid(16, schedule)
    assert torch.equal(times[:12], grid.midpoint_grid(12))
    log_snr = -schedule(times).gamma
    steps = log_snr[11:].diff()
    torch.testing.assert_close(steps, steps[:1].expand(4), rtol=1e-3, atol=1e-6)
    assert float(log_snr[-1]) == pytest.approx(-schedule.gamma_min if end is None else end, abs=1e-3)
    assert grid.closing_grid(1, schedule).tolist() == [0.5], "nothing to spare for the end"


@pytest.mark.parametrize("delta", [0.01, 0.3, 2.0])
@pytest.mark.parametrize("num_steps", [10, 1000])
def test_theorem_grid_satisfies_the_condition_and_wastes_little(delta: float, num_steps: int) -> None:
    times = grid.theorem_grid(num_steps, delta)
    assert len(times) == num_steps + 1 and float(times[0]) == 0.0 and float(times[-1]) < 1.0
    assert theorem_ratio(times) < delta
    assert theorem_ratio(times) > 0.3 * delta


def test_theorem_grid_reaches_the_data_as_steps_grow() -> None:
    ends = [float(grid.theorem_grid(n, 0.1)[-1]) for n in (10, 100, 10_000, 1_000_000)]
    assert ends == sorted(ends) and ends[-1] > 0.99


@pytest.mark.parametrize("num_steps", [1, 4, 8, 64])
def test_the_early_grid_comes_before_the_midpoints(num_steps: int) -> None:
    early, midpoint = grid.early_grid(num_steps), grid.midpoint_grid(num_steps)
    assert bool((early < midpoint).all()) and bool((early.diff() > 0).all()) and float(early[0]) > 0
    # Pulled back by the inverse map, the points are even again.
    torch.testing.assert_close((1 - (1 - early) ** (1 / 0.7)) ** (1 / 1.2), midpoint)


def test_midpoint_grid_breaks_the_condition() -> None:
    assert theorem_ratio(grid.midpoint_grid(64)) > 100


@pytest.mark.parametrize("name", GRIDS)
@pytest.mark.parametrize("num_steps", [1, 2, 33])
def test_named_grids_are_valid(name: str, num_steps: int) -> None:
    for schedule in (Linear(), Gumbel()):
        times = grid.grid_by_name(name, num_steps, schedule)
        assert len(times) == num_steps
        grid.check_grid(times)


def test_bad_grids_are_refused() -> None:
    with pytest.raises(UserError, match="did you mean 'midpoint'"):
        grid.grid_by_name("midpoints", 4, Linear())
    with pytest.raises(UserError, match="increase"):
        grid.check_grid(torch.tensor([0.5, 0.4]))
    with pytest.raises(UserError, match=r"\[0, 1\]"):
        grid.check_grid(torch.tensor([0.5, 1.5]))
    with pytest.raises(UserError, match="non-empty"):
        grid.check_grid(torch.tensor([]))
