"""Schedules: round trips, ends of the path, LangFlow's constants."""

from __future__ import annotations

import math

import pytest
import torch

from convergeflow.errors import UserError
from convergeflow.flow.schedule import Cosine, Gumbel, Linear, gumbel_for_width, schedule_from

SCHEDULES = {"linear": Linear(), "cosine": Cosine(), "gumbel": Gumbel(4.9563, 0.9637)}
T = torch.linspace(0.02, 0.98, 25, dtype=torch.float64)


@pytest.mark.parametrize("name", SCHEDULES)
def test_time_and_log_snr_are_inverse(name: str) -> None:
    schedule = SCHEDULES[name]
    torch.testing.assert_close(schedule.time_at(-schedule(T).gamma), T, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", SCHEDULES)
def test_coefficients_at_gamma_are_those_at_its_time(name: str) -> None:
    schedule = SCHEDULES[name]
    there, here = schedule.at_gamma(schedule(T).gamma), schedule(T)
    for field in ("alpha", "sigma"):
        torch.testing.assert_close(getattr(there, field), getattr(here, field), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", SCHEDULES)
def test_signal_rises_from_noise_to_data(name: str) -> None:
    ratio = SCHEDULES[name](T).signal_to_noise
    assert bool((ratio.diff() > 0).all())


@pytest.mark.parametrize("name", ["linear", "cosine"])
def test_ends_are_exactly_noise_and_data(name: str) -> None:
    ends = SCHEDULES[name](torch.tensor([0.0, 1.0], dtype=torch.float64))
    torch.testing.assert_close(ends.alpha, torch.tensor([0.0, 1.0], dtype=torch.float64), rtol=0, atol=1e-15)
    torch.testing.assert_close(ends.sigma, torch.tensor([1.0, 0.0], dtype=torch.float64), rtol=0, atol=1e-15)


def test_gumbel_constants_of_the_published_sampler() -> None:
    schedule = Gumbel(4.9563, 0.9637)
    assert schedule.gamma_min == pytest.approx(2.6015, abs=1e-4)
    assert schedule.gamma_max == pytest.approx(16.0513, abs=1e-4)
    last = schedule(torch.tensor(1 - 0.5 / 64))
    assert float(last.gamma) == pytest.approx(3.434, abs=1e-3)
    assert float(last.alpha) == pytest.approx(0.177, abs=1e-3)
    assert float(last.sigma) == pytest.approx(0.984, abs=1e-3)


def test_gumbel_stays_finite_at_both_ends() -> None:
    schedule = Gumbel()
    ends = schedule(torch.tensor([0.0, 1e-300, 1e-6, 1 - 1e-6, 1.0], dtype=torch.float64))
    for field in ("alpha", "sigma", "gamma", "kernel"):
        assert bool(torch.isfinite(getattr(ends, field)).all()), field
    assert float(ends.gamma[0]) == pytest.approx(schedule.gamma_max)
    assert float(ends.gamma[-1]) == pytest.approx(schedule.gamma_min)


def test_gumbel_cdf_inverts_the_quantile() -> None:
    schedule = Gumbel(4.9563, 0.9637)
    q = torch.linspace(1e-4, 1 - 1e-4, 50, dtype=torch.float64)
    torch.testing.assert_close(schedule.cdf(schedule.gamma(1 - q)), q, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_kernel_factor_is_stable_over_forty_nats(dtype: torch.dtype) -> None:
    gamma = torch.linspace(-20, 20, 81, dtype=torch.float64)
    kernel = Gumbel().at_gamma(gamma.to(dtype).double()).kernel
    stable = torch.exp((torch.nn.functional.softplus(-gamma) - gamma) / 2)
    torch.testing.assert_close(kernel, stable, rtol=1e-5 if dtype == torch.float32 else 1e-12, atol=0)


def test_descriptions_make_the_schedule_again() -> None:
    for name in ("linear", "cosine", "gumbel"):
        schedule = SCHEDULES[name]
        assert schedule_from(schedule.describe()) == schedule


def test_wrong_schedules_are_refused_by_name() -> None:
    with pytest.raises(UserError, match="did you mean 'gumbel'"):
        schedule_from({"kind": "gumble"})
    with pytest.raises(UserError, match="scale > 0"):
        Gumbel(scale=-1.0)


def test_default_schedule_shifts_by_the_logarithm_of_the_width() -> None:
    assert gumbel_for_width(768) == Gumbel()
    assert gumbel_for_width(128).loc == pytest.approx(4.723 - math.log(6))
