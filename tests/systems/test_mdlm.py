from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from convergeflow.flow.grid import training_times
from convergeflow.randomness import RowDraws
from convergeflow.sampling.wrappers import Clamp
from convergeflow.systems.discrete import FLOOR, kept_share, training_tau
from convergeflow.systems.mdlm import MdlmModel
from convergeflow.systems.rival import RivalConfig

PI = torch.tensor([0.5, 0.3, 0.2])
H = float(-(PI * PI.log()).sum())


class Constant(nn.Module):
    """The exact predictor of independent tokens."""

    def __init__(self, logits: Tensor) -> None:
        super().__init__()
        self.logits = nn.Parameter(logits)

    def forward(self, inputs: Tensor, level: Tensor, positions: Tensor | None = None) -> Tensor:
        shape = inputs.shape[:2] if positions is None else (int(positions.sum()),)
        return self.logits.expand(*shape, -1)


def exact_model() -> Any:
    model = MdlmModel(RivalConfig(vocabulary=3, width=8, depth=1, heads=1))
    model.network = Constant(PI.log())
    return model.eval().requires_grad_(False)


def proportional_tokens(rows: int) -> Tensor:
    """Each row holds the tokens in the proportions of PI exactly."""
    return torch.tensor([0] * 50 + [1] * 30 + [2] * 20).expand(rows, -1)


def test_the_weight_is_one_over_tau() -> None:
    tau = torch.linspace(0.01, 1, 50, dtype=torch.float64)
    weight = (1 - FLOOR) / (1 - kept_share(tau))  # -a'/(1 - a)
    assert torch.allclose(weight * tau, torch.ones_like(tau))


def test_exact_predictor_gives_the_entropy() -> None:
    model, rows = exact_model(), 400
    losses = model.row_losses(proportional_tokens(rows), training_times(rows, seed=0), RowDraws(range(rows)))
    assert float(losses.mean()) == pytest.approx((1 - FLOOR) * H, abs=0.03)
    bound = model.bound(proportional_tokens(60), draws=RowDraws(range(60)), repeats=16)
    assert bound.nats_per_token == pytest.approx(H, abs=max(0.01, 4 * bound.standard_error))


def test_unmasked_positions_cost_nothing() -> None:
    model = MdlmModel(RivalConfig(vocabulary=5, width=8, depth=1, heads=1, gate_init=0.5))
    tokens = torch.randint(0, 5, (3, 6), generator=torch.Generator().manual_seed(0))
    masked = torch.zeros(3, 6, dtype=torch.bool)
    masked[:, ::2] = True
    nll = model.masked_nll(tokens, masked)
    assert bool((nll[~masked] == 0).all()) and torch.allclose(nll[masked], torch.tensor(math.log(5)))
    # Other tokens in the place of unmasked ones change the context but never add a cost of their own.
    nll[~masked].sum().backward()
    assert model.network.head.weight.grad is None or float(model.network.head.weight.grad.abs().sum()) == 0.0


def test_reverse_law_sums_to_one() -> None:
    now, then = kept_share(torch.tensor([0.7, 0.4], dtype=torch.float64))
    law = MdlmModel.reverse_law(PI.double().log().expand(2, 3, 3), now, then)
    assert law.shape == (2, 3, 4)
    assert torch.allclose(law.exp().sum(-1), torch.ones(2, 3, dtype=torch.float64))
    assert float(law[0, 0, 3].exp()) == pytest.approx(0.4 / 0.7)


def test_samples_follow_the_law_and_no_mask_remains() -> None:
    model = exact_model()
    ids = model.sample(20, 200, seeds=range(20), nfe=9).ids
    assert int(ids.max()) < 3
    shares = torch.bincount(ids.flatten(), minlength=3) / ids.numel()
    assert torch.allclose(shares, PI, atol=4 * 0.5 / math.sqrt(ids.numel()))


def test_known_tokens_are_kept() -> None:
    model = exact_model()
    known = torch.tensor([True, False, False, True])
    ids = model.sample(5, 4, seeds=range(5), nfe=4, clamp=Clamp(torch.tensor([2, 0, 0, 1]), known)).ids
    assert bool((ids[:, 0] == 2).all()) and bool((ids[:, 3] == 1).all())


def test_training_times_leave_out_the_first_thousandth() -> None:
    assert torch.allclose(training_tau(torch.tensor([0.0, 1.0])), torch.tensor([FLOOR, 1.0]))
