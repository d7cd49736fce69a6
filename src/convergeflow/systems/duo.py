"""Duo: uniform-state diffusion, taught first by the argmax of a Gaussian one (Sahoo et al. 2025, arXiv 2506.10892).

A token survives with probability a(tau) and is otherwise replaced by a uniform one. The ELBO's optimum is the
leave-one-out posterior P(x^i | x_tau without position i). During the first half of training (the curriculum) the
network reads softmax(w/temperature) of a Gaussian w whose argmax is the noisy token.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from convergeflow.device import matching, onto, widest
from convergeflow.errors import UserError
from convergeflow.randomness import RowDraws
from convergeflow.systems.accuracy import argmax_share, signal_at
from convergeflow.systems.categorical import tempered
from convergeflow.systems.discrete import FLOOR, DiscreteDiffusion, kept_share, training_tau
from convergeflow.systems.mdlm import REMOVALS
from convergeflow.systems.rival import TEMPERATURES, RivalConfig

CURRICULUM_SHARES = (0.945471, 0.049327)
"""Survival a at the ends of the published curriculum (gamma -3.55 to -1.85 at K = 50257), carried over to any K."""


def elbo(log_x: Tensor, noisy: Tensor, target: Tensor, a: Tensor, rate: Tensor) -> Tensor:
    """Loss per position: log_x [..., K] log-probabilities, a and rate = da/dtau < 0 of the positions' shape."""
    K = log_x.shape[-1]
    a, rate = matching(a, log_x), matching(rate, log_x)
    log_bar = torch.logaddexp(log_x + (K * a).log()[..., None], torch.log1p(-a)[..., None])  # log(K a x_th + 1 - a)
    at_noisy = log_bar.gather(-1, noisy[..., None])[..., 0]
    at_target = log_bar.gather(-1, target[..., None])[..., 0]
    all_logs = log_bar.sum(-1)
    same = noisy == target
    small = (1 - a) / (K * a + 1 - a)
    # sum_j (xbar_j/xbar_i) log(xbar_th,i xbar_j/(xbar_th,j xbar_i)): xbar has two values only.
    when_same = small * ((K - 1) * small.log() + K * at_noisy - all_logs)
    when_moved = K * at_noisy - all_logs + K * a / (1 - a) * (at_noisy - at_target) - small.log() / small
    relative = torch.where(same, when_same, when_moved)
    bar = torch.where(same, K * a + 1 - a, 1 - a)
    return rate / (K * a) * (K / bar - K * (-at_noisy).exp() - relative)


def reverse_law(log_x: Tensor, x: Tensor, now: Tensor, then: Tensor) -> Tensor:
    """log p(x_s | x_t) with the data replaced by x_th; a_t = now, a_s = then, [..., K]."""
    K = log_x.shape[-1]
    now, then = matching(now, log_x), matching(then, log_x)
    between = now / then
    weights = log_x.exp()
    kept = K * now * weights.gather(-1, x[..., None])
    # All but the token that is there share one formula: in place, since a law of a large vocabulary is large.
    weights.mul_(then - now).add_((1 - between) * (1 - then) / K)
    weights.scatter_add_(-1, x[..., None], kept + (between - now))
    return weights.div_(kept + 1 - now).log_()


@dataclass(frozen=True)
class DuoConfig(RivalConfig):
    curriculum: float = 0.5
    """Share of the first stage that trains on Gaussian inputs."""
    curriculum_temperature: float = 1e-3


class DuoModel(DiscreteDiffusion):
    """Uniform-state diffusion with a curriculum."""

    method = "duo"
    masks = False
    config_class = DuoConfig
    bound_kind = "uniform-state ELBO (the first thousandth of time is cut off)"
    controls: Mapping[str, Any] = {"temperature": 1.0, "nucleus": 1.0, "kappa": 1.0, "removal": "sample"}
    choices: Mapping[str, Any] = {"removal": REMOVALS}
    frontier = TEMPERATURES

    def log_x(self, inputs: Tensor, a: Tensor) -> Tensor:
        """log x_th [B, L, K] for tokens or vectors; the trunk is told sigma = -log a."""
        return self.network(inputs, -a.log()).float().log_softmax(-1)

    def row_losses(self, tokens: Tensor, times: Tensor, draws: RowDraws) -> Tensor:
        if self.training and self.progress <= self.config.curriculum:
            return self.curriculum_losses(tokens, times, draws)
        tau = training_tau(times)
        a = kept_share(tau)
        shape = tokens.shape
        moved = draws.uniform(shape[1]) > a[:, None]
        noisy = self.replaced(tokens, moved, draws)
        rate = torch.full(shape, -(1.0 - FLOOR), device=tokens.device)
        return elbo(self.log_x(noisy, a), noisy, tokens, a[:, None].expand(shape), rate).mean(-1)

    def curriculum_losses(self, tokens: Tensor, times: Tensor, draws: RowDraws) -> Tensor:
        """The same ELBO along the discrete process that the argmax of a Gaussian one goes through."""
        K, shape = self.config.vocabulary, tokens.shape
        low, high = (-2 * math.log(signal_at(share, K)) for share in CURRICULUM_SHARES)
        gamma = low + training_tau(times).numpy() * (high - low)
        a, later = (argmax_share(np.exp(-value / 2), K) for value in (gamma, gamma + 1e-3))
        device = tokens.device
        gammas = onto(torch.from_numpy(gamma), device)[:, None, None]
        w = draws.normal(shape[1], K).to(device) * torch.sigmoid(gammas).sqrt()
        signal = torch.sigmoid(-gammas).sqrt().to(w).expand(*shape, 1)
        highest, noisy = w.scatter_add_(-1, tokens[..., None], signal).max(-1, keepdim=True)
        inputs = w.sub_(highest).div_(self.config.curriculum_temperature).float().softmax(-1)
        survival = onto(torch.from_numpy(a), device)
        rate = onto(torch.from_numpy((later - a) * 1000 * (high - low)), device)
        log_x = self.log_x(inputs, survival)
        return elbo(log_x, noisy[..., 0], tokens, survival[:, None].expand(shape), rate[:, None].expand(shape)).mean(-1)

    def row_bounds(self, tokens: Tensor, times: Tensor, draws: RowDraws) -> Tensor:
        """The ELBO and the divergence of the noisiest law from the uniform one."""
        return self.row_losses(tokens, times, draws) + self.uniform_divergence(FLOOR)

    def law(  # type: ignore[override]
        self,
        x: Tensor,
        tau: Tensor,
        then: Tensor | None,
        *,
        temperature: float,
        nucleus: float,
        kappa: float,
        removal: str,
    ) -> Tensor:
        """The ancestral step; kappa < 1 mixes in fresh noise (Psi-samplers)."""
        if not 0.0 <= kappa <= 1.0:
            raise UserError(f"kappa must lie in [0, 1] (1 is the ancestral sampler), not {kappa}")
        now, clean = kept_share(tau), torch.ones_like(tau)
        log_x = tempered(widest(self.log_x(x, onto(now.expand(len(x)), x.device))), temperature, nucleus)
        if then is None:
            return reverse_law(log_x, x, now, clean) if removal == "sample" else tempered(log_x, 0.0)
        share = kept_share(then)
        law = reverse_law(log_x, x, now, share)
        if kappa == 1.0:
            return law
        K = self.config.vocabulary
        share = matching(share, law)
        renoised = share * reverse_law(log_x, x, now, clean).exp() + (1 - share) / K
        return (kappa * law.exp() + (1 - kappa) * renoised).log()
