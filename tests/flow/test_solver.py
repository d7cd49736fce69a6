"""Solvers: exact for constant predictions, equal forms, order of accuracy on a mixture with the exact predictor."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from convergeflow.errors import UserError
from convergeflow.flow import SOLVERS, path, solver
from convergeflow.flow.schedule import Coefficients, Gumbel, Linear

X = torch.randn(3, 2, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
MU = torch.randn(3, 2, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def at(t: float, schedule: object = None) -> Coefficients:
    return (schedule or Gumbel())(torch.full((3,), t, dtype=torch.float64))  # type: ignore[operator]


def test_data_step_is_the_papers_update() -> None:
    now, then = at(0.3), at(0.6)
    moved = solver.step_data(X, MU, now, then)
    left = moved / path.spread(then.sigma, X) - X / path.spread(now.sigma, X)
    right = MU * path.spread(then.signal_to_noise - now.signal_to_noise, X)
    torch.testing.assert_close(left, right, rtol=1e-12, atol=1e-12)


def test_data_step_is_langflows_lerp() -> None:
    now, then = at(0.3), at(0.6)
    w = torch.exp((then.gamma - now.gamma) / 2)[:, None, None]
    current = X * (then.alpha / now.alpha)[:, None, None]
    expected = (1 - w) * then.alpha[:, None, None] * MU + w * current
    torch.testing.assert_close(solver.step_data(X, MU, now, then), expected, rtol=1e-12, atol=1e-12)


def test_both_forms_are_equal_without_unconditional_guidance() -> None:
    now, then = at(0.3), at(0.6)
    epsilon = path.noise_from_data(MU, X, now)
    torch.testing.assert_close(
        solver.step_noise(X, epsilon, now, then), solver.step_data(X, MU, now, then), rtol=1e-12, atol=1e-12
    )


def test_unconditional_guidance_multiplies_the_displacement() -> None:
    now, then = at(0.3), at(0.6)

    def displacement(x: Tensor) -> Tensor:
        return x / path.spread(then.alpha, X) - X / path.spread(now.alpha, X)

    plain = displacement(solver.step_guided(X, MU, now, then))
    guided = displacement(solver.step_guided(X, MU, now, then, 0.4))
    torch.testing.assert_close(guided, 1.4 * plain)


def test_a_constant_prediction_is_integrated_exactly_by_every_solver() -> None:
    exact = solver.step_data(X, MU, at(0.1), at(0.9))
    for name in SOLVERS:
        chosen, x, history = SOLVERS[name], X, None
        for now, then in ((at(0.1), at(0.3)), (at(0.3), at(0.7)), (at(0.7), at(0.9))):
            x = chosen.advance(x, MU, now, then, history=history)
            history = (MU, now)
        torch.testing.assert_close(x, exact, rtol=1e-10, atol=1e-10)


def test_the_data_end_is_an_ordinary_point() -> None:
    moved = solver.step_data(X, MU, at(0.9, Linear()), at(1.0, Linear()))
    torch.testing.assert_close(moved, MU)
    history = (MU, at(0.5, Linear()))
    chosen = SOLVERS["multistep"]
    assert bool(torch.isfinite(chosen.advance(X, MU, at(0.9, Linear()), at(1.0, Linear()), history=history)).all())


def test_the_noise_form_refuses_infinite_noise() -> None:
    with pytest.raises(UserError, match="alpha > 0"):
        solver.step_noise(X, MU, at(0.0, Linear()), at(0.5, Linear()))


# A mixture of two points at +-2 in one dimension: the exact data prediction is a tanh, so that the ODE has a smooth,
# nonlinear field, and a very fine grid gives the reference solution.


def tanh_prediction(x: Tensor, now: Coefficients) -> Tensor:
    return 2.0 * torch.tanh(2.0 * x * path.spread(now.kernel, x))


def integrate(name: str, num_steps: int, x: Tensor) -> Tensor:
    schedule, chosen, history = Linear(), SOLVERS[name], None
    # even in log-SNR, the variable in which the multistep solver is of second order
    times = schedule.time_at(torch.linspace(-3.0, 2.0, num_steps + 1, dtype=torch.float64))
    for a, b in itertools.pairwise(times):
        now, then = schedule(a.expand(len(x))), schedule(b.expand(len(x)))
        mu = tanh_prediction(x, now)
        moved = chosen.advance(x, mu, now, then, history=history)
        if chosen.corrector:
            moved = chosen.advance(x, 0.5 * (mu + tanh_prediction(moved, then)), now, then)
        history, x = (mu, now), moved
    return x


@pytest.mark.parametrize(("name", "order"), [("euler", 1), ("euler-noise", 1), ("multistep", 2), ("heun", 2)])
def test_order_of_accuracy_on_a_mixture_with_the_exact_predictor(name: str, order: int) -> None:
    start = torch.linspace(-1.5, 1.5, 16, dtype=torch.float64)[:, None, None]
    reference = integrate("heun", 3_000, start)
    errors = [float((integrate(name, n, start) - reference).abs().max()) for n in (100, 200, 400)]
    rates = [math.log2(a / b) for a, b in itertools.pairwise(errors)]
    assert all(abs(rate - order) < 0.15 for rate in rates), (errors, rates)


def test_all_solvers_reach_the_same_law() -> None:
    start = torch.randn(4000, 1, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    shares = {name: float((integrate(name, 200, start) > 0).double().mean()) for name in SOLVERS}
    assert max(shares.values()) - min(shares.values()) < 0.002
    assert all(abs(share - 0.5) < 0.03 for share in shares.values())
