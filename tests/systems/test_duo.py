from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from ten_sentences import TOKENS, fresh, stage
from torch import Tensor

from convergeflow.randomness import RowDraws
from convergeflow.systems.discrete import FLOOR, kept_share
from convergeflow.systems.duo import CURRICULUM_SHARES, DuoConfig, DuoModel, elbo, reverse_law

PI = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
H = float(-(PI * PI.log()).sum())


def law_of_noise(a: Tensor, K: int) -> Tensor:
    """q(x_t | x_0), [..., K (x0), K (xt)]."""
    a = a[..., None, None]
    return a * torch.eye(K, dtype=torch.float64) + (1 - a) / K


def expected_loss(predictor: Any, tau: Tensor) -> Tensor:
    """E over x0 ~ PI and x_t of the loss at each tau; predictor(x_t, a) -> log x_th [T, K]."""
    K, a = 3, kept_share(tau)
    rate = torch.full_like(tau, -(1 - FLOOR))
    chance = PI[:, None] * law_of_noise(a, K)
    total = torch.zeros_like(tau)
    for x0, xt in itertools.product(range(K), repeat=2):
        here, true = torch.full_like(tau, xt).long(), torch.full_like(tau, x0).long()
        total += chance[:, x0, xt] * elbo(predictor(xt, a), here, true, a, rate)
    return total


def test_exact_leave_one_out_predictor_gives_the_entropy_and_the_posterior_does_not() -> None:
    tau = 1e-3 + (1 - 1e-3) * (torch.arange(20_000, dtype=torch.float64) + 0.5) / 20_000
    prior = expected_loss(lambda xt, a: PI.log().expand(len(a), 3), tau).mean()
    assert float(prior) == pytest.approx(H, abs=7e-3)

    def posterior(xt: int, a: Tensor) -> Tensor:
        joint = PI * law_of_noise(a, 3)[:, :, xt]
        return (joint / joint.sum(-1, keepdim=True)).log()

    assert float(expected_loss(posterior, tau).mean()) == pytest.approx(1.495, abs=2e-2)


def test_the_optimum_is_the_leave_one_out_posterior() -> None:
    """Two dependent tokens: the gradient at position 1 vanishes at P(x1 | x2_t), and not at P(x1 | x1_t, x2_t)."""
    K, a = 3, torch.tensor(0.6, dtype=torch.float64)
    joint = torch.rand(K, K, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    joint = joint / joint.sum()
    noise = law_of_noise(a, K)
    for y1, y2 in itertools.product(range(K), repeat=2):
        from_other = joint @ noise[:, y2]
        leave_one_out = from_other / from_other.sum()
        both = from_other * noise[:, y1]
        posterior = both / both.sum()
        for guess, is_optimum in ((leave_one_out, True), (posterior, False)):
            logits = guess.log().requires_grad_()
            terms = [
                posterior[x1] * elbo(logits.log_softmax(-1), torch.tensor(y1), torch.tensor(x1), a, torch.tensor(-1.0))
                for x1 in range(K)
            ]
            gradient = torch.autograd.grad(torch.stack(terms).sum(), logits)[0]
            assert (float(gradient.abs().max()) < 1e-9) == is_optimum


def explicit(log_x: Tensor, noisy: Tensor, target: Tensor, a: Tensor, rate: Tensor) -> Tensor:
    """The formula as it is written, with the sum over the vocabulary."""
    K = log_x.shape[-1]
    onehot = torch.nn.functional.one_hot(target, K).double()
    bar, bar_th = (K * a[..., None] * part + 1 - a[..., None] for part in (onehot, log_x.exp()))
    i = noisy[..., None]
    bar_i, th_i = bar.gather(-1, i), bar_th.gather(-1, i)
    relative = (bar / bar_i * (th_i * bar / (bar_th * bar_i)).log()).sum(-1)
    return rate / (K * a) * (K / bar_i[..., 0] - K / th_i[..., 0] - relative)


def test_low_memory_form_is_the_explicit_sum() -> None:
    generator = torch.Generator().manual_seed(1)
    log_x = torch.randn(200, 6, dtype=torch.float64, generator=generator).log_softmax(-1)
    noisy, target = (torch.randint(0, 6, (200,), generator=generator) for _ in range(2))
    a = torch.rand(200, dtype=torch.float64, generator=generator) * 0.98 + 0.01
    rate = torch.full_like(a, -0.999)
    found = elbo(log_x, noisy, target, a, rate)
    assert torch.allclose(found, explicit(log_x, noisy, target, a, rate), rtol=1e-9, atol=1e-9)
    assert bool((found > 0).all())
    perfect = torch.nn.functional.one_hot(target, 6).double().log()
    assert torch.allclose(elbo(perfect, noisy, target, a, rate), torch.zeros(200).double(), atol=1e-9)


def test_loss_is_the_limit_of_many_small_divergences() -> None:
    K, T = 4, 10_000
    tau = torch.linspace(1e-3, 1, T + 1, dtype=torch.float64)
    log_x = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64).log()
    x0 = 2
    truth = torch.nn.functional.one_hot(torch.tensor(x0), K).double().log()
    now, then = kept_share(tau[1:])[:, None], kept_share(tau[:-1])[:, None]
    chance = law_of_noise(kept_share(tau[1:]), K)[:, x0]
    total = torch.zeros((), dtype=torch.float64)
    for xt in range(K):
        here = torch.full((T,), xt)
        q = reverse_law(truth.expand(T, K), here, now, then)
        p = reverse_law(log_x.expand(T, K), here, now, then)
        total += (chance[:, xt] * (q.exp() * (q - p)).nan_to_num().sum(-1)).sum()
    middle = (tau[1:] + tau[:-1]) / 2
    a = kept_share(middle)
    rate = torch.full_like(a, -(1 - FLOOR))
    chance = law_of_noise(a, K)[:, x0]
    integral = sum(
        (chance[:, xt] * elbo(log_x.expand(T, K), torch.full((T,), xt), torch.full((T,), x0), a, rate)).sum()
        for xt in range(K)
    )
    assert float(total) == pytest.approx(float(integral * (1 - 1e-3) / T), abs=1e-3)


def test_reverse_law_sums_to_one_and_is_exact_for_the_leave_one_out_predictor() -> None:
    now, then = kept_share(torch.tensor(0.8, dtype=torch.float64)), kept_share(torch.tensor(0.3, dtype=torch.float64))
    law = reverse_law(PI.log().expand(3, 3), torch.arange(3), now, then).exp()
    assert torch.allclose(law.sum(-1), torch.ones(3).double())
    marginal_t, marginal_s = PI @ law_of_noise(now, 3), PI @ law_of_noise(then, 3)
    assert torch.allclose(marginal_t @ law, marginal_s, atol=1e-14)
    clean = reverse_law(PI.log().expand(3, 3), torch.arange(3), now, torch.ones(()).double()).exp()
    onehot = torch.eye(3).double()
    formula = (3 * now * onehot * PI + (1 - now) * PI) / (3 * now * PI[:, None] + 1 - now)
    assert torch.allclose(clean, formula, atol=1e-14)


def test_curriculum_comes_first_and_ends() -> None:
    model = fresh("duo")
    model.enter_stage(stage("ce", 10))
    model.train()
    seen: list[str] = []
    curriculum, plain = model.curriculum_losses, model.log_x
    model.curriculum_losses = lambda *args: seen.append("gaussian") or curriculum(*args)  # type: ignore[func-returns-value]
    model.log_x = lambda inputs, a: seen.append("tokens" if inputs.dim() == 2 else "vectors") or plain(inputs, a)
    for step in range(8):
        times = torch.linspace(0.05, 0.95, 6, dtype=torch.float64)
        loss = model.loss(TOKENS[:6], times=times, draws=RowDraws(range(step, step + 6))).total
        assert bool(torch.isfinite(loss))
    assert seen == ["gaussian", "vectors"] * 5 + ["tokens"] * 3
    model.eval()
    seen.clear()
    model.row_losses(TOKENS[:2], torch.tensor([0.2, 0.8]), RowDraws([0, 1]))
    assert seen == ["tokens"]
    assert CURRICULUM_SHARES[0] > CURRICULUM_SHARES[1]


def test_gaussian_argmax_has_the_survival_that_the_loss_is_told() -> None:
    model = DuoModel(DuoConfig(vocabulary=30, width=8, depth=1, heads=1))
    told: list[Tensor] = []
    kept: list[Tensor] = []
    tokens = torch.randint(0, 30, (40, 300), generator=torch.Generator().manual_seed(0))

    def spy(inputs: Tensor, a: Tensor) -> Tensor:
        told.append(a)
        kept.append((inputs.argmax(-1) == tokens).double().mean(-1))
        return torch.zeros(*tokens.shape, 30).log_softmax(-1)

    model.log_x = spy  # type: ignore[method-assign]
    model.curriculum_losses(tokens, torch.linspace(0.01, 0.99, 40, dtype=torch.float64), RowDraws(range(40)))
    expected = told[0] + (1 - told[0]) / 30
    assert torch.allclose(kept[0], expected, atol=5 * 0.5 / 300**0.5)
    assert float((kept[0] - expected).mean()) == pytest.approx(0, abs=0.012)


def test_kappa_one_is_ancestral_and_kappa_zero_renoises() -> None:
    model = fresh("duo")
    plain = model.sample(3, 4, seeds=range(3), nfe=5).ids
    assert torch.equal(plain, model.sample(3, 4, seeds=range(3), nfe=5, kappa=1.0).ids)
    assert not torch.equal(plain, model.sample(3, 4, seeds=range(3), nfe=5, kappa=0.0).ids)
