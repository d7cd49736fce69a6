"""Exact predictors for tests: a known prior over independent tokens, so that the weights are the true posterior."""

from __future__ import annotations

from copy import copy

import torch
from torch import Tensor

from convergeflow.flow.path import spread
from convergeflow.flow.schedule import Coefficients, Schedule
from convergeflow.model.embedding import normalise_rows
from convergeflow.model.head import Weighted, kernel_scores, logits, weigh
from convergeflow.model.network import BaseLogits


class ExactPredictor:
    """mu = E[x* | x_t] for tokens drawn independently from `prior` at every position; counts its calls."""

    def __init__(self, prior: Tensor, width: int, schedule: Schedule, seed: int = 90_210) -> None:
        # Not a seed that a test gives to its noise: table and noise would be one stream.
        generator = torch.Generator().manual_seed(seed)
        raw = torch.randn(len(prior), width, generator=generator, dtype=torch.float64)
        self.table = normalise_rows(raw)
        self.log_prior = prior.double().log()
        self.schedule = schedule
        self.temperature = 1.0
        self.calls = 0
        self.batches: list[int] = []

    def tempered(self, temperature: float, base_temperature: float) -> ExactPredictor:
        other = copy(self)
        other.temperature, other.log_prior = temperature, self.log_prior / base_temperature
        return other

    def base(self, x_t: Tensor, at: Coefficients, condition: Tensor | None) -> BaseLogits:
        self.calls += 1
        head = torch.nn.Linear(1, len(self.table), dtype=self.table.dtype)
        with torch.no_grad():
            head.weight.zero_()
            head.bias.copy_(self.log_prior)
        return BaseLogits(head, self.table.new_zeros(*x_t.shape[:-1], 1), None, self.table, self.temperature)

    def parts(self, x_t: Tensor, at: Coefficients) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        x = x_t.to(self.table)
        nothing = x.new_zeros(*x.shape[:-1], 1)
        kernel = spread(at.kernel, x)[..., 0].expand(x.shape[:-1])
        T = self.temperature
        return nothing, x.new_zeros(len(self.table), 1), self.log_prior / T, x, kernel / T

    def __call__(
        self,
        x_t: Tensor,
        at: Coefficients,
        condition: Tensor | None,
        *,
        details: bool = False,
        scores: Tensor | None = None,
        positions: Tensor | None = None,
    ) -> Weighted:
        self.calls += 1
        self.batches.append(len(x_t))
        h, weight, bias, x, kernel = self.parts(x_t, at)
        if positions is not None:
            h, x, kernel = h[positions], x[positions], kernel[positions]
            scores = None if scores is None else scores[positions]
        return weigh(h, weight, bias, x, kernel, self.table, token=details, top_weight=details, scores=scores)

    def scores(self, x_t: Tensor) -> Tensor | None:
        return kernel_scores(x_t.to(self.table), self.table)

    def logits(self, x_t: Tensor, at: Coefficients, condition: Tensor | None) -> Tensor:
        h, weight, bias, x, kernel = self.parts(x_t, at)
        return logits(h, weight, bias, x, kernel, self.table)
