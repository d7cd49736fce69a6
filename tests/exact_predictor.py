"""Exact predictors for tests: a known prior over independent tokens, so that the weights are the true posterior."""

from __future__ import annotations

import torch
from torch import Tensor

from convergeflow.flow.schedule import Coefficients, Schedule
from convergeflow.model.embedding import normalise_rows
from convergeflow.model.head import LogF, context_free


class ExactPredictor:
    """mu = E[x* | x_t] for tokens drawn independently from `prior` at every position; counts its calls."""

    def __init__(self, prior: Tensor, width: int, schedule: Schedule, seed: int = 90_210) -> None:
        # Not a seed that a test gives to its noise: table and noise would be one stream.
        generator = torch.Generator().manual_seed(seed)
        raw = torch.randn(len(prior), width, generator=generator, dtype=torch.float64)
        self.table = normalise_rows(raw)
        self.log_prior = prior.double().log()
        self.schedule = schedule
        self.calls = 0
        self.batches: list[int] = []

    def __call__(self, x: Tensor, at: Coefficients, condition: Tensor | None) -> LogF:
        self.calls += 1
        self.batches.append(len(x))
        return context_free(self.log_prior, x.to(self.table), self.table)
