"""SEDD: score entropy discrete diffusion, absorbing and uniform (Lou et al. 2024, arXiv 2310.16834).

tau = 0 is data, tau = 1 noise. The network gives log scores log s_y ~ log p_tau(y)/p_tau(x) of changing the
token x into y; the loss is the score entropy sigma' sum_y Q(y -> x) [s_y - r_y log s_y + r_y (log r_y - 1)],
r_y = p(y|x0)/p(x|x0), averaged over positions. Both graphs share the samplers: `analytic` (Tweedie tau-
leaping) and `euler`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from convergeflow.errors import UserError, unknown_name
from convergeflow.randomness import RowDraws
from convergeflow.systems.categorical import check_temperature, draw
from convergeflow.systems.mdlm import FLOOR, LAST_TIME, hide, kept_share, put_back, training_tau
from convergeflow.systems.rival import TEMPERATURES, Rival, RivalConfig, Run, TokenNetwork

STEPS = ("analytic", "euler")


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


class SeddModel(Rival):
    """What both graphs share: the samplers' loop."""

    controls: Mapping[str, Any] = {"temperature": 1.0, "step": "analytic"}
    frontier = TEMPERATURES

    def sigma(self, tau: Tensor) -> Tensor:
        """Total noise up to tau."""
        raise NotImplementedError

    def sigma_rate(self, tau: Tensor) -> Tensor:
        """d sigma / d tau."""
        raise NotImplementedError

    def start(self, run: Run) -> Tensor:
        """Tokens at tau = 1."""
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

    def cooled(self, log_score: Tensor, x: Tensor, temperature: float) -> Tensor:
        """Scores at another temperature."""
        raise NotImplementedError

    def generate_batch(self, run: Run, *, temperature: float, step: str) -> Tensor:  # type: ignore[override]
        """nfe - 1 steps on an even grid, then one call that takes away the rest of the noise."""
        if step not in STEPS:
            raise unknown_name("step", step, STEPS)
        check_temperature(temperature)
        if temperature == 0.0:
            raise UserError("scores have no most likely token at temperature 0; give a small temperature instead")
        num_steps = run.nfe - 1
        grid = torch.linspace(1.0, LAST_TIME, num_steps + 1, dtype=torch.float64)
        x = run.known.put(self.start(run))
        for i in range(num_steps):
            log_score = self._scores_at(x, grid[i], temperature)
            if step == "analytic":
                weights = self.leap(log_score, x, self.sigma(grid[i]) - self.sigma(grid[i + 1]))
            else:
                weights = self.euler(log_score, x, (grid[i] - grid[i + 1]) * self.sigma_rate(grid[i]))
            x = run.known.put(draw(weights.clamp_min(0.0).log(), run.draws))
            run.report(i, run.nfe, float(1 - grid[i]), x)
        weights = self.leap(self._scores_at(x, grid[-1], temperature), x, self.sigma(grid[-1]))
        weights = weights[..., : self.config.vocabulary].clamp_min(0.0)  # no mask may remain
        x = run.known.put(draw(weights.log(), run.draws))
        run.report(num_steps, run.nfe, 1.0, x)
        return x

    def _scores_at(self, x: Tensor, tau: Tensor, temperature: float) -> Tensor:
        sigma = self.sigma(tau).to(x.device).expand(len(x))
        return self.cooled(self.log_scores(x, sigma).double(), x, temperature)


class SeddAbsorbModel(SeddModel):
    """Tokens jump to a mask and stay there; log-linear noise."""

    method = "sedd-absorb"
    bound_kind = "score-entropy ELBO (the 1e-3 of unmasked tokens at the start is ignored)"

    def __init__(self, config: RivalConfig) -> None:
        super().__init__(config)
        self.network = TokenNetwork(config, inputs=config.vocabulary + 1, outputs=config.vocabulary)

    @property
    def mask(self) -> int:
        return self.config.vocabulary

    def sigma(self, tau: Tensor) -> Tensor:
        return -kept_share(tau).log()

    def sigma_rate(self, tau: Tensor) -> Tensor:
        return (1.0 - FLOOR) / kept_share(tau)

    def start(self, run: Run) -> Tensor:
        return torch.full((run.rows, run.length), self.mask, device=run.device)

    def log_scores(self, x: Tensor, sigma: Tensor, positions: Tensor | None = None) -> Tensor:
        """Scores of leaving the mask; a fresh model gives each token the same share of rho."""
        out = self.network(x, sigma, positions).float()
        scale = torch.expm1(sigma).log() + math.log(self.config.vocabulary)
        scale = scale.to(out)[:, None, None].expand(*x.shape, 1)
        return out - (scale if positions is None else scale.flatten(0, 1)[positions])

    def row_losses(self, tokens: Tensor, times: Tensor, draws: RowDraws) -> Tensor:
        tau = training_tau(times)
        sigma = self.sigma(tau)
        noisy, hidden = hide(tokens, draws.uniform(tokens.shape[1]) > kept_share(tau)[:, None], self.mask)
        log_score = self.log_scores(noisy, sigma, hidden)
        levels = sigma.to(log_score)[:, None].expand(tokens.shape).flatten()[hidden]
        entropy = absorb_loss(log_score, tokens.flatten()[hidden], levels)
        return self.sigma_rate(tau).to(tokens.device) * put_back(entropy, hidden, tokens.shape).mean(-1)

    def leap(self, log_score: Tensor, x: Tensor, change: Tensor) -> Tensor:
        grown = change.exp().to(log_score)
        score = log_score.exp()
        tokens = grown * score * (1 - 1 / grown)
        stay = grown + (1 - grown) * (score.sum(-1, keepdim=True) + 1)  # the mask's own score is 1
        return self._carry_over(torch.cat([tokens, stay], dim=-1), x)

    def euler(self, log_score: Tensor, x: Tensor, amount: Tensor) -> Tensor:
        moved = amount.to(log_score) * log_score.exp()
        return self._carry_over(torch.cat([moved, 1 - moved.sum(-1, keepdim=True)], dim=-1), x)

    def _carry_over(self, weights: Tensor, x: Tensor) -> Tensor:
        certain = torch.nn.functional.one_hot(x, weights.shape[-1]).to(weights)
        return torch.where((x == self.mask)[..., None], weights, certain)

    def cooled(self, log_score: Tensor, x: Tensor, temperature: float) -> Tensor:
        """Which token is chosen is cooled; how often a mask is left, the sum of the scores, is not."""
        total = log_score.logsumexp(-1, keepdim=True)
        return (log_score / temperature).log_softmax(-1) + total


@dataclass(frozen=True)
class SeddUniformConfig(RivalConfig):
    smallest_noise: float = 1e-4
    largest_noise: float = 20.0


class SeddUniformModel(SeddModel):
    """Tokens are replaced by uniform ones; geometric noise."""

    method = "sedd-uniform"
    config_class = SeddUniformConfig
    bound_kind = "score-entropy ELBO"

    def __init__(self, config: SeddUniformConfig) -> None:
        super().__init__(config)
        self.network = TokenNetwork(config, inputs=config.vocabulary, outputs=config.vocabulary)

    def sigma(self, tau: Tensor) -> Tensor:
        return self.config.smallest_noise ** (1 - tau) * self.config.largest_noise**tau

    def sigma_rate(self, tau: Tensor) -> Tensor:
        return self.sigma(tau) * math.log(self.config.largest_noise / self.config.smallest_noise)

    def start(self, run: Run) -> Tensor:
        shape = (run.rows, run.length, self.config.vocabulary)
        return draw(torch.zeros((), device=run.device).expand(shape), run.draws)

    def log_scores(self, x: Tensor, sigma: Tensor) -> Tensor:
        return self.network(x, sigma).float().scatter(-1, x[..., None], 0.0)

    def corrupted(self, tokens: Tensor, sigma: Tensor, draws: RowDraws) -> Tensor:
        """With probability 1 - e^-sigma a token becomes a uniform one, possibly itself."""
        length, K = tokens.shape[1], self.config.vocabulary
        moved = draws.uniform(length) < -torch.expm1(-sigma)[:, None]
        other = (draws.uniform(length) * K).long().clamp_max(K - 1)
        return torch.where(moved.to(tokens.device), other.to(tokens.device), tokens)

    def row_losses(self, tokens: Tensor, times: Tensor, draws: RowDraws) -> Tensor:
        tau = training_tau(times)
        sigma = self.sigma(tau)
        noisy = self.corrupted(tokens, sigma, draws)
        log_score = self.log_scores(noisy, sigma)
        entropy = uniform_loss(log_score, noisy, tokens, sigma[:, None].expand(tokens.shape).to(log_score))
        return self.sigma_rate(tau).to(tokens.device) * entropy.mean(-1)

    def row_bounds(self, tokens: Tensor, times: Tensor, draws: RowDraws) -> Tensor:
        """The loss and the divergence of the noisiest law from the uniform one."""
        K = self.config.vocabulary
        kept = math.exp(-self.config.largest_noise)
        own, other = kept + (1 - kept) / K, (1 - kept) / K
        prior = own * math.log(own * K) + (K - 1) * other * math.log(other * K)
        return self.row_losses(tokens, times, draws) + prior

    def leap(self, log_score: Tensor, x: Tensor, change: Tensor) -> Tensor:
        K = log_score.shape[-1]
        grown = change.exp().to(log_score)
        score = log_score.exp()
        before = score * grown + (1 - grown) / K * score.sum(-1, keepdim=True)
        onehot = torch.nn.functional.one_hot(x, K).to(score)
        return before.clamp_min(0.0) * (onehot / grown + (1 - 1 / grown) / K)

    def euler(self, log_score: Tensor, x: Tensor, amount: Tensor) -> Tensor:
        K = log_score.shape[-1]
        moved = (amount.to(log_score) / K * log_score.exp()).scatter(-1, x[..., None], 0.0)
        return moved.scatter(-1, x[..., None], 1 - moved.sum(-1, keepdim=True))

    def cooled(self, log_score: Tensor, x: Tensor, temperature: float) -> Tensor:
        """Ratios to the power 1/temperature; the token's own stays 1."""
        return log_score / temperature
