from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from convergeflow.errors import UserError
from convergeflow.systems.discrete import kept_share
from convergeflow.systems.rival import RivalConfig
from convergeflow.systems.sedd import SeddAbsorbModel, SeddUniformConfig, SeddUniformModel, absorb_loss, uniform_loss

PI = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
H = float(-(PI * PI.log()).sum())


def absorb(vocabulary: int = 3) -> Any:
    return SeddAbsorbModel(RivalConfig(vocabulary=vocabulary, width=8, depth=1, heads=1, gate_init=0.5)).eval()


def uniform(vocabulary: int = 3) -> Any:
    return SeddUniformModel(SeddUniformConfig(vocabulary=vocabulary, width=8, depth=1, heads=1, gate_init=0.5)).eval()


def noisy_law(sigma: Tensor, pi: Tensor = PI) -> Tensor:
    """p_t of the uniform graph, [..., K]."""
    kept = torch.exp(-sigma)[..., None]
    return kept * pi + (1 - kept) / len(pi)


def test_absorb_is_mdlm_under_the_substitution() -> None:
    model = absorb(5)
    log_x = torch.randn(40, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).log_softmax(-1)
    target = torch.arange(40) % 5
    tau = torch.linspace(0.01, 1, 40, dtype=torch.float64)
    sigma = model.sigma(tau)
    score_entropy = model.sigma_rate(tau) * absorb_loss(log_x - torch.expm1(sigma).log()[:, None], target, sigma)
    masked_diffusion = -log_x.gather(-1, target[:, None])[:, 0] / tau
    assert torch.allclose(score_entropy, masked_diffusion, rtol=1e-9)


def test_losses_are_smallest_at_the_true_ratios() -> None:
    generator = torch.Generator().manual_seed(1)
    sigma = torch.tensor([0.3, 1.0, 4.0], dtype=torch.float64)
    rho = 1 / torch.expm1(sigma)
    target = torch.tensor([0, 1, 2])
    best = torch.full((3, 4), -torch.inf, dtype=torch.float64).scatter(1, target[:, None], rho.log()[:, None])
    # log s = -inf elsewhere makes 0 * inf in no term: only the target's logarithm is used.
    assert torch.allclose(absorb_loss(best, target, sigma), torch.zeros(3, dtype=torch.float64), atol=1e-12)
    K = 5
    for noisy in (target, torch.tensor([3, 4, 1])):
        ratios = conditional_ratios(noisy, target, sigma, K)
        assert torch.allclose(uniform_loss(ratios.log(), noisy, target, sigma), torch.zeros(3).double(), atol=1e-12)
        for _ in range(5):
            other = (ratios.log() + 0.3 * torch.randn(3, K, generator=generator)).scatter(1, noisy[:, None], 0.0)
            assert bool((uniform_loss(other, noisy, target, sigma) > 0).all())


def conditional_ratios(noisy: Tensor, target: Tensor, sigma: Tensor, K: int) -> Tensor:
    law = (1 - torch.exp(-sigma))[:, None].expand(-1, K) / K
    law = law.scatter_add(1, target[:, None], torch.exp(-sigma)[:, None])
    return law / law.gather(1, noisy[:, None])


def test_uniform_loss_is_the_sum_over_all_changes() -> None:
    K, n = 5, 30
    generator = torch.Generator().manual_seed(2)
    log_score = torch.randn(n, K, dtype=torch.float64, generator=generator)
    noisy, target = (torch.randint(0, K, (n,), generator=generator) for _ in range(2))
    log_score = log_score.scatter(1, noisy[:, None], 0.0)
    sigma = torch.rand(n, dtype=torch.float64, generator=generator) * 3 + 0.01
    r = conditional_ratios(noisy, target, sigma, K)
    terms = log_score.exp() - r * log_score + r * (r.log() - 1)
    brute = (terms.sum(1) - terms.gather(1, noisy[:, None])[:, 0]) / K
    assert torch.allclose(uniform_loss(log_score, noisy, target, sigma), brute, atol=1e-12)


def test_exact_scores_give_the_entropy() -> None:
    """One token with law PI: the integral over time plus the prior is H, summed over every (x0, x_t)."""
    model, K = uniform(), 3
    tau = (torch.arange(20_000, dtype=torch.float64) + 0.5) / 20_000
    sigma = model.sigma(tau)
    marginal = noisy_law(sigma)
    total = torch.zeros_like(tau)
    for x0 in range(K):
        for x in range(K):
            chance = PI[x0] * ((1 - torch.exp(-sigma)) / K + (x0 == x) * torch.exp(-sigma))
            log_score = (marginal / marginal[:, x : x + 1]).log()
            here, true = torch.full_like(tau, x).long(), torch.full_like(tau, x0).long()
            total += chance * uniform_loss(log_score, here, true, sigma)
    found = float((model.sigma_rate(tau) * total).mean())
    assert found == pytest.approx(H, abs=2e-3)  # sigma starts at 1e-4: the first 1e-3 nats are not integrated


def test_analytic_steps_with_exact_scores_are_exact() -> None:
    t, s = torch.tensor(0.8, dtype=torch.float64), torch.tensor(0.55, dtype=torch.float64)
    model = uniform()
    law_t, law_s = noisy_law(model.sigma(t)), noisy_law(model.sigma(s))
    x = torch.arange(3)
    log_score = (law_t / law_t[:, None]).log()
    step = model.leap(log_score, x, model.sigma(t) - model.sigma(s))
    assert torch.allclose(step.sum(-1), torch.ones(3).double(), atol=1e-14)
    assert torch.allclose(law_t @ step, law_s, atol=1e-14)
    one = model.euler(log_score, x, 1e-3 * model.sigma_rate(t))
    near = noisy_law(model.sigma(t - 1e-3))
    assert torch.allclose(law_t @ one, near, atol=1e-4) and not torch.allclose(law_t @ one, near, rtol=0, atol=1e-9)

    model = absorb()
    kept_t, kept_s = kept_share(t), kept_share(s)
    full_t = torch.cat([kept_t * PI, (1 - kept_t)[None]])
    full_s = torch.cat([kept_s * PI, (1 - kept_s)[None]])
    scores, mask = (kept_t * PI / (1 - kept_t)).log()[None], torch.tensor([model.mask])  # p(y)/p(mask)
    carried_over = torch.eye(4, dtype=torch.float64)[:3]
    step = torch.cat([carried_over, model.leap(scores, mask, model.sigma(t) - model.sigma(s))])
    assert torch.allclose(full_t @ step, full_s, atol=1e-14)
    step = torch.cat([carried_over, model.leap(scores, mask, model.sigma(t))])
    assert torch.allclose(full_t @ step, torch.cat([PI, torch.zeros(1).double()]), atol=1e-14)


def test_scores_of_staying_are_one_and_unmasked_positions_teach_nothing() -> None:
    model = uniform(7)
    x = torch.randint(0, 7, (2, 5), generator=torch.Generator().manual_seed(3))
    assert bool((model.log_scores(x, torch.tensor([0.1, 3.0])).gather(-1, x[..., None]) == 0).all())
    absorbing = absorb(7)
    masked = torch.zeros(2, 5, dtype=torch.bool)
    out = absorbing.log_scores(x, torch.tensor([0.1, 3.0]), masked)
    assert out.shape == (0, 7)  # the head does not even run there
    masked[0, 0] = True
    fresh = absorbing.log_scores(x, torch.tensor([0.1, 3.0]), masked)
    assert torch.allclose(fresh.exp().sum(-1), 1 / torch.expm1(torch.tensor([0.1])))


def test_cooling_keeps_how_often_a_mask_is_left() -> None:
    model = absorb(4)
    log_score = torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    cooled = model.cooled(log_score, 0.5)
    assert torch.allclose(cooled.exp().sum(-1), log_score.exp().sum(-1))
    assert bool((cooled.softmax(-1).max(-1).values > log_score.softmax(-1).max(-1).values).all())
    with pytest.raises(UserError, match="temperature"):
        model.sample(1, 2, seeds=[0], nfe=2, temperature=0.0)


@pytest.mark.parametrize("step", ["analytic", "euler"])
def test_no_mask_remains(step: str) -> None:
    ids = absorb(4).sample(8, 12, seeds=range(8), nfe=5, step=step).ids
    assert int(ids.max()) < 4
    assert math.isclose(float(torch.bincount(ids.flatten(), minlength=4).double().std() / ids.numel()), 0, abs_tol=0.15)
