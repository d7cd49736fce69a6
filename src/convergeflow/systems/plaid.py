"""Plaid: diffusion on low-dimensional token embeddings, trained by its likelihood (Gulrajani & Hashimoto 2023).

tau = 0 is data, tau = 1 noise; gamma(tau) is a learned monotone function. The loss is the ELBO: cross-entropy at tau =
0, -0.5 SNR' ||x_hat - x||^2 in between, and the divergence at tau = 1. The predictor is the one that ConvergeFlow took
over: softmax(head + (alpha/sigma^2) <z, e_j>) weights unit-norm embeddings. The trunk is the package's shared one: the
noise level enters by modulation, not as an added input. Rows are at tau = 0 or in between by a threshold on the
trainer's stratified times.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from convergeflow.device import onto, state_dtype_of, widest
from convergeflow.errors import UserError
from convergeflow.model.fused import Weighted, weigh
from convergeflow.model.views import WHOLE
from convergeflow.objective.losses import Loss
from convergeflow.randomness import RowDraws
from convergeflow.systems.rival import Rival, RivalConfig, Run, trunk, words_before, zero_linear

STATISTICS_DECAY = 0.997
KERNEL_RAMP = 0.05
"""Share of the first stage over which the kernel term grows to its exact size (reference: 5000 of 92000 steps)."""
LEAST_SHARE = 1 / 16
"""Neither kind of row may vanish from the batch."""


class MonotoneSchedule(nn.Module):
    """gamma(tau) = g0 + (g1 - g0) n(tau), n a normalised sum of increasing tanh steps; float64 where there is one."""

    def __init__(self, hidden: int, start: float = -3.0, end: float = 6.0) -> None:
        super().__init__()
        self.rate = nn.Parameter(torch.randn(hidden))
        self.shift = nn.Parameter(torch.randn(hidden))
        self.height = nn.Parameter(torch.randn(hidden))
        self.bounds = nn.Parameter(torch.tensor([start, end]))

    def shape(self, tau: Tensor) -> tuple[Tensor, Tensor]:
        """n(tau) in [0, 1] and its derivative."""
        rate = functional.softplus(widest(self.rate))
        height = 0.01 * functional.softplus(widest(self.height))
        shift = widest(self.shift)

        def total(at: Tensor) -> tuple[Tensor, Tensor]:
            step = torch.tanh(rate * (at[..., None] - 0.5) + shift)
            return (height * step).sum(-1), (height * rate * (1 - step.square())).sum(-1)

        ends, _ = total(torch.arange(2, dtype=rate.dtype, device=rate.device))
        value, slope = total(widest(tau))
        span = ends[1] - ends[0]
        return (value - ends[0]) / span, slope / span

    def forward(self, tau: Tensor, emphasis: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """gamma and d gamma/d tau; `emphasis` [B] multiplies the gradient that reaches the shape, row by row.

        It is read in the backward pass, so it may be filled in after the forward pass.
        """
        value, slope = self.shape(tau)
        if emphasis is not None and value.requires_grad:
            for each in (value, slope):
                each.register_hook(lambda gradient: gradient * emphasis)
        low, high = widest(self.bounds).unbind()
        return low + (high - low) * value, (high - low) * slope


@dataclass(frozen=True)
class Level:
    """alpha, sigma, gamma of some rows, [B]."""

    gamma: Tensor

    @property
    def alpha(self) -> Tensor:
        return torch.sigmoid(-self.gamma).sqrt()

    @property
    def sigma(self) -> Tensor:
        return torch.sigmoid(self.gamma).sqrt()

    @property
    def kernel(self) -> Tensor:
        """alpha/sigma^2 in a form that keeps its digits."""
        return torch.exp(0.5 * (functional.softplus(-self.gamma) - self.gamma))


class PlaidNetwork(nn.Module):
    """State [B, L, D] and earlier prediction to the trunk's output; the table and the readout live here too."""

    def __init__(self, config: PlaidConfig) -> None:
        super().__init__()
        D = config.dimension
        self.embedding = UnitTable(config.vocabulary, D)
        self.enter = nn.Linear(D, config.width, bias=False)
        self.enter_condition = zero_linear(D, config.width, bias=False)
        self.before = words_before(config)
        self.backbone = trunk(config)
        self.head = zero_linear(config.width, config.vocabulary)

    def forward(self, z: Tensor, at: Level, condition: Tensor) -> Tensor:
        D = z.shape[-1]
        scale = (at.alpha.square() / D + at.sigma.square()).rsqrt()[:, None, None]
        dtype = self.enter.weight.dtype
        with torch.autocast(z.device.type, enabled=False):
            h = self.enter((z * scale).to(dtype)) + self.enter_condition(D**0.5 * condition.to(dtype))
            h = h if self.before is None else h + self.before(h, WHOLE)
        return self.backbone(h, at.gamma)


class UnitTable(nn.Module):
    """A row of norm 1 per token."""

    def __init__(self, vocabulary: int, dimension: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(vocabulary, dimension))

    def rows(self) -> Tensor:
        return functional.normalize(self.weight.float(), dim=-1)


@dataclass(frozen=True)
class PlaidConfig(RivalConfig):
    dimension: int = 16
    schedule_hidden: int = 1024
    self_condition: float = 0.25


class PlaidModel(Rival):
    """Embedding diffusion with a learned schedule."""

    method = "plaid"
    takes_known = False
    config_class = PlaidConfig
    network_class: type[Any] = PlaidNetwork
    bound_kind = "diffusion ELBO"
    controls: Mapping[str, Any] = {"temperature": 0.9, "step": "ancestral"}
    choices: Mapping[str, Any] = {"step": ("ancestral", "ddim")}
    frontier = tuple({"temperature": value} for value in (0.9, 1.0, 0.95, 0.85, 0.8, 0.75))

    def __init__(self, config: PlaidConfig) -> None:
        super().__init__(config)
        self.network = self.network_class(config)
        self.noise_schedule = MonotoneSchedule(config.schedule_hidden)
        # Mean and mean square of the reconstruction and the diffusion losses, with their weight.
        self.register_buffer("statistics", torch.zeros(2, 3, dtype=torch.float64))

    statistics: Tensor
    network: PlaidNetwork

    @property
    def kernel_scale(self) -> Tensor:
        """Grows from 0 to 1 at the start of training; 1 for a model that was never trained here."""
        grown = (widest(self.passes) / (KERNEL_RAMP * self.horizon)).clamp(max=1.0)
        return torch.where(self.horizon == 0, 1.0, grown)

    def read_out(
        self, h: Tensor, z: Tensor, at: Level, table: Tensor, targets: Tensor | None = None, token: bool = False
    ) -> Weighted:
        """Weights of the tokens and x_hat = sum_j w_j e_j."""
        kernel = self.kernel_scale * at.kernel[:, None]
        head = self.network.head
        return weigh(h, head.weight, head.bias, z, kernel, table, targets=targets, token=token)

    def predict(self, z: Tensor, at: Level, condition: Tensor, **wanted: Any) -> Weighted:
        """One network call."""
        return self.read_out(self.network(z, at, condition), z, at, self.network.embedding.rows(), **wanted)

    def reconstruction_share(self) -> Tensor:
        """Rows at tau = 0 in proportion to the standard deviation of their loss; a scalar on the model's device."""
        seen = self.statistics[:, 2:]
        mean, square, _ = (self.statistics / seen).unbind(1)
        deviation = (square - mean.square()).clamp_min(1e-12).sqrt()
        share = (deviation[0] / deviation.sum()).clamp(LEAST_SHARE, 1 - LEAST_SHARE)
        return torch.where(seen.min() == 0.0, 0.5, share)

    def loss(self, tokens: Tensor, *, times: Tensor, draws: RowDraws) -> Loss:
        """Rows with a time below the reconstruction share are at tau = 0, the others spread over (0, 1)."""
        if self.training:
            self.count_pass()
        times = onto(times, tokens.device)
        share = self.reconstruction_share() if self.training else torch.full_like(times[0], 0.5)
        clean = times < share
        tau = torch.where(clean, torch.zeros_like(times), (times - share) / (1 - share))
        conditioned = draws.uniform() < self.config.self_condition
        # Gradients times 2 loss_i: the schedule's shape then descends E[loss^2], that is, the variance of the loss.
        emphasis = torch.zeros_like(times)
        rows, prior = self.parts(tokens, tau, clean, conditioned, draws, emphasis)
        emphasis.copy_(torch.where(clean, 0.0, 2 * rows.detach()))
        if self.training:
            self._remember(rows.detach(), clean)
        weighted = torch.where(clean, rows / share, rows / (1 - share))
        report = {
            "reconstruction_share": share,
            "gamma_0": self.noise_schedule.bounds[0].detach(),
            "gamma_1": self.noise_schedule.bounds[1].detach(),
        }
        return Loss((weighted + prior).mean(), report)

    def parts(
        self,
        tokens: Tensor,
        tau: Tensor,
        clean: Tensor,
        conditioned: Tensor,
        draws: RowDraws,
        emphasis: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Per row, cross-entropy (where `clean`) or diffusion term, and the divergence at tau = 1; nats per token.

        Which rows are `conditioned` is known on the CPU; everything else is on the model's device.
        """
        device = tokens.device
        parts = [onto(mask.nonzero()[:, 0], device) for mask in (conditioned, ~conditioned)]
        conditioned = onto(conditioned, device)
        gamma, slope = self.noise_schedule(tau, emphasis)
        end = Level(self.noise_schedule(torch.ones_like(tau[:1]))[0])
        table = self.network.embedding.rows()
        # Self-conditioned rows train the network alone: it saw a prediction that the schedule and table had shaped.
        level = Level(torch.where(conditioned, gamma.detach(), gamma))
        slope = torch.where(conditioned, slope.detach(), slope)
        x = widest(functional.embedding(tokens, table))
        x = torch.where(conditioned[:, None, None], x.detach(), x)
        noise = draws.normal(*x.shape[1:], dtype=x.dtype).to(x)
        z = level.alpha[:, None, None] * x + level.sigma[:, None, None] * noise
        condition = torch.zeros_like(x)
        if len(active := parts[0]):
            with torch.no_grad():
                condition[active] = self.predict(z[active], Level(level.gamma[active]), condition[active]).mu.to(x)
        h = self.network(z, level, condition)
        mu, nll = torch.zeros_like(x), torch.zeros(tokens.shape, dtype=x.dtype, device=x.device)
        for rows, rows_table in zip(parts, (table.detach(), table), strict=True):
            if len(rows):
                out = self.read_out(h[rows], z[rows], Level(level.gamma[rows]), rows_table, targets=tokens[rows])
                assert out.cross_entropy is not None
                mu = mu.index_put((rows,), out.mu.to(mu))
                nll = nll.index_put((rows,), out.cross_entropy.to(nll))
        diffusion = 0.5 * torch.exp(-level.gamma) * slope * (mu - x).square().sum(-1).mean(-1)
        alpha_1 = torch.where(conditioned, end.alpha.detach(), end.alpha)
        sigma_1 = end.sigma.square()
        prior = 0.5 * (alpha_1.square() * x.square().sum(-1).mean(-1) + x.shape[-1] * (sigma_1 - 1 - sigma_1.log()))
        return torch.where(clean, nll.mean(-1), diffusion), prior

    def _remember(self, rows: Tensor, clean: Tensor) -> None:
        for kind, mask in enumerate((clean, ~clean)):
            count = mask.sum()
            found = torch.stack([rows, rows.square(), torch.ones_like(rows)]).where(mask, 0.0)
            seen = (found.sum(-1) / count.clamp_min(1)).to(self.statistics)
            # Without such a row nothing was seen.
            self.statistics[kind].lerp_(seen, torch.where(count > 0, 1 - STATISTICS_DECAY, 0.0).to(seen))

    def row_losses(self, tokens: Tensor, times: Tensor, draws: RowDraws) -> Tensor:
        """The whole ELBO with one time per row, self-conditioned on all rows."""
        tau, conditioned = onto(times, tokens.device), torch.ones(len(tokens), dtype=torch.bool)
        clean = torch.ones_like(tau, dtype=torch.bool)
        reconstruction, prior = self.parts(tokens, torch.zeros_like(tau), clean, conditioned, draws)
        diffusion, _ = self.parts(tokens, tau, ~clean, conditioned, draws)
        return reconstruction + diffusion + prior

    def generate_batch(self, run: Run, *, temperature: float, step: str) -> Tensor:  # type: ignore[override]
        """nfe - 1 calls along tau = 1 .. 0, then one at gamma_0 to decode; temperature divides the noise estimate."""
        if not 1e-3 <= temperature <= 1e3:
            raise UserError(f"plaid's score temperature must be positive, 0.001 to 1000, not {temperature}")
        if run.nfe < 3:
            raise UserError("plaid needs at least 3 network calls: two grid points and the decoding")
        T = run.nfe - 1
        dtype = state_dtype_of(run.device)
        z = run.draws.normal(run.length, self.config.dimension, dtype=dtype)
        condition = torch.zeros_like(z)
        for i, tau in enumerate(torch.linspace(1, 0, T, dtype=torch.float64).tolist()):
            now = self._level(tau, run)
            out = self.predict(z, now, condition, token=True)
            assert out.token is not None
            condition = x_hat = out.mu.to(z)
            run.report(i, run.nfe, 1 - tau, out.token)
            if tau == 0.0:
                break
            # The reference steps by 1/T on a grid of spacing 1/(T - 1); kept.
            then = self._level(tau - 1 / T, run)
            fresh = run.draws.normal(run.length, self.config.dimension, dtype=dtype)
            z = reverse_step(z, x_hat, now, then, temperature, fresh if step == "ancestral" else None)
        final = self.predict(z, self._level(0.0, run), condition, token=True)
        assert final.token is not None
        run.report(T, run.nfe, 1.0, final.token)
        return final.token

    def _level(self, tau: float, run: Run) -> Level:
        at = torch.full((1,), tau, dtype=state_dtype_of(run.device), device=run.device)
        return Level(self.noise_schedule(at)[0].expand(run.rows))


def reverse_step(z: Tensor, x_hat: Tensor, now: Level, then: Level, temperature: float, fresh: Tensor | None) -> Tensor:
    """From gamma_t to gamma_s: ancestral with the noise `fresh`, deterministic (DDIM) without."""
    alpha_t, sigma_t = now.alpha[:, None, None], now.sigma[:, None, None]
    alpha_s, sigma_s = then.alpha[:, None, None], then.sigma[:, None, None]
    epsilon = (z - alpha_t * x_hat) / sigma_t / temperature
    x_hat = (z - sigma_t * epsilon) / alpha_t
    if fresh is None:
        return alpha_s * x_hat + sigma_s * epsilon
    c = -torch.expm1(then.gamma - now.gamma)[:, None, None]
    return z * (1 - c) * alpha_s / alpha_t + c * alpha_s * x_hat + (c * sigma_s.square()).sqrt() * fresh
