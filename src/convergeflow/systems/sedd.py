"""SEDD: score entropy discrete diffusion, absorbing and uniform (Lou et al. 2024, arXiv 2310.16834).

The network gives log scores log s_y ~ log p_tau(y)/p_tau(x) of changing the token x into y. The loss is the score
entropy sigma' sum_y Q(y -> x) [s_y - r_y log s_y + r_y (log r_y - 1)], r_y = p(y|x0)/p(x|x0), averaged over positions.
Both graphs share the steps `analytic` (Tweedie tau-leaping) and `euler`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from convergeflow.device import matching, onto, widest
from convergeflow.errors import UserError
from convergeflow.randomness import RowDraws
from convergeflow.systems.discrete import FLOOR, DiscreteDiffusion, kept_share, training_tau
from convergeflow.systems.rival import TEMPERATURES, RivalConfig


def absorb_loss(log_score: Tensor, target: Tensor, sigma: Tensor) -> Tensor:
    """Score entropy at masked positions without the factor sigma': log_score [n, V], target [n], sigma [n].

    Only the true token has a non-zero ratio, rho = 1/(e^sigma - 1).
    """
    rho = 1.0 / torch.expm1(sigma)
    at_target = log_score.gather(-1, target[:, None])[:, 0]
    return log_score.exp().sum(-1) - rho * at_target + rho * (rho.log() - 1.0)


def uniform_loss(log_score: Tensor, noisy: Tensor, target: Tensor, sigma: Tensor) -> Tensor:
    """Score entropy of the uniform graph without sigma': log_score [..., K] (0 at the token itself), sigma [...]."""
    K = log_score.shape[-1]
    grown = torch.expm1(sigma)
    ratio = grown / (K + grown)  # p(y|x0)/p(x0|x0) for y other than x0
    same = noisy == target
    at_target = log_score.gather(-1, target[..., None])[..., 0]
    positive = (log_score.exp().sum(-1) - 1.0) / K  # the token's own score is 1
    all_logs = log_score.sum(-1) / K
    negative = torch.where(same, ratio * all_logs, all_logs + at_target / grown)
    constant = torch.where(
        same, (K - 1) / K * ratio * (ratio.log() - 1.0), ((-ratio.log() - 1.0) / ratio - (K - 2)) / K
    )
    return positive - negative + constant


class SeddModel(DiscreteDiffusion):
    """What both graphs share: steps from scores."""

    controls: Mapping[str, Any] = {"temperature": 1.0, "step": "analytic"}
    choices: Mapping[str, Any] = {"step": ("analytic", "euler")}
    frontier = TEMPERATURES

    def sigma(self, tau: Tensor) -> Tensor:
        """Total noise up to tau."""
        raise NotImplementedError

    def sigma_rate(self, tau: Tensor) -> Tensor:
        """d sigma / d tau."""
        raise NotImplementedError

    def log_scores(self, x: Tensor, sigma: Tensor) -> Tensor:
        """Log scores [B, L, outputs] at the noise level sigma [B]."""
        raise NotImplementedError

    def leap(self, log_score: Tensor, x: Tensor, change: Tensor) -> Tensor:
        """Weights of x_s after taking away `change` of noise at once, over tokens (and, last, the mask)."""
        raise NotImplementedError

    def euler(self, log_score: Tensor, x: Tensor, amount: Tensor) -> Tensor:
        """Weights of x_s to first order in `amount` = dt sigma'."""
        raise NotImplementedError

    def cooled(self, log_score: Tensor, temperature: float) -> Tensor:
        """Scores at another temperature."""
        raise NotImplementedError

    def law(self, x: Tensor, tau: Tensor, then: Tensor | None, *, temperature: float, step: str) -> Tensor:  # type: ignore[override]
        if not temperature > 0.0:
            raise UserError(f"the temperature of scores must be positive, not {temperature}; give a small one instead")
        sigma = self.sigma(tau)
        log_score = self.cooled(widest(self.log_scores(x, onto(sigma, x.device).expand(len(x)))), temperature)
        if then is None:
            weights = self.leap(log_score, x, sigma)[..., : self.config.vocabulary]  # no mask may remain
        elif step == "analytic":
            weights = self.leap(log_score, x, sigma - self.sigma(then))
        else:
            weights = self.euler(log_score, x, (tau - then) * self.sigma_rate(tau))
        return weights.clamp_min(0.0).log()


class SeddAbsorbModel(SeddModel):
    """Tokens jump to a mask and stay there; log-linear noise."""

    method = "sedd-absorb"
    masks = True
    bound_kind = "score-entropy ELBO (the 1e-3 of unmasked tokens at the start is ignored)"

    def sigma(self, tau: Tensor) -> Tensor:
        return -kept_share(tau).log()

    def sigma_rate(self, tau: Tensor) -> Tensor:
        return (1.0 - FLOOR) / kept_share(tau)

    def log_scores(self, x: Tensor, sigma: Tensor, positions: Tensor | None = None) -> Tensor:
        """Scores of leaving the mask; a fresh model gives each token the same share of rho."""
        out = self.network(x, sigma, positions).float()
        scale = torch.expm1(sigma).log() + math.log(self.config.vocabulary)
        scale = matching(scale, out)[:, None, None].expand(*x.shape, 1)
        return out - (scale if positions is None else scale[positions])

    def row_losses(self, tokens: Tensor, times: Tensor, draws: RowDraws) -> Tensor:
        tau = training_tau(times)
        sigma = self.sigma(tau)
        masked = draws.uniform(tokens.shape[1]) > kept_share(tau)[:, None]
        log_score = self.log_scores(self.hidden(tokens, masked), sigma, masked)
        levels = matching(sigma[:, None].expand(tokens.shape)[masked], log_score)
        entropy = absorb_loss(log_score, tokens[masked], levels)
        return onto(self.sigma_rate(tau), tokens.device) * self.masked_values(masked, entropy).mean(-1)

    def leap(self, log_score: Tensor, x: Tensor, change: Tensor) -> Tensor:
        grown = matching(change.exp(), log_score)
        score = log_score.exp()
        tokens = grown * score * (1 - 1 / grown)
        stay = grown + (1 - grown) * (score.sum(-1, keepdim=True) + 1)  # the mask's own score is 1
        return torch.cat([tokens, stay], dim=-1)

    def euler(self, log_score: Tensor, x: Tensor, amount: Tensor) -> Tensor:
        moved = matching(amount, log_score) * log_score.exp()
        return torch.cat([moved, 1 - moved.sum(-1, keepdim=True)], dim=-1)

    def cooled(self, log_score: Tensor, temperature: float) -> Tensor:
        """Which token is chosen is cooled; how often a mask is left, the sum of the scores, is not."""
        total = log_score.logsumexp(-1, keepdim=True)
        return (log_score / temperature).log_softmax(-1) + total


@dataclass(frozen=True)
class SeddUniformConfig(RivalConfig):
    smallest_noise: float = 1e-4
    largest_noise: float = 20.0
    log_level: bool = False
    """Tell the trunk log sigma. The published networks are told sigma, whose small values all look alike."""


class SeddUniformModel(SeddModel):
    """Tokens are replaced by uniform ones; geometric noise."""

    method = "sedd-uniform"
    masks = False
    config_class = SeddUniformConfig
    bound_kind = "score-entropy ELBO"

    def sigma(self, tau: Tensor) -> Tensor:
        return self.config.smallest_noise ** (1 - tau) * self.config.largest_noise**tau

    def sigma_rate(self, tau: Tensor) -> Tensor:
        return self.sigma(tau) * math.log(self.config.largest_noise / self.config.smallest_noise)

    def log_scores(self, x: Tensor, sigma: Tensor) -> Tensor:
        level = sigma.log() if self.config.log_level else sigma
        return self.network(x, level).float().scatter(-1, x[..., None], 0.0)

    def corrupted(self, tokens: Tensor, sigma: Tensor, draws: RowDraws) -> Tensor:
        """With probability 1 - e^-sigma a token becomes a uniform one, possibly itself."""
        moved = draws.uniform(tokens.shape[1]) < -torch.expm1(-sigma)[:, None]
        return self.replaced(tokens, moved, draws)

    def row_losses(self, tokens: Tensor, times: Tensor, draws: RowDraws) -> Tensor:
        tau = training_tau(times)
        sigma = self.sigma(tau)
        noisy = self.corrupted(tokens, sigma, draws)
        log_score = self.log_scores(noisy, sigma)
        entropy = uniform_loss(log_score, noisy, tokens, matching(sigma[:, None].expand(tokens.shape), log_score))
        return onto(self.sigma_rate(tau), tokens.device) * entropy.mean(-1)

    def row_bounds(self, tokens: Tensor, times: Tensor, draws: RowDraws) -> Tensor:
        """The loss and the divergence of the noisiest law from the uniform one."""
        prior = self.uniform_divergence(math.exp(-self.config.largest_noise))
        return self.row_losses(tokens, times, draws) + prior

    def leap(self, log_score: Tensor, x: Tensor, change: Tensor) -> Tensor:
        K = log_score.shape[-1]
        grown = matching(change.exp(), log_score)
        score = log_score.exp()
        before = score * grown + (1 - grown) / K * score.sum(-1, keepdim=True)
        onehot = torch.nn.functional.one_hot(x, K).to(score)
        return before.clamp_min(0.0) * (onehot / grown + (1 - 1 / grown) / K)

    def euler(self, log_score: Tensor, x: Tensor, amount: Tensor) -> Tensor:
        K = log_score.shape[-1]
        moved = (matching(amount, log_score) / K * log_score.exp()).scatter(-1, x[..., None], 0.0)
        return moved.scatter(-1, x[..., None], 1 - moved.sum(-1, keepdim=True))

    def cooled(self, log_score: Tensor, temperature: float) -> Tensor:
        """Ratios to the power 1/temperature; the token's own stays 1."""
        return log_score / temperature
