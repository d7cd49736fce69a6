from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from convergeflow.randomness import RowDraws
from convergeflow.systems.flm import FlmModel
from convergeflow.systems.rival import RivalConfig

PI = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)


def model(vocabulary: int = 3) -> FlmModel:
    return FlmModel(RivalConfig(vocabulary=vocabulary, width=8, depth=1, heads=1, gate_init=0.5)).eval()


class Posterior(nn.Module):
    """P(token | x) for independent tokens: x = (1 - c) noise + c one-hot."""

    def __init__(self, owner: FlmModel) -> None:
        super().__init__()
        self.warp = owner.warp
        self.log_prior = nn.Parameter(PI.log(), requires_grad=False)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        c = self.warp(t)[:, None, None].clamp_max(1 - 1e-6)
        return self.log_prior + c / (1 - c).square() * x


def test_ode_with_the_exact_posterior_samples_its_law() -> None:
    flow = model()
    flow.network = Posterior(flow)
    ids = flow.sample(4, 1500, seeds=range(4), nfe=64).ids
    shares = torch.bincount(ids.flatten(), minlength=3).double() / ids.numel()
    assert torch.allclose(shares, PI, atol=4 * math.sqrt(0.25 / ids.numel()) + 0.01)


def test_a_fresh_model_pays_log_v() -> None:
    tokens = torch.randint(0, 9, (5, 4), generator=torch.Generator().manual_seed(0))
    losses = model(9).row_losses(tokens, torch.linspace(0.1, 0.9, 5).double(), RowDraws(range(5)))
    assert torch.allclose(losses, torch.tensor(math.log(9)))


def test_the_network_is_told_t_and_sees_the_raw_vector_at_c() -> None:
    flow = model(9)
    seen: list[tuple[Tensor, Tensor]] = []

    class Spy(nn.Linear):
        def forward(self, x: Tensor, t: Tensor) -> Tensor:  # type: ignore[override]
            seen.append((x, t))
            return torch.zeros_like(x)

    flow.network = Spy(1, 1)
    tokens = torch.full((2, 4000), 3)
    flow.row_losses(tokens, torch.tensor([0.3, 0.3]).double(), RowDraws([0, 1]))
    x, t = seen[0]
    assert t.tolist() == pytest.approx([0.7, 0.7])
    c = float(flow.warp(torch.tensor(0.7)))
    assert float(x[..., 3].mean()) == pytest.approx(c, abs=0.02)
    assert float(x[..., 0].std()) == pytest.approx(1 - c, abs=0.02)
    assert float((x.argmax(-1) == 3).double().mean()) == pytest.approx(1 / 9 + 0.7 * 8 / 9, abs=0.02)
