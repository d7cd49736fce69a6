"""LangFlow: ConvergeFlow's network trained by cross-entropy alone, table and schedule included (arXiv 2604.11748).

Its own sampler makes one call per step, conditioned on the previous step's prediction, on an even grid of q =
1 - t; with `settings=` it runs under every sampling control of ConvergeFlow, which separates objective from
sampler. The published sampler has no control of its own; `temperature`, off at 1, divides the logits at every call, so
that LangFlow too has a curve between quality and diversity. Two likelihood bounds: `sde` (the diffusion ELBO) and `ode`
(change of variables along the flow, divergence by random probes).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModel

from convergeflow.errors import UserError, unknown_name
from convergeflow.flow.path import sample_path, spread
from convergeflow.flow.schedule import Coefficients, Gumbel
from convergeflow.objective.losses import Objective
from convergeflow.randomness import RowDraws
from convergeflow.sampling.cohort import Observer
from convergeflow.sampling.settings import Settings
from convergeflow.systems.convergeflow import ConvergeFlowConfig, ConvergeFlowModel
from convergeflow.systems.protocol import Bound, Samples

BOUNDS = ("sde", "ode")
_PASSED_ON = ("noise", "clamp", "batch", "want_logits")
"""What `ConvergeFlowModel.sample` takes besides."""

Predict = Callable[[Tensor, Coefficients], Tensor]
"""State [B, L, d] and noise level [B] -> prediction of the data."""
CrossEntropy = Callable[[Tensor, Coefficients], Tensor]
"""The same -> -log p(true token) [B, L]."""


def sde_rows(
    predict: Predict, cross_entropy: CrossEntropy, schedule: Gumbel, x_star: Tensor, times: Tensor, draws: RowDraws
) -> Tensor:
    """Nats per token of each row at one noise level drawn by `times` [B]; the mean over uniform times is a bound.

    CE at the data end + 0.5 e^-gamma / p(gamma) ||x_hat - x||^2 + 0.5 e^-gamma_max ||x||^2.
    """
    rows, length = x_star.shape[:2]
    clean = schedule.at_gamma(torch.full((rows,), schedule.gamma_min, dtype=torch.float64))
    first = cross_entropy(sample_path(x_star, _noise(draws, x_star), clean).x_t, clean).double().mean(-1)
    share = 1 - 2 * schedule.cutoff
    gamma = schedule.gamma(schedule.cutoff + share * times.cpu().double())
    at = schedule.at_gamma(gamma)
    mu = predict(sample_path(x_star, _noise(draws, x_star), at).x_t, at)
    squared = (mu - x_star).double().square().sum((1, 2)).cpu() / length
    density = schedule.log_density(gamma).exp() / share
    middle = 0.5 * (-gamma).exp() / density * squared
    last = (
        0.5
        * torch.exp(torch.tensor(-schedule.gamma_max, dtype=torch.float64))
        * (x_star.double().square().sum((1, 2)).cpu() / length)
    )
    return first.cpu() + middle + last


def ode_rows(
    predict: Predict,
    cross_entropy: CrossEntropy,
    schedule: Gumbel,
    x_star: Tensor,
    draws: RowDraws,
    num_steps: int = 64,
) -> Tensor:
    """Nats per token of each row by integrating dy/dr = x_hat, y = x/sigma, r = alpha/sigma, from data to noise (Heun).

    CE at the data end - integral of the divergence + 0.5 ||y_1||^2 - L d/2. `predict` must keep its whole graph: a
    detached self-condition leaves a part of the divergence out, and the result is no bound any more.
    """
    rows, length = x_star.shape[:2]
    levels = schedule.gamma(torch.linspace(1 - schedule.cutoff, schedule.cutoff, num_steps + 1, dtype=torch.float64))
    points = [schedule.at_gamma(gamma.expand(rows)) for gamma in levels]
    r = torch.exp(-levels / 2)
    start = sample_path(x_star, _noise(draws, x_star), points[0]).x_t
    with torch.no_grad():
        first = cross_entropy(start, points[0]).double().mean(-1).cpu()
    y = start / spread(points[0].sigma, start)

    def field(y: Tensor, at: Coefficients) -> tuple[Tensor, Tensor]:
        sigma = spread(at.sigma, y)
        probe = _noise(draws, y)
        with torch.enable_grad():
            x = (sigma * y).detach().requires_grad_()
            mu = predict(x, at)
            change = torch.autograd.grad((mu * probe.to(mu.dtype)).sum(), x)[0]
        divergence = (change.double() * probe.double() * sigma.double()).sum((1, 2)).cpu()
        return mu.detach().to(y.dtype), divergence

    total = torch.zeros(rows, dtype=torch.float64)
    for i in range(num_steps):
        width = float(r[i + 1] - r[i])
        f_now, d_now = field(y, points[i])
        f_then, d_then = field(y + width * f_now, points[i + 1])
        y = y + 0.5 * width * (f_now + f_then)
        total = total + 0.5 * width * (d_now + d_then)
    size = x_star[0].numel()
    return first + (0.5 * y.double().square().sum((1, 2)).cpu() - total - size / 2) / length


def _noise(draws: RowDraws, like: Tensor) -> Tensor:
    return draws.normal(*like.shape[1:], dtype=torch.float64).to(like)


class LangFlowConfig(ConvergeFlowConfig):
    """ConvergeFlow's, under a type of its own so that a checkpoint comes back with its own sampler."""

    model_type = "convergeflow-langflow"

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**{**kwargs, "method": "langflow"})


class LangFlowModel(ConvergeFlowModel):
    """The weights have ConvergeFlow's names: `--init-from` takes them over for its second stage."""

    config_class = LangFlowConfig

    KNOBS: ClassVar[dict[str, Any]] = {"settings": None, "temperature": 1.0}
    FRONTIER = tuple({"temperature": value} for value in (1.0, 0.95, 0.9, 0.85, 0.8, 0.7))
    bound_kind: ClassVar[str | None] = "sde"

    def __init__(self, config: LangFlowConfig) -> None:
        super().__init__(config)
        if config.predictor != "weighted" or self.learned_schedule is None:
            raise UserError("langflow needs the weighted predictor and a gumbel schedule")
        self.objective, self.fits_schedule = Objective("ce"), True

    def enter_stage(self, stage: Any) -> None:
        """Cross-entropy, with table and schedule learned, whatever the stage says."""
        self.objective = Objective(
            "ce", stage.self_condition, stage.position_noise, stage.clean_context, self.config.block_length
        )
        self.requires_grad_(True)
        self.fits_schedule = True

    def sample(
        self,
        num: int,
        length: int,
        *,
        seeds: Sequence[int],
        nfe: int = 64,
        observe: Observer | None = None,
        settings: Settings | None = None,
        temperature: float = 1.0,
        **controls: Any,
    ) -> Samples:
        """LangFlow's own sampler, or any `settings` of ConvergeFlow's (whose nfe wins)."""
        for name in controls:
            if name not in _PASSED_ON:
                raise unknown_name("sampling control of langflow", name, [*self.KNOBS, *_PASSED_ON])
        own = Settings(nfe=nfe, self_condition="previous", grid="langflow")
        chosen = settings or own
        chosen = chosen if temperature == 1.0 else replace(chosen, temperature=temperature)
        return super().sample(num, length, seeds=seeds, observe=observe, settings=chosen, **controls)

    def bound(
        self, tokens: Tensor, *, draws: RowDraws, repeats: int = 8, kind: str = "sde", num_steps: int = 64
    ) -> Bound:
        """An upper bound on -log p(tokens) in nats per token, self-conditioned by two passes."""
        if kind not in BOUNDS:
            raise unknown_name("bound", kind, BOUNDS)
        if self.config.block_length is not None:
            raise UserError("langflow's own bounds are for whole sequences: use evaluation.likelihood.bound for blocks")
        schedule = self.schedule
        assert isinstance(schedule, Gumbel)
        was_training = self.training
        self.eval()
        with torch.no_grad():
            table = self.network.embedding.rows()
        x_star = torch.nn.functional.embedding(tokens, table)

        def predict(x: Tensor, at: Coefficients) -> Tensor:
            first = self.network(x, at, table=table).weigh(x, at).mu
            return self.network(x, at, first, table=table).weigh(x, at).mu

        def cross_entropy(x: Tensor, at: Coefficients) -> Tensor:
            first = self.network(x, at, table=table).weigh(x, at).mu
            found = self.network(x, at, first, table=table).weigh(x, at, targets=tokens)
            assert found.cross_entropy is not None
            return found.cross_entropy

        rows = []
        for k in range(repeats):
            if kind == "ode":
                rows.append(ode_rows(predict, cross_entropy, schedule, x_star, draws, num_steps))
            else:
                with torch.no_grad():
                    times = (k + draws.uniform()) / repeats
                    rows.append(sde_rows(predict, cross_entropy, schedule, x_star, times, draws))
        self.train(was_training)
        mean = torch.stack(rows).mean(0)
        error = float(mean.std() / len(mean) ** 0.5) if len(mean) > 1 else float("nan")
        return Bound(float(mean.mean()), error, repeats, kind, tokens.numel())


AutoConfig.register(LangFlowConfig.model_type, LangFlowConfig)
AutoModel.register(LangFlowConfig, LangFlowModel)
