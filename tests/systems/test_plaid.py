from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from convergeflow.flow.schedule import Cosine
from convergeflow.flow.solver import step_data
from convergeflow.randomness import RowDraws
from convergeflow.systems.plaid import Level, MonotoneSchedule, PlaidConfig, PlaidModel, reverse_step

PI = torch.tensor([0.7, 0.3], dtype=torch.float64)
H = float(-(PI * PI.log()).sum())


def exact_model(seed: int = 0) -> PlaidModel:
    """Tokens at +1 and -1 with a head that holds the log prior: with the kernel, the exact posterior."""
    torch.manual_seed(seed)
    model = PlaidModel(
        PlaidConfig(vocabulary=2, width=8, depth=1, heads=1, dimension=1, schedule_hidden=16, self_condition=0.0)
    )
    with torch.no_grad():
        model.network.embedding.weight.copy_(torch.tensor([[1.0], [-1.0]]))
        model.network.head.bias.copy_(PI.log())
    return model.eval()


def tokens(rows: int, length: int = 500) -> Tensor:
    return (torch.arange(length) >= round(float(PI[0]) * length)).long().expand(rows, -1)


def test_schedule_meets_its_ends_and_rises() -> None:
    torch.manual_seed(0)
    schedule = MonotoneSchedule(64)
    tau = torch.linspace(0, 1, 101, dtype=torch.float64, requires_grad=True)
    gamma, slope = schedule(tau)
    assert gamma[[0, -1]].tolist() == pytest.approx([-3, 6])
    assert bool((slope > 0).all())
    assert torch.allclose(torch.autograd.grad(gamma.sum(), tau)[0], slope)


def divergence_of_the_end(gamma: float) -> float:
    """KL(q(z_1) || N(0, 1)) of the mixture, by quadrature."""
    z = torch.linspace(-9, 9, 20_001, dtype=torch.float64)
    alpha, variance = math.sqrt(1 / (1 + math.exp(gamma))), 1 / (1 + math.exp(-gamma))
    parts = [p * torch.exp(-0.5 * (z - alpha * e) ** 2 / variance) for p, e in zip(PI, (1, -1), strict=True)]
    q = (parts[0] + parts[1]) / math.sqrt(2 * math.pi * variance)
    log_normal = -0.5 * z**2 - 0.5 * math.log(2 * math.pi)
    return float(torch.trapezoid(q * (q.log() - log_normal), z))


@pytest.mark.parametrize("seed", [0, 1])
def test_exact_posterior_gives_the_entropy_whatever_the_schedule(seed: int) -> None:
    model = exact_model(seed)
    bound = model.bound(tokens(12), draws=RowDraws(range(12)), repeats=48)
    expected = H + divergence_of_the_end(float(model.noise_schedule.bounds[1]))
    assert bound.nats_per_token == pytest.approx(expected, abs=0.012)


def test_ancestral_samples_follow_the_law() -> None:
    ids = exact_model().sample(4, 1000, seeds=range(4), nfe=66, temperature=1.0).ids
    assert float((ids == 0).double().mean()) == pytest.approx(float(PI[0]), abs=4 * math.sqrt(0.21 / 4000) + 0.01)


def test_the_schedule_descends_the_mean_square_of_the_loss() -> None:
    model = exact_model().train()
    times = torch.linspace(0.02, 0.98, 12, dtype=torch.float64)
    share = 0.5  # before any statistics
    diffusion = times >= share

    def mean_square() -> float:
        tau = torch.where(diffusion, (times - share) / (1 - share), 0.0)
        draws = RowDraws(range(12))
        draws.uniform()  # the choice of self-conditioned rows
        with torch.no_grad():
            rows, _ = model.parts(tokens(12, 40), tau, ~diffusion, torch.zeros(12, dtype=torch.bool), draws)
        return float((rows[diffusion].square()).sum() / 12 / (1 - share))

    total = model.loss(tokens(12, 40), times=times, draws=RowDraws(range(12))).total
    total.backward()
    for name in ("shift", "rate", "height"):
        parameter = getattr(model.noise_schedule, name)
        direction = parameter.grad / parameter.grad.norm()
        slopes = []
        for sign in (1, -1):
            with torch.no_grad():
                parameter.add_(sign * 1e-2 * direction)
            slopes.append(mean_square())
            with torch.no_grad():
                parameter.sub_(sign * 1e-2 * direction)
        assert (slopes[0] - slopes[1]) / 2e-2 == pytest.approx(float(parameter.grad.norm()), rel=0.03)


def test_deterministic_step_is_the_flow_step() -> None:
    generator = torch.Generator().manual_seed(0)
    z, x_hat = (torch.randn(3, 4, 2, dtype=torch.float64, generator=generator) for _ in range(2))
    now, then = (Cosine().at_gamma(torch.full((3,), gamma, dtype=torch.float64)) for gamma in (1.0, 0.2))
    moved = reverse_step(z, x_hat, Level(now.gamma), Level(then.gamma), 1.0, None)
    assert torch.allclose(moved, step_data(z, x_hat, now, then), atol=1e-12)


def test_self_conditioned_rows_teach_the_network_alone() -> None:
    torch.manual_seed(0)
    config = PlaidConfig(vocabulary=5, width=8, depth=1, heads=1, schedule_hidden=16, gate_init=0.5)
    model = PlaidModel(config).train()
    x = torch.randint(0, 5, (4, 6))
    everywhere = torch.ones(4, dtype=torch.bool)
    rows, _ = model.parts(x, torch.linspace(0.2, 0.8, 4).double(), ~everywhere, everywhere, RowDraws(range(4)))
    rows.sum().backward()
    left_alone = [model.network.embedding.weight, *model.noise_schedule.parameters()]
    assert all(parameter.grad is None or float(parameter.grad.abs().sum()) == 0.0 for parameter in left_alone)
    assert float(model.network.head.weight.grad.abs().sum()) > 0


def test_rows_are_shared_out_by_their_spread() -> None:
    model = exact_model().train()
    assert model.reconstruction_share() == 0.5
    for step in range(30):
        times = (torch.arange(16, dtype=torch.float64) + 0.5) / 16
        model.loss(tokens(16, 40), times=times, draws=RowDraws(range(step, step + 16)))
    mean, square, _ = (model.statistics / model.statistics[:, 2:]).unbind(1)
    deviation = (square - mean.square()).sqrt()
    expected = float(deviation[0] / deviation.sum())
    assert model.reconstruction_share() == pytest.approx(min(max(expected, 1 / 16), 15 / 16))
